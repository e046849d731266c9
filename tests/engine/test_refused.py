"""What cannot go together is refused before anything is split, with what it would send."""

import functools
import re

import pytest
import torch
from rank_pool import on_ranks
from together_kit import ADAMW, ROWS, T, batches, built, engine_of
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from refimpl.comm import FakeCommunicator
from refimpl.engine import dry_rank, together
from refimpl.engine.refused import bytes_sent
from refimpl.equivalence import CutDiffers
from refimpl.mesh import Mesh


def mesh_of(**axes):
    mesh = Mesh(**axes)
    return mesh.connect(FakeCommunicator(0, mesh.world_size))


@pytest.mark.parametrize(("zero", "units"), [(2, 9), (3, 24)])
def test_zero_2_and_3_in_a_pipeline_with_the_bytes_that_they_would_send(zero, units):
    model = built("gpt")
    with pytest.raises(ValueError, match=f"zero={zero} in a pipeline of 8 micro-batches") as refused:
        together(model, mesh_of(tp=2, pp=2, dp=4), zero=zero, micro_batches=8)
    P, would, instead = (int(each.replace(",", "")) for each in re.findall(r"\d[\d,]{3,}", str(refused.value)))
    assert would == units * 3 * P // 4 and instead == 2 * 3 * P // 4
    assert not any(hasattr(p, "shard_spec") for p in model.parameters())  # it is whole


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_arithmetic_is_what_a_rank_sends_without_a_pipeline(zero):
    found = dry_rank(functools.partial(built, "grouped gpt"), Mesh(dp=4), 0, ROWS, T, optimizer=ADAMW, micro_batches=4,
                     zero=zero)
    traffic = found.traffic["dp"]
    P = sum(p.nbytes for p in built("grouped gpt").parameters())
    once = 0 if zero < 3 else 4 * 256 * 32  # a backward reads no embedding; a large head is gathered twice
    expected = bytes_sent(zero, 4, 4, P) - 4 * 3 * once // 4
    assert traffic["all_gather"] + traffic["reduce_scatter"] == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("given", "error", "words"), [
    (lambda: together(built("gpt"), Mesh()), TypeError, "expected a connected one"),
    (lambda: together(built("gpt"), mesh_of(), zero=4), ValueError, "zero=4"),
    (lambda: together(built("gpt"), mesh_of(dp=2), sequence=True), ValueError, "sequence=True with tp=1"),
    (lambda: together(built("gpt"), mesh_of(pp=2), micro_batches=4, schedule="zb-h1", recompute=True), ValueError,
     "recompute=True with schedule zb-h1"),
    (lambda: together(nn.Sequential(nn.Linear(2, 2)), mesh_of()), TypeError, "returns no loss"),
    (lambda: together(built("gpt"), mesh_of(pp=8), micro_batches=8), ValueError, "stages=8 of a model of 4 layers"),
    (lambda: together(built("gpt"), mesh_of(tp=3)), ValueError, "4 heads on 3 ranks"),
    (lambda: together(built("gpt"), mesh_of(), weights="w"), ValueError, "of a model that has values")])
def test_bad_input_is_refused_by_name(given, error, words):
    with pytest.raises(error, match=words):
        given()


def test_a_loss_that_is_more_than_its_logits_give_is_named():
    config = MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, output_router_logits=True)
    with pytest.raises(CutDiffers, match="MixtralForCausalLM returns a loss of .* set it to False"):
        together(MixtralForCausalLM(config), mesh_of(dp=2), ADAMW)


@on_ranks(4, fails=r"rank 1 \(dp 0, tp 1\) have other tokens than rank 0 \(dp 0, tp 0\)")
def test_a_batch_cut_along_the_wrong_axis_is_named_with_coordinates(comm):
    given, = batches(1, comm.rank % 2, 2)  # dp is the slower axis
    engine_of(comm, "gpt", {"tp": 2, "dp": 2}).train_step(*given)


def test_two_train_steps_without_a_step_are_refused():
    engine, (given,) = engine_of(FakeCommunicator(0, 1), "gpt", {}), batches(1)
    engine.train_step(*given)
    with pytest.raises(RuntimeError, match="train_step after train_step"):
        engine.train_step(*given)


def test_a_step_that_is_dropped_leaves_nothing():
    engine, (given,) = engine_of(FakeCommunicator(0, 1), "gpt", {}), batches(1)
    first = engine.train_step(*given)
    engine.zero_grad()
    assert torch.equal(first, engine.train_step(*given)) and engine.steps == 0
    engine.step()
    assert engine.steps == 1
