"""Stage 1: the optimizer's state is in shards; gradients are whole until the last micro-batch is reduced."""

import pytest
import torch
from zero_kit import ADAMW, BUCKET, SGD, equal, gpt, model_of, parameters_of, rows_of, square, states_of

from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import DataParallel, Zero1
from refimpl.zero.closed_forms import model_state_bytes
from refimpl.zero.zero1 import ReduceScatter


class NothingSharded(DataParallel):
    """The mutant: right parameters, nothing saved."""


@pytest.mark.parametrize(("make", "is_so"), [(Zero1, True), (NothingSharded, False)])
def test_the_optimizers_state_is_that_of_a_share(make, is_so):
    expected = model_state_bytes(gpt(), 4, 1, bucket_bytes=BUCKET)
    assert (states_of(make)["optimizer state"] == expected["optimizer state"]) == is_so


class Hoarding(ReduceScatter):
    def keep(self, bucket, shard):
        super().keep(bucket, shard)
        self.flat[bucket] = self.buffer(bucket)


class BufferKept(Zero1):
    """The mutant: whole gradients stay beside shards of another dtype."""

    reducer_type = Hoarding


@pytest.mark.parametrize(("make", "is_so"), [(Zero1, True), (BufferKept, False)])
def test_whole_gradients_go_when_their_shards_are_in_another_dtype(make, is_so):
    low, fp32 = torch.bfloat16, torch.float32
    expected = model_state_bytes(gpt(dtype=low), 4, 1, bucket_bytes=BUCKET, reduce_dtype=fp32)
    assert (states_of(make, low, fp32)["gradients"] == expected["gradients"]) == is_so


def reduced_twice(comm, reduce_dtype):
    """Gradients of a micro-batch come to a shard that one before has left, in the same buffer or not."""
    found = []
    for make in (DataParallel, Zero1):
        engine = make(model_of("twice").to(torch.float64), comm, SGD, bucket_bytes=500, reduce_dtype=reduce_dtype)
        for i in range(3):
            engine.backward(square(engine, rows_of(comm, i).double()) / 3)
        engine.step()
        found.append(parameters_of(engine))
    return found


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_micro_batches_that_are_each_reduced_add_up(reduce_dtype):
    for whole, ours in launch(reduced_twice, 2, reduce_dtype):
        for name, p in ours.items():
            torch.testing.assert_close(p, whole[name], rtol=1e-6 if reduce_dtype else 1e-14, atol=1e-7)


def test_a_rank_updates_its_shard_alone_and_gets_the_others():
    """Of four ranks this one is there, so the others' shards come as copies of its own."""
    engine = Zero1(model_of("twice"), FakeCommunicator(2, 4), ADAMW)
    bucket, = engine.buckets
    engine.backward(square(engine, rows_of(engine.comm, 0)))
    engine.step()
    own = engine.parameters.shards[bucket]
    assert own.data_ptr() == bucket.shard(engine.parameters.whole[bucket], 2).data_ptr()
    assert all(torch.equal(bucket.shard(engine.parameters.whole[bucket], rank), own) for rank in range(4))
    held = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
    assert held == sum(piece.end - piece.first for piece in bucket.pieces(2)) <= bucket.shard_numel


def same_as_alone(comm):
    engine = Zero1(model_of("frozen"), comm, ADAMW, bucket_bytes=300)
    for step in range(3):
        engine.backward(square(engine, rows_of(comm, step, rows=6)))
        engine.step()
    return parameters_of(engine)


def test_all_ranks_have_the_same_parameters():
    first, *others = launch(same_as_alone, 3)
    assert all(equal(first, other) for other in others)
