"""What a dry run says of a rank is what the real rank holds and sends; and ranks of meshes that nobody here has."""

import functools
import time

import pytest
import torch
from patience import processor_seconds
from together_kit import ADAMW, MAX_NORM, ROWS, T, batches_of, built, engine_of, run_on

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.engine import dry_rank, worst_rank
from refimpl.engine.dry import busiest, first_steps, make_states, sent
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.offload import HostStore
from refimpl.zero import DataParallel, Zero1, Zero3

RANDOM_STATE = 5056  # bytes that a recomputed region keeps on a CPU, of a generator that a dry run does not have
FLASH = torch.nn.functional.scaled_dot_product_attention


def second_step(comm, name, axes, options):
    """(traffic by axis, peak) of a rank's second step."""
    engine = engine_of(comm, name, axes, **options)
    given = [[x if needed else None for x, needed in zip(pair, engine.needs, strict=True)]
             for pair in batches_of(engine, 2)]
    run_on(engine, given[:1])
    before = sent(engine.mesh)
    with memory.track(engine.model, engine.optimizer) as t:
        run_on(engine, given[1:])
    after = sent(engine.mesh)
    return {axis: dict(after[axis] - before[axis]) for axis in after}, dict(t.peak)


def asked(name, axes, rank, **options):
    mesh = Mesh(**axes)
    return dry_rank(functools.partial(built, name), mesh, rank, ROWS // mesh.dp, T, optimizer=ADAMW, max_norm=MAX_NORM,
                    **options)


@pytest.mark.parametrize(("name", "axes", "options"), [
    ("gpt", {"tp": 2, "pp": 2, "dp": 2}, {"micro_batches": 4, "recompute": True}),
    ("tied llama", {"cp": 2, "pp": 2}, {"micro_batches": 2}),
    ("grouped gpt", {"tp": 2, "dp": 2}, {"zero": 3, "recompute": True})])
def test_a_rank_that_is_asked_says_what_the_real_one_reads(name, axes, options):
    real = launch(second_step, Mesh(**axes).world_size, name, axes, options)
    for rank, (traffic, peak) in enumerate(real):
        found = asked(name, axes, rank, **options)
        assert {axis: dict(each) for axis, each in found.traffic.items()} == traffic
        random = peak["activations"] - found.peak["activations"]
        assert random % RANDOM_STATE == 0 and (random == 0) == ("recompute" not in options)
        assert {**found.peak, "activations": peak["activations"]} == peak


@pytest.mark.parametrize("m", [4, 8])
@pytest.mark.parametrize("rank", range(4))
def test_what_is_not_traced_repeats(rank, m):
    short, long = (asked("gpt", {"pp": 4, "tp": 1}, rank, micro_batches=m, every=every) for every in (False, True))
    assert short.peak == long.peak and short.traffic == long.traffic
    assert (len(short.trace.ops) < 0.95 * len(long.trace.ops)) == (4 - rank + 2 < m)


@pytest.mark.parametrize(("rank", "m", "options"), [
    (0, 10, {}), (1, 12, {"recompute": True}), (0, 9, {"recompute": True}), (0, 11, {"zero": 0})])
def test_a_deep_pipeline_is_two_shallow_ones(rank, m, options):
    """n micro-batches are in flight when the first backward ends: of 9 stages on the first 9, on the second 8."""
    build = functools.partial(GPT, GPTConfig(vocab_size=64, context_length=T, layers=9, hidden=16, heads=2))
    short, long = (dry_rank(build, Mesh(pp=9), rank, m, optimizer=ADAMW, micro_batches=m, every=every, **options)
                   for every in (False, True))
    assert short.phases == long.phases and short.traffic == long.traffic
    assert (len(short.trace.ops) < 0.7 * len(long.trace.ops)) == (m > 9)


def test_two_micro_batches_more_are_traced_than_are_in_flight(monkeypatch):
    def noted(step, build, mesh, rank, size, *rest, gpu):
        traced.append(size[1])
        raise InterruptedError

    monkeypatch.setattr(memory, "dry_run", noted)
    for m, expected in ((2, [2, 2, 2, 2]), (8, [6, 5, 4, 3])):
        traced = []
        for rank in range(4):
            with pytest.raises(InterruptedError):
                dry_rank(None, Mesh(pp=4), rank, m, micro_batches=m)
        assert traced == expected


def test_the_worst_rank_is_found_without_asking_all():
    mesh = {"tp": 2, "pp": 4, "dp": 2}
    worst, found = worst_rank(functools.partial(built, "gpt"), Mesh(**mesh), ROWS // 2, optimizer=ADAMW,
                              micro_batches=4)
    every = [asked("gpt", mesh, rank, micro_batches=4).peak.total for rank in range(16)]
    assert worst.peak.total == max(every) and len(found) <= 4


@pytest.mark.parametrize(("name", "axes", "micro_batches", "nbytes"), [
    ("gpt3-175b", {"tp": 8, "pp": 4, "dp": 32}, 8, 30e9), ("llama3-405b", {"tp": 8, "pp": 16, "dp": 128}, 32, 49e9)])
def test_any_rank_of_large_meshes_in_seconds(name, axes, micro_batches, nbytes):
    build, mesh = functools.partial(GPT, GPTConfig.named(name), FLASH, dtype=torch.bfloat16), Mesh(**axes)
    began = time.process_time()
    found = dry_rank(build, mesh, mesh.world_size // 2, micro_batches, micro_batches=micro_batches, recompute=True)
    assert processor_seconds(time.process_time() - began) < 30
    assert found.coordinates["pp"] == mesh.pp // 2
    parts = GPTConfig.named(name).parameter_count() / mesh.tp / mesh.pp
    assert found.peak["parameters"] == pytest.approx(2 * parts, rel=0.1) and found.peak.total < nbytes
    assert found.peak["optimizer state"] == pytest.approx(12 * parts / mesh.dp, rel=0.1)  # fp32: master, two moments


def test_the_busiest_place_is_the_one_with_most_states():
    """Shards are equal, and each piece has a counter of steps."""
    def engine(make, rank, widths):
        torch.manual_seed(0)
        made = make(torch.nn.Sequential(*(torch.nn.Linear(n, n) for n in widths)), FakeCommunicator(rank, 2), ADAMW)
        make_states(made)
        return made

    found = []
    for widths in ((9, 2, 2, 2), (2, 2, 2, 9)):
        states = [sum(x.nbytes for state in each.optimizer.state.values() for x in state.values())
                  for each in (engine(Zero1, rank, widths) for rank in range(2))]
        found.append(busiest(engine(Zero1, 0, widths)))
        assert states[found[-1]] == max(states) > min(states)
        assert busiest(engine(DataParallel, 0, widths)) == 0, "all have all"
    assert sorted(found) == [0, 1]


@pytest.mark.parametrize(("make", "store", "steps"), [
    (DataParallel, None, 0), (Zero1, None, 0), (Zero3, None, 1), (Zero1, HostStore, 2)])
def test_only_what_a_first_step_changes_is_run_twice(make, store, steps):
    options = {} if store is None else {"store": store()}
    assert first_steps(make(torch.nn.Linear(2, 2), FakeCommunicator(0, 2), ADAMW, **options)) == steps
