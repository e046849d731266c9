"""What ranks send each other to agree: phases, models and what is used; and ranks that differ, by number."""

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import ENGINES, SGD, WIDTH, square, three_layers

from refimpl import memory
from refimpl.comm import CollectiveMismatch, FakeCommunicator
from refimpl.comm.agreement import agreement_traffic, check_model, check_phase, used_on_any_rank
from refimpl.sharding import spec_of


@on_ranks(3)
def test_who_is_elsewhere_is_named_on_all_ranks(comm):
    r = comm.rank
    assert check_phase(comm, "step", 3, 1) is None
    for phase, ranks, words in (
            (("save" if r == 1 else "load", 3, 1), (1,),
             "rank 0: load of micro-batch 1 in step 3; rank 1: save of micro-batch 1 in step 3"),
            (("step", 3 + (r == 2), 1), (2,), "rank 2: step of micro-batch 1 in step 4"),
            (("step", 3, 1 + (r > 0)), (1, 2), r"ranks \[1, 2\] are elsewhere")):
        with pytest.raises(CollectiveMismatch, match=words) as error:
            check_phase(comm, *phase)
        assert error.value.ranks == ranks


@on_ranks(3)
def test_other_settings_are_named_with_what_each_rank_has(comm):
    settings = {"optimizer": "AdamW", "lr in param group 0": 0.1 + 0.1 * (comm.rank == 2)}
    assert check_phase(comm, "step", 3, 1, settings={"optimizer": "AdamW"}) is None
    words = r"ranks \[2\] have another lr in param group 0 than rank 0: rank 0: 0.1; rank 1: 0.1; rank 2: 0.2"
    with pytest.raises(CollectiveMismatch, match=words) as error:
        check_phase(comm, "step", 3, 1, settings=settings)
    assert error.value.ranks == (2,)
    with pytest.raises(CollectiveMismatch, match="another max_norm than rank 0: rank 0: None; rank 1: 1.0"):
        check_phase(comm, "step", 3, 1, settings={"max_norm": 1.0} if comm.rank else {})


def specs_of(*parameters):
    return [f"{spec_of(name, p)} {p.dtype}" for name, p in parameters]


@on_ranks(2)
def test_models_that_differ_in_anything_are_found(comm):
    p = nn.Parameter
    pairs = [("a", p(torch.zeros(2, 3))), ("b", p(torch.zeros(4)))]
    assert check_model(comm, specs_of(*pairs)) is None
    for other in ([pairs[0], ("c", pairs[1][1])], [("a", p(torch.zeros(3, 2))), pairs[1]], pairs[::-1], pairs[:1],
                  [(name, p(x.detach().half())) for name, x in pairs]):
        words = rf"\(parameters on each rank: {{0: 2, 1: {len(other)}}}\)"
        with pytest.raises(CollectiveMismatch, match=words) as error:
            check_model(comm, specs_of(*(other if comm.rank else pairs)))
        assert error.value.ranks == (1,)


@on_ranks(3)
def test_a_parameter_that_some_rank_uses_is_known_to_all(comm):
    assert used_on_any_rank(comm, ["a", "b", "c"], {"a", "c"} if comm.rank == 1 else {"c"}) == {"a", "c"}


def test_in_a_dry_run_there_is_nobody_to_disagree():
    def dry():
        comm = FakeCommunicator(3, 1024)
        check_model(comm, specs_of(("a", nn.Parameter(torch.zeros(3)))))
        check_phase(comm, "step", 0, 1)
        return used_on_any_rank(comm, ["a", "b"], {"a"}), comm.traffic

    used, sent = memory.dry_run(dry).result
    fingerprint = {"all_gather": 1023 * 17 * 8}  # 16 bytes of a digest and a count, as 64-bit numbers
    assert used == {"a"} and sent - fingerprint == agreement_traffic(1024, 3, 2, checks=1)


@on_ranks(3)
def test_bytes_are_those_of_the_closed_form(comm):
    check_phase(comm, "clip_grad_norm_", 0, 1)
    for _ in range(3):
        check_phase(comm, "backward", 0, 0)
    comm.all_reduce(torch.zeros((), dtype=torch.float64))
    used_on_any_rank(comm, range(7), set(range(7)))
    assert comm.traffic == agreement_traffic(3, comm.rank, 7, checks=3, clips=1)


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
