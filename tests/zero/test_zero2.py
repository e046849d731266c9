"""Stage 2: gradients are in shards, and whole ones go as soon as they are reduced."""

import pytest
import torch
from torch import nn
from zero_kit import SGD, model_of, rows_of, square
from zero_steps import GradientsKept, as_predicted, most, stack

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero2
from refimpl.zero.internals.in_shards import InShards
from refimpl.zero.reducer import ReduceScatterAtOnce


@pytest.mark.parametrize(("make", "is_so"), [(Zero2, True), (GradientsKept, False)])
def test_gradients_are_those_of_a_share(make, is_so):
    assert as_predicted(make, 2, "gradients") == is_so


@pytest.mark.parametrize("make", [Zero2, GradientsKept])
def test_whole_gradients_never_are_there_together(make):
    """Twelve layers, each a bucket: at the highest moment a few of them are whole."""
    model, layer = stack(12), 64 * 64 * 4
    engine = make(model, FakeCommunicator(0, 4), SGD, bucket_bytes=layer)
    with memory.track(model, engine.optimizer) as t:
        engine.backward(engine.forward(torch.ones(1, 64)).sum())
    shards, others = 3 * layer, 4 * layer  # of all; two wait, two come
    assert (most(t, "gradients") <= shards + others) == (make is Zero2)


class Copied(Zero2):
    """The mutant: every gradient is copied to a buffer."""
    class reducer_type(ReduceScatterAtOnce):
        def move_to_bucket(self, parameter, gradient):
            self.buffer(self.place[parameter][0])
            return super().move_to_bucket(parameter, gradient)


@pytest.mark.parametrize("make", [Zero2, Copied])
def test_a_gradient_that_fills_its_bucket_is_its_buffer(make):
    model = nn.Linear(256, 256, bias=False)
    engine, nbytes = make(model, FakeCommunicator(0, 4), SGD), 256 * 256 * 4
    with memory.track(model, engine.optimizer) as t:
        engine.backward(engine.forward(torch.ones(1, 256)).sum())
    whole = t.peak["gradients"] + t.peak["temporaries"]
    assert (whole < 1.5 * nbytes) == (make is Zero2)


def test_each_micro_batch_is_reduced_also_in_no_sync():
    engine = Zero2(model_of("twice"), FakeCommunicator(0, 2), SGD)
    with engine.no_sync():
        engine.backward(square(engine, rows_of(engine.comm, 0)))
    assert engine.comm.traffic["reduce_scatter"] > 0 and not engine.reducer.flat
    assert all(isinstance(p.grad, InShards) for p in engine.model.parameters())
    engine.step()  # and nothing is missing
