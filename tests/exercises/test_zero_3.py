"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import pytest
import torch

from refimpl.exercises import zero_3 as page


class Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, shard, x, out):
        ctx.comm, ctx.out = comm, out
        ctx.save_for_backward(shard, x)
        return x @ comm.all_gather(shard).view(out, -1).T

    @staticmethod
    def backward(ctx, of_y):
        shard, x = ctx.saved_tensors
        weight = ctx.comm.all_gather(shard).view(ctx.out, -1)
        return None, ctx.comm.reduce_scatter((of_y.T @ x).flatten(), "avg"), of_y @ weight, None


class Summed(Sharded):
    @staticmethod
    def backward(ctx, of_y):
        none, of_shard, *rest = Sharded.backward(ctx, of_y)
        return none, of_shard * ctx.comm.world_size, *rest


class Reduced(Sharded):
    """all_reduce in place of reduce_scatter: the same numbers."""

    @staticmethod
    def backward(ctx, of_y):
        shard, x = ctx.saved_tensors
        weight = ctx.comm.all_gather(shard).view(ctx.out, -1)
        whole = ctx.comm.all_reduce((of_y.T @ x).flatten(), "avg")
        return None, whole.chunk(ctx.comm.world_size)[ctx.comm.rank].clone(), of_y @ weight, None


class Kept(Sharded):
    """The weight stays from forward to backward."""

    @staticmethod
    def forward(ctx, comm, shard, x, out):
        ctx.comm, ctx.out = comm, out
        weight = comm.all_gather(shard).view(out, -1)
        ctx.save_for_backward(shard, x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, of_y):
        _, x, weight = ctx.saved_tensors
        return None, ctx.comm.reduce_scatter((of_y.T @ x).flatten(), "avg"), of_y @ weight, None


def average(engine, decay):
    shards = [engine.parameters.shards[bucket].clone() for bucket in engine.buckets]

    def update():
        for own, bucket in zip(shards, engine.buckets, strict=True):
            own.lerp_(engine.parameters.shards[bucket], 1 - decay)
        return shards

    return update


def of_whole_weights(engine, decay):
    def whole():
        with engine.gathered():
            return [engine.parameters.whole[bucket].clone() for bucket in engine.buckets]

    kept = whole()

    def update():
        for own, new in zip(kept, whole(), strict=True):
            own.lerp_(new, 1 - decay)
        return [bucket.shard(own, engine.comm.rank) for own, bucket in zip(kept, engine.buckets, strict=True)]

    return update


def of_shards_anew(engine, decay):
    """A new list each time, and the old ones kept."""
    kept = [[engine.parameters.shards[bucket].clone() for bucket in engine.buckets]]

    def update():
        kept.append([old.lerp(engine.parameters.shards[bucket], 1 - decay)
                     for old, bucket in zip(kept[-1], engine.buckets, strict=True)])
        return kept[-1]

    return update


def not_averaged(engine, decay):
    return lambda: [engine.parameters.shards[bucket] for bucket in engine.buckets]


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, Sharded.apply), (page.second, average)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, lambda comm, shard, x, out: comm.all_gather(shard).view(out, -1), "the output is not"),
    (page.first, lambda comm, shard, x, out: x @ comm.all_gather(shard).view(out, -1).T,
     "the shard has no gradient, or another one"),
    (page.first, Summed.apply, "the shard has no gradient, or another one"),
    (page.first, Reduced.apply, "a rank sent"), (page.first, Kept.apply, "bytes stay from forward to backward"),
    (page.second, of_whole_weights, "bytes were sent for it"),
    (page.second, of_shards_anew, "the average is right, but it took"),
    (page.second, not_averaged, "is not that of the average after 3 steps"),
    (page.second, lambda engine, decay: list, "expected a list of 8 shards"),
])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
