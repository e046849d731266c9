"""Gradients that are in shards cannot be clipped, read or added to as if they were whole."""

import copy

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from zero_kit import ENGINES, SGD, SHARDED, WIDTH, parameters_of, rows_of, square, three_layers

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero.internals.in_shards import InShards


def after_backward(make):
    engine = make(three_layers(), FakeCommunicator(0, 2), SGD)
    engine.backward(square(engine, torch.ones(2, WIDTH)))
    return engine


USES = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "one by one": lambda model: clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 1.0),
    "a norm": lambda model: [p.grad.norm() for p in model.parameters() if p.grad is not None],
    "data": lambda model: [p.grad.data for p in model.parameters() if p.grad is not None],
    "an optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1, momentum=0.9).step(),
    "zero_": lambda model: model.zero_grad(set_to_none=False),
    "backward by itself": lambda model: sum(p.sum() for p in model.parameters()).backward()}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("make", SHARDED)
def test_who_computes_with_a_gradient_in_shards_is_told_what_to_call(make, use):
    engine = after_backward(make)
    parameters_too = make.stage == 3 and use == "backward by itself"
    told = "read or written outside" if parameters_too else r"on all ranks.*engine.clip_grad_norm_\("
    with pytest.raises(RuntimeError, match=rf"(weight|bias) is in shards.*{told}"):
        USES[use](engine.model)


@pytest.mark.parametrize("make", SHARDED)
def test_it_takes_no_bytes_and_is_gone_after_the_step(make):
    engine = after_backward(make)
    parameters = list(engine.model.parameters())
    assert all(isinstance(p.grad, InShards) and p.grad.shape == p.shape for p in parameters)
    assert not any(p.grad.untyped_storage().nbytes() for p in parameters)
    with memory.track(engine.model, engine.optimizer) as t:
        held = t.now["gradients"]
    assert held == sum(own.grad.untyped_storage().nbytes() for pairs in engine.update.pieces.values()
                       for _, own in pairs[:1])
    assert repr(parameters[0].grad) == "<gradient of 0.weight, in shards>"
    assert copy.deepcopy(parameters[0].grad) is parameters[0].grad
    engine.step()
    assert all(p.grad is None for p in parameters)


@on_ranks(2)
def test_micro_batches_add_up_and_the_engine_clips_as_data_parallelism_does(comm):
    """Two micro-batches, reduced each, then clipped by the engine."""
    found = []
    for make in ENGINES:
        engine = make(three_layers(), comm, SGD, bucket_bytes=500)
        for number in range(2):
            engine.backward(square(engine, rows_of(comm, number)) / 2)
        norm = engine.clip_grad_norm_(0.01).item()
        engine.step()
        found.append((norm, parameters_of(engine)))
        assert norm == pytest.approx(found[0][0]) and norm > 0.01
        torch.testing.assert_close(found[-1][1], found[0][1])


def test_a_model_without_gradients_yet_reads_none():
    engine = ENGINES[3](nn.Linear(3, 3), FakeCommunicator(0, 2), SGD)
    assert [p.grad for p in engine.model.parameters()] == [None, None]
