"""Backwards in another order than 1 forward, 1 backward: all forwards first, as GPipe has it; from any output."""

import contextlib
import gc
import weakref

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import ENGINES, FAST, equal, farthest, gpt, model_of, parameters_of, rows_of, token_batches, train_gpt
from zero_steps import gpt_engine, most, stack

from refimpl import memory
from refimpl.comm import CollectiveMismatch, FakeCommunicator, simulate
from refimpl.zero import Zero1, Zero2, Zero3

MICRO_BATCHES = 3


def sync(engine, last):
    return contextlib.nullcontext() if last else engine.no_sync()


def one_by_one(engine, inputs):
    """forward, backward, forward, backward, … of losses."""
    for i, x in enumerate(inputs):
        loss = engine.forward(x).square().mean() / len(inputs)
        with sync(engine, i == len(inputs) - 1):
            engine.backward(loss)


def all_forwards_first(engine, inputs):
    """GPipe's order, from outputs and their gradients, as a stage gets them from the next one."""
    outputs = [engine.forward(x) for x in inputs]
    for i, output in enumerate(outputs):
        end = output.detach().requires_grad_()
        (end.square().mean() / len(inputs)).backward()
        with sync(engine, i == len(inputs) - 1):
            engine.backward(output, end.grad)


def last_forward_first(engine, inputs):
    """All forwards first, then backwards from the last: the sum of gradients is in another order."""
    losses = [engine.forward(x).square().mean() / len(inputs) for x in inputs]
    for i, loss in enumerate(reversed(losses)):
        with sync(engine, i == len(losses) - 1):
            engine.backward(loss)


@pytest.mark.parametrize("name", ["layers", "recomputed", "recomputed, reentrant"])
@on_ranks(2)
def test_all_engines_train_alike_in_any_order(comm, name):
    found = {}
    for make in ENGINES:
        for order in (one_by_one, all_forwards_first, last_forward_first):
            engine = make(model_of(name), comm, FAST, bucket_bytes=500)
            for step in range(3):
                order(engine, [rows_of(comm, MICRO_BATCHES * step + i) for i in range(MICRO_BATCHES)])
                engine.step()
            assert make is not Zero3 or engine.gathering.live() == 0
            found[make, order] = parameters_of(engine)
        assert equal(found[make, all_forwards_first], found[make, one_by_one])
        for order in (one_by_one, last_forward_first):  # other orders of additions
            assert farthest(found[make, order], found[ENGINES[0], one_by_one]) < 1e-5


class AtTheEnd(Zero3):
    """The mutant: takes calls of other micro-batches for ones that are still to be recomputed in this one."""
    def _backward_ended(self, unit):
        if not self._backwards._without_graph[unit]:
            super()._backward_ended(unit)


@pytest.mark.parametrize("make", [Zero3, AtTheEnd])
def test_with_all_forwards_first_gradients_are_reduced_while_each_backward_runs(make):
    """Eight layers, recomputed by reentrant autograd: whole gradients of a few are there at a time."""
    class Recomputing(nn.ModuleList):
        def forward(self, x):
            for layer in self:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            return x
    layer, engine = 64 * 64 * 4, make(Recomputing(stack(8)), FakeCommunicator(0, 4), FAST)
    losses = [engine.forward(torch.ones(1, 64).requires_grad_()).sum() for _ in range(MICRO_BATCHES)]
    with memory.track(engine.model, engine.optimizer) as t:
        engine.backward(losses[0])
    assert (most(t, "gradients") <= 8 * layer // 4 + 4 * layer) == (make is Zero3)


@pytest.mark.parametrize("make", ENGINES)
def test_several_outputs_each_with_its_gradient(make):
    """As `torch.autograd.backward` takes them."""
    engine = gpt_engine(make, FakeCommunicator(0, 1))
    one, other = gpt(), token_batches(1)[0, 0, :2]
    outputs = [engine.forward(other[:1]), engine.forward(other[1:])]
    expected = [one(other[:1]), one(other[1:])]
    gradients = [torch.randn_like(x) for x in expected]
    engine.backward(outputs, gradients)
    torch.autograd.backward(expected, gradients)
    norm = engine.clip_grad_norm_(1e9)
    there = torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9)
    assert norm.item() == pytest.approx(there.item(), rel=1e-5)


@pytest.mark.parametrize("make", [Zero2, Zero3])
def test_an_output_without_its_gradient_is_named_by_torch_and_leaves_nothing(make):
    engine = gpt_engine(make, FakeCommunicator(0, 2))
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        engine.backward(engine.forward(token_batches(1)[0, 0, :2]))
    with pytest.raises(RuntimeError, match="step without gradients"):
        engine.step()
    train_gpt(engine, 1)


@pytest.mark.parametrize("make", ENGINES)
def test_an_engine_that_is_dropped_frees_all_that_it_held(make):
    def train():
        engine = gpt_engine(make, FakeCommunicator(0, 4), steps=1)
        return [weakref.ref(x) for x in (engine.comm, engine, engine.reducer, *engine.model.parameters())]

    gone = train()
    gc.collect()
    assert not [each() for each in gone if each() is not None]


def test_engines_that_differ_are_named_when_they_are_made():
    """Before any of them lays out buckets: their class, bytes of a bucket, dtype of reductions."""
    def made(comm, which):
        options = {"bucket_bytes": 100 + 100 * (which == "bytes" and comm.rank == 1),
                   "reduce_dtype": torch.bfloat16 if which == "dtype" and comm.rank == 1 else None}
        with pytest.raises(CollectiveMismatch) as error:
            (Zero2 if which == "class" and comm.rank == 1 else Zero1)(nn.Linear(4, 4), comm, FAST, **options)
        return str(error.value)

    for which, other in (("class", "Zero2, bucket_bytes=100, reduce_dtype=None"),
                         ("bytes", "Zero1, bucket_bytes=200, reduce_dtype=None"),
                         ("dtype", "Zero1, bucket_bytes=100, reduce_dtype=torch.bfloat16")):
        assert {*simulate(made, 2, which)} == {
            f"ranks [1] have another engine than rank 0: rank 0: Zero1, bucket_bytes=100, reduce_dtype=None; rank 1: "
            f"{other}. Give every rank the same engine"}


def test_a_backward_by_itself_leaves_no_gradient_of_this_rank_alone():
    engine = Zero1(nn.Linear(2, 2), FakeCommunicator(0, 2), FAST)
    with pytest.raises(RuntimeError, match="by itself reduces nothing"):
        engine(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is None for p in engine.model.parameters())


def test_gradients_that_were_dropped_are_none_to_step_with():
    engine = Zero1(nn.Linear(2, 2), FakeCommunicator(0, 2), FAST)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.zero_grad()
    with pytest.raises(RuntimeError, match="step without gradients"):
        engine.step()
