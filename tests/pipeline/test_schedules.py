"""Each order idles and holds what its closed form says, and is PyTorch's where PyTorch has it."""

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from refimpl.pipeline.instructions import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule
from refimpl.pipeline.named_schedules import BUILDERS, OF_EVERY_RANK, idle_time, in_flight, schedule
from refimpl.pipeline.step_simulation import Costs, simulate
from refimpl.pipeline.validate import validate

SIZES = [(p, times * p) for p in (2, 4, 8) for times in (2, 4)]
EQUAL, UNEQUAL = (1, 1, 1), [(4, 5, 3), (5, 1, 1), (1, 5, 1), (1, 1, 5), (1, 10, 9), (10, 1, 9), (2, 2, 3)]
OF_ALL_SIZES = pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
OF_FEW_SIZES = pytest.mark.parametrize(("ranks", "micro_batches"), SIZES[:4])


def idle(built, costs=EQUAL):
    """Idle time of each rank where a rank's stages cost F, B, W together, exactly."""
    chunks = built.stages // len(built.ranks)
    return list(simulate(built, Costs(*(Fraction(cost, chunks) for cost in costs))).idle)


def idle_times(name, ranks, *costs, **how):
    return [idle_time(name, ranks, *costs, rank=r, **how) for r in range(ranks)]


def peaks(built):
    """The most activations that each rank has."""
    return [count.peak for count in validate(built)]


def in_flights(name, ranks, micro_batches, *chunks):
    return [in_flight(name, ranks, micro_batches, r, *chunks) for r in range(ranks)]


@pytest.mark.core
@pytest.mark.parametrize("name", BUILDERS)
@OF_ALL_SIZES
def test_idle_times_and_counts_are_those_of_the_closed_forms(name, ranks, micro_batches):
    built = schedule(name, ranks, micro_batches)
    read = idle(built)
    assert max(read) == read[0] == idle_time(name, ranks)
    assert name not in OF_EVERY_RANK or read == idle_times(name, ranks)
    assert peaks(built) == in_flights(name, ranks, micro_batches)


def test_the_closed_forms_are_the_published_ones():
    """Of rank 0, p = 4, m = 8, all costs 1: written out, so that an error in both forms and orders shows."""
    published = {"gpipe": 9, "1f1b": 9, "interleaved": 4.5, "zb-h1": 3, "zb-h2": 0, "interleaved-zero-bubble": 1.5,
                 "zb-v": 0, "dualpipe-v": 1.5}
    counts = {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1], "interleaved": [11, 9, 7, 5], "zb-h1": [4] * 4, "zb-h2": [7] * 4,
              "interleaved-zero-bubble": [8] * 4, "zb-v": [8] * 4, "dualpipe-v": [9] * 4}
    assert {name: idle_time(name, 4) for name in BUILDERS} == published
    assert {name: in_flights(name, 4, 8) for name in BUILDERS} == counts and idle_times("1f1b", 4) == [9, 6, 3, 0]


@pytest.mark.parametrize("name", OF_EVERY_RANK)
@pytest.mark.parametrize("costs", UNEQUAL)
@OF_FEW_SIZES
def test_idle_times_at_other_costs(name, costs, ranks, micro_batches):
    assert idle(schedule(name, ranks, micro_batches), costs) == idle_times(name, ranks, *costs)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zero-bubble"])
@OF_FEW_SIZES
def test_any_number_of_chunks(name, chunks, ranks, micro_batches):
    built = schedule(name, ranks, micro_batches, chunks)
    assert built.stages == ranks * chunks
    for costs in (EQUAL, (4, 5, 3)):
        assert idle(built, costs) == idle_times(name, ranks, *map(Fraction, costs), chunks=chunks)
    assert peaks(built) == in_flights(name, ranks, micro_batches, chunks)


@pytest.mark.core
@OF_ALL_SIZES
def test_zb_v_idles_a_tenth_of_1f1b_at_its_peak(ranks, micro_batches):
    v, one = schedule("zb-v", ranks, micro_batches), schedule("1f1b", ranks, micro_batches)
    assert max(idle(v)) <= max(idle(one)) / 10 and max(peaks(v)) / 2 <= max(peaks(one))


@pytest.mark.parametrize("name", BUILDERS)
@given(ranks=st.integers(1, 9), micro_batches=st.integers(1, 30), chunks=st.integers(1, 4))
def test_any_number_of_ranks_and_micro_batches_is_valid(name, ranks, micro_batches, chunks):
    built = schedule(name, ranks, micro_batches, chunks if "interleaved" in name else None)
    counts = peaks(built)
    assert built.micro_batches == micro_batches and len(built.ranks) == ranks
    assert name not in ("gpipe", "1f1b", "zb-h1") or counts == in_flights(name, ranks, micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 1), (4, 2), (4, 3), (8, 5), (2, 1), (1, 1), (1, 6)])
def test_fewer_micro_batches_than_ranks(ranks, micro_batches):
    for name in ("gpipe", "1f1b"):
        built = schedule(name, ranks, micro_batches)
        most = [micro_batches if name == "gpipe" else ranks - r for r in range(ranks)]
        assert peaks(built) == [min(micro_batches, each) for each in most]
        assert max(idle(built)) == idle_time(name, ranks) == 3 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("name", "least"), [
    ("gpipe", 1), ("1f1b", 1), ("zb-h1", "p"), ("zb-h2", "2p-1"), ("zb-v", "2p"), ("dualpipe-v", "2p"),
    ("interleaved", "multiples"), ("interleaved-zero-bubble", "multiples")])
def test_idle_times_hold_from_as_many_micro_batches_as_is_said(name, least, ranks):
    holds = {m for m in range(1, 4 * ranks + 1) if idle(schedule(name, ranks, m))[0] == idle_time(name, ranks)}
    first = {1: 1, "p": ranks, "2p-1": 2 * ranks - 1, "2p": 2 * ranks, "multiples": ranks}[least]
    assert holds == set(range(first, 4 * ranks + 1, ranks if least == "multiples" else 1))


@pytest.mark.parametrize("name", BUILDERS)
@given(ranks=st.integers(1, 6), more=st.integers(0, 12), chunks=st.integers(1, 4))
def test_counts_hold_from_twice_as_many_micro_batches_as_ranks(name, ranks, more, chunks):
    m, chunks = 2 * ranks + more, chunks if "interleaved" in name else None
    assert peaks(schedule(name, ranks, m, chunks)) == in_flights(name, ranks, m, chunks)


def test_few_micro_batches_count_their_own():
    """At m = p = 4, where the closed forms do not hold; PyTorch's DualPipe-V refuses these."""
    assert idle(schedule("zb-v", 4, 4))[0] * 2 == 6
    assert [max(peaks(schedule(name, 4, 4))) for name in ("interleaved", "zb-h2", "dualpipe-v")] == [8, 4, 8]


class Stage(_PipelineStageBase):
    """As much of PyTorch's stage as its schedules read when they write their order."""

    def __init__(self, index, stages, ranks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.group, self.has_backward, self.submod = None, True, torch.nn.Identity()

    def _create_grad_recv_info(self, *args): ...

    def _prepare_forward_infra(self, *args): ...

    def _prepare_backward_infra(self, *args): ...


KINDS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}


def torch_order(cls, stages, count, micro_batches, ranks):
    """Each rank's list of one of PyTorch's schedules, pairs one after the other."""
    order = cls([Stage(s, count, ranks) for s in stages], micro_batches).pipeline_order
    return [computations([part for each in order[r] if each is not None for part in each.sub_actions or (each,)])
            for r in range(ranks)]


def computations(actions):
    """Those that compute, as our instructions; its lists have sums of gradients, too."""
    return [(KINDS[each.computation_type.value], each.stage_index, each.microbatch_index)
            for each in actions if each is not None and each.computation_type.value in KINDS]


@pytest.mark.peers
@pytest.mark.parametrize(("ranks", "micro_batches"), [*SIZES, (4, 4), (8, 8)])
@pytest.mark.parametrize(("name", "cls", "least"), [
    ("interleaved", theirs.ScheduleInterleaved1F1B, 1), ("zb-v", theirs.ScheduleZBVZeroBubble, 1),
    ("interleaved-zero-bubble", theirs.ScheduleInterleavedZeroBubble, 1), ("dualpipe-v", theirs.ScheduleDualPipeV, 2)])
def test_orders_are_those_of_torch(name, cls, least, ranks, micro_batches):
    if micro_batches < least * ranks:
        pytest.skip("torch refuses these")
    built = schedule(name, ranks, micro_batches)
    found = torch_order(cls, built.stages_of(0), built.stages, micro_batches, ranks)
    assert found == [list(order) for order in built.ranks]


@pytest.mark.peers
@pytest.mark.parametrize(("ranks", "micro_batches"), [*SIZES, (4, 4)])
@pytest.mark.parametrize(("name", "cls"), [("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)])
def test_orders_of_single_stages_are_those_of_torch(name, cls, ranks, micro_batches):
    order = cls(Stage(0, ranks, ranks), micro_batches, loss_fn=None)._get_pipeline_order()
    for r, ours in enumerate(schedule(name, ranks, micro_batches).ranks):
        found = computations(order[r])
        assert [kind for kind, *_ in found] == [each.kind for each in ours]
        # PyTorch draws 1F1B's table apart from what runs, and numbers the later forwards in it one too high.
        assert [each for each in found if each[0] == BACKWARD] == [each for each in ours if each.kind == BACKWARD]


def greedy(built):
    """A mutant: of what a rank has to do, each time the first that can run, backwards first, Ws last; no more in
    flight than p."""
    ranks, m, done, orders = len(built.ranks), built.micro_batches, {}, [[] for _ in built.ranks]
    while any(len(order) < 3 * m for order in orders):
        clock = [sum(1 for _ in order) for order in orders]
        for r in sorted(range(ranks), key=clock.__getitem__):
            n = {kind: sum(each[0] == kind for each in orders[r]) for kind in "FBW"}
            can = [("B", r == ranks - 1 and n["B"] < n["F"] or ("B", r + 1, n["B"]) in done and n["B"] < n["F"]),
                   ("F", n["F"] < m and n["F"] - n["W"] < ranks and (r == 0 or ("F", r - 1, n["F"]) in done)),
                   ("W", n["W"] < n["B"])]
            kind = next((kind for kind, possible in can if possible), None)
            if kind:
                orders[r].append(each := type(built.ranks[0][0])(kind, r, n[kind]))
                done[each] = True
                break
    return Schedule("greedy", tuple(map(tuple, orders)), built.rank_of, m)


def test_a_greedy_order_does_not_find_zb_h1():
    explicit = schedule("zb-h1", 4, 8)
    mutant = greedy(explicit)
    assert max(peaks(mutant)) <= 4 and max(idle(mutant)) > max(idle(explicit)) == 3


@pytest.mark.parametrize(("call", "words"), [
    (lambda: schedule("zbv", 4, 8), "no schedule 'zbv': expected one of gpipe, 1f1b"),
    (lambda: schedule("1f1b", 0, 8), "ranks=0: expected an integer of at least 1"),
    (lambda: schedule("interleaved-zero-bubble", 0, 8), "ranks=0: expected an integer of at least 1"),
    (lambda: schedule("1f1b", 4, 0), "micro_batches=0: expected an integer of at least 1"),
    (lambda: schedule("zb-v", 4, 2.0), "micro_batches=2.0: expected an integer"),
    (lambda: schedule("interleaved", 4, 8, chunks=0), "chunks=0: expected an integer of at least 1"),
    (lambda: schedule("1f1b", 4, 8, chunks=2), "1f1b with chunks=2: a rank has 1 of it. Leave chunks out"),
    (lambda: idle_time("zb-v", 4, 4, 5, 3), "zb-v with F, B, W = 4, 5, 3: a closed form is known of equal ones alone"),
    (lambda: idle_time("zb-v", 4, rank=1), "zb-v, rank 1: a closed form is known of rank 0 alone"),
    (lambda: idle_time("gpipe", 4, rank=4), "rank=4: expected one of 0 to 3"),
    (lambda: in_flight("zb-h2", 4, 7), "zb-h2, 7 micro-batches on 4 ranks: the closed form holds from 8")])
def test_what_does_not_exist_is_refused(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
