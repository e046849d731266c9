"""Stage 1: the optimizer's state is in shards; gradients are whole until the last micro-batch is reduced."""

import pytest
import torch
from rank_pool import on_ranks
from zero_kit import ADAMW, SGD, equal, model_of, parameters_of, rows_of, square
from zero_steps import as_predicted, train

from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import DataParallel, Zero1
from refimpl.zero.reducer import ReduceScatter


@pytest.mark.parametrize(("make", "is_so"), [(Zero1, True), (DataParallel, False)])  # right, and nothing saved
def test_the_optimizers_state_is_that_of_a_share(make, is_so):
    assert as_predicted(make, 1, "optimizer state") == is_so


class BufferKept(Zero1):
    """The mutant: whole gradients stay beside shards of another dtype."""
    class reducer_type(ReduceScatter):
        def keep_shard(self, bucket, shard):
            super().keep_shard(bucket, shard)
            self.flat[bucket] = self.buffer(bucket)


@pytest.mark.parametrize(("make", "is_so"), [(Zero1, True), (BufferKept, False)])
def test_whole_gradients_go_when_their_shards_are_in_another_dtype(make, is_so):
    assert as_predicted(make, 1, "gradients", torch.bfloat16, torch.float32) == is_so


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(2)
def test_micro_batches_that_are_each_reduced_add_up(comm, reduce_dtype):
    """Gradients of a micro-batch come to a shard that one before has left, in the same buffer or not."""
    found = []
    for make in (DataParallel, Zero1):
        engine = make(model_of("twice").to(torch.float64), comm, SGD, bucket_bytes=500, reduce_dtype=reduce_dtype)
        for i in range(3):
            engine.backward(square(engine, rows_of(comm, i).double()) / 3)
        engine.step()
        found.append(parameters_of(engine))
    torch.testing.assert_close(*found[::-1], rtol=1e-6 if reduce_dtype else 1e-14, atol=1e-7)


def test_a_rank_updates_its_shard_alone_and_gets_the_others():
    """Of four ranks this one is there, so the others' shards come as copies of its own."""
    engine = train(Zero1(model_of("twice"), FakeCommunicator(2, 4), ADAMW), 1)
    bucket, = engine.buckets
    own = engine.parameters.shards[bucket]
    assert own.data_ptr() == bucket.shard(engine.parameters.whole[bucket], 2).data_ptr()
    assert all(torch.equal(bucket.shard(engine.parameters.whole[bucket], rank), own) for rank in range(4))
    held = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
    assert held == sum(piece.end - piece.first for piece in bucket.pieces(2)) <= bucket.shard_numel


def test_all_ranks_have_the_same_parameters():
    first, *others = launch(lambda comm: parameters_of(
        train(Zero1(model_of("frozen"), comm, ADAMW, bucket_bytes=300), 3, rows=6)), 3)
    assert all(equal(first, other) for other in others)
