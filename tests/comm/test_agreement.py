"""What ranks send each other to agree: phases, models and what is used; and ranks that differ, by number."""

import pytest
import torch
from torch import nn
from zero_kit import ENGINES, SGD, WIDTH, square, three_layers

from refimpl import memory
from refimpl.comm import CollectiveMismatch, FakeCommunicator, RankError, launch
from refimpl.comm.agreement import (
    agreement_traffic,
    check_model,
    check_phase,
    used_on_any_rank,
)
from refimpl.sharding import spec_of


def outcome(function, *args):
    """What it returns, or its exception's type, ranks and text."""
    try:
        return function(*args)
    except (RankError, OSError, KeyError) as error:
        return type(error), getattr(error, "ranks", None), str(error)


def phases(comm):
    r = comm.rank
    return [outcome(check_phase, comm, *each) for each in (
        ("step", 3, 1), ("save" if r == 1 else "load", 3, 1), ("step", 3 + (r == 2), 1), ("step", 3, 1 + (r > 0)))]


def test_who_is_elsewhere_is_named_on_all_ranks():
    for same, phase, step, micro_batch in launch(phases, 3):
        assert same is None
        assert phase[:2] == (CollectiveMismatch, (1,))
        assert "rank 0: load of micro-batch 1 in step 3; rank 1: save of micro-batch 1 in step 3" in phase[2]
        assert step[:2] == (CollectiveMismatch, (2,)) and "rank 2: step of micro-batch 1 in step 4" in step[2]
        assert micro_batch[:2] == (CollectiveMismatch, (1, 2)) and "ranks [1, 2] are elsewhere" in micro_batch[2]


def specs_of(*parameters):
    return [f"{spec_of(name, p)} {p.dtype}" for name, p in parameters]


def models(comm):
    p, r = nn.Parameter, comm.rank
    pairs = [("a", p(torch.zeros(2, 3))), ("b", p(torch.zeros(4)))]
    others = {"same": pairs, "name": [("a", pairs[0][1]), ("c", pairs[1][1])], "shape": [("a", p(torch.zeros(3, 2))),
              pairs[1]], "dtype": [(name, p(x.detach().half())) for name, x in pairs], "order": pairs[::-1],
              "fewer": pairs[:1]}
    return {what: outcome(check_model, comm, specs_of(*(other if r else pairs))) for what, other in others.items()}


def test_models_that_differ_in_anything_are_found():
    for told in launch(models, 2):
        assert told.pop("same") is None
        for what, (error, ranks, text) in told.items():
            assert error is CollectiveMismatch and ranks == (1,), what
            assert f"(parameters on each rank: {{0: 2, 1: {1 if what == 'fewer' else 2}}})" in text


def test_a_parameter_that_some_rank_uses_is_known_to_all():
    def used(comm):
        return used_on_any_rank(comm, ["a", "b", "c"], {"a", "c"} if comm.rank == 1 else {"c"})

    assert launch(used, 3) == [{"a", "c"}] * 3


def test_in_a_dry_run_there_is_nobody_to_disagree():
    def dry():
        comm = FakeCommunicator(3, 1024)
        check_model(comm, specs_of(("a", nn.Parameter(torch.zeros(3)))))
        check_phase(comm, "step", 0, 1)
        return used_on_any_rank(comm, ["a", "b"], {"a"}), comm.traffic

    used, sent = memory.dry_run(dry).result
    assert used == {"a"}
    fingerprint = 1023 * 17 * 8  # 16 bytes of a digest and a count, as 64-bit numbers
    assert sent["all_gather"] == agreement_traffic(1024, 3, 2, checks=1)["all_gather"] + fingerprint
    assert sent["all_reduce"] == agreement_traffic(1024, 3, 2, checks=1)["all_reduce"]


def counted(comm):
    check_phase(comm, "clip_grad_norm_", 0, 1)
    for _ in range(3):
        check_phase(comm, "backward", 0, 0)
    comm.all_reduce(torch.zeros((), dtype=torch.float64))
    used_on_any_rank(comm, range(7), set(range(7)))
    return dict(comm.traffic)


def test_bytes_are_those_of_the_closed_form():
    for rank, sent in enumerate(launch(counted, 3)):
        assert sent == agreement_traffic(3, rank, 7, checks=3, clips=1)


@pytest.mark.parametrize("make", ENGINES)
def test_no_words_are_sent_by_collectives_that_a_device_is_waited_for(make):
    """Words are integers, and read on the host: of a GPU's tensors each would be waited for."""
    engine = make(three_layers(), FakeCommunicator(0, 2), SGD)
    began = engine.comm.order.count
    engine.backward(square(engine, torch.ones(2, WIDTH)))
    engine.clip_grad_norm_(1.0)
    engine.step()
    lines = engine.comm.order.recent[began:]
    assert lines and not [line for line in lines if "int" in line.replace("blocks", "")]
    words = "\n".join(engine.comm.host().order.recent)
    assert "check before step" in words and "which parameters are used" in words
