"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import torch
from exercises_kit import Answers, all_reduced, averaged, graded

from exercises import zero_3 as page


def summed(comm, gradient):
    return averaged(comm, gradient) * comm.world_size


class Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, shard, x, out, reduced=averaged, keep=False):
        weight = comm.all_gather(shard).view(out, -1)
        ctx.comm, ctx.out, ctx.reduced, ctx.keep = comm, out, reduced, keep
        ctx.save_for_backward(weight if keep else shard, x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, of_y):
        kept, x = ctx.saved_tensors
        weight = kept if ctx.keep else ctx.comm.all_gather(kept).view(ctx.out, -1)
        return None, ctx.reduced(ctx.comm, (of_y.T @ x).flatten()), of_y @ weight, None, None, None


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


ANSWERS = {
    page.first: Answers(
        right=[Sharded.apply],
        wrong=[
            (lambda comm, shard, x, out: comm.all_gather(shard).view(out, -1), "the output is not"),
            (lambda comm, shard, x, out: x @ comm.all_gather(shard).view(out, -1).T, "the shard has no gradient, or another one"),
            (lambda *given: Sharded.apply(*given, summed), "the shard has no gradient, or another one"),
            (lambda *given: Sharded.apply(*given, all_reduced), "a rank sent"),
            (lambda *given: Sharded.apply(*given, averaged, True), "bytes stay from forward to backward")],
    ),
    page.second: Answers(
        right=[average],
        wrong=[
            (of_whole_weights, "bytes were sent for it"),
            (of_shards_anew, "the average is right, but it took"),
            (not_averaged, "is not that of the average after 3 steps"),
            (lambda engine, decay: list, "expected a list of 8 shards")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
