"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, all_reduced, averaged, graded
from torch.utils.checkpoint import checkpoint
from users_kit import function_of

from exercises import zero_3 as page

# --- first -----------------------------------------------------------------------------------------------------------


class ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, shard, x, out):
        ctx.comm, ctx.out = comm, out
        ctx.save_for_backward(shard, x)
        weight = comm.all_gather(shard).view(out, -1)
        return x @ weight.T

    @staticmethod
    def backward(ctx, of_y):
        shard, x = ctx.saved_tensors
        weight = ctx.comm.all_gather(shard).view(ctx.out, -1)
        of_weight = of_y.T @ x
        return None, ctx.comm.reduce_scatter(of_weight.flatten(), "avg"), of_y @ weight, None


def sharded_linear(comm, shard, x, out):
    return ShardedLinear.apply(comm, shard, x, out)


def gathered(comm, shard):
    """The whole weight, flat, with a gradient that is averaged."""
    return function_of(lambda ctx, shard: comm.all_gather(shard),
                       lambda ctx, gradient: comm.reduce_scatter(gradient, "sum") / comm.world_size).apply(shard)


def by_checkpoint(comm, shard, x, out):
    return checkpoint(lambda shard, x: torch.nn.functional.linear(x, gathered(comm, shard).unflatten(0, (out, -1))),
                      shard, x, use_reentrant=False)


def by_freeing(comm, shard, x, out):
    """As FSDP: the storage is empty between forward and backward."""
    weight = gathered(comm, shard).view(out, x.shape[-1])
    y = torch.einsum("bf,of->bo", x, weight)
    storage, nbytes = weight.untyped_storage(), weight.nbytes
    storage.resize_(0)

    def gather_again(_):
        storage.resize_(nbytes)
        comm.all_gather(shard.detach(), out=weight.data.view(-1))

    y.register_hook(gather_again)
    return y


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, shard, x, out, reduced, keep, of_x, scale):
        weight = comm.all_gather(shard).view(out, -1)
        ctx.comm, ctx.out, ctx.reduced, ctx.keep, ctx.of_x, ctx.scale = comm, out, reduced, keep, of_x, scale
        ctx.save_for_backward(weight if keep else shard, x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, of_y):
        kept, x = ctx.saved_tensors
        weight = kept if ctx.keep else ctx.comm.all_gather(kept).view(ctx.out, -1)
        of_x = ctx.comm.all_reduce(of_y @ weight, ctx.of_x) if ctx.of_x else of_y @ weight * ctx.scale
        of_weight = ctx.reduced(ctx.comm, (of_y.T @ x).flatten())
        return None, of_weight, of_x, None, None, None, None, None


def faulty(comm, shard, x, out, *, reduced=averaged, keep=False, of_x=None, scale=1.0):
    return Faulty.apply(comm, shard, x, out, reduced, keep, of_x, scale)


def flat_forgotten(comm, shard, x, out):
    return faulty(comm, shard, x, out, reduced=lambda comm, g: comm.reduce_scatter(g.view(out, -1), "avg"))


def without_x(comm, shard, x, out):
    return by_checkpoint(comm, shard, x.detach(), out)


def kept_in_bf16(comm, shard, x, out):
    y = sharded_linear(comm, shard, x, out)
    weight = comm.all_gather(shard.bfloat16())
    y.register_hook(lambda gradient: gradient + 0 * weight[0])
    return y


def freed(comm, shard, x, out):
    y = sharded_linear(comm, shard, x, out)
    y.untyped_storage().resize_(0)
    return y


# --- second ----------------------------------------------------------------------------------------------------------


def average(engine, decay):
    shards = [engine.parameters.shards[bucket].clone() for bucket in engine.buckets]

    def update():
        for own, bucket in zip(shards, engine.buckets, strict=True):
            own.lerp_(engine.parameters.shards[bucket], 1 - decay)
        return shards

    return update


def average_in_a_dict(engine, decay):
    own = {bucket: torch.empty_like(shard).copy_(shard) for bucket, shard in engine.parameters.shards.items()}

    def update():
        for bucket, shard in engine.parameters.shards.items():
            own[bucket].mul_(decay).add_(shard, alpha=1 - decay)
        return tuple(own[bucket] for bucket in engine.buckets)

    return update


def average_anew(engine, decay):
    """Other tensors each time; the old ones are let go of."""
    own = [engine.parameters.shards[bucket].detach().clone() for bucket in engine.buckets]

    def update():
        nonlocal own
        now = [engine.parameters.shards[bucket].detach() for bucket in engine.buckets]
        own = [decay * old + (1 - decay) * new for old, new in zip(own, now, strict=True)]
        return own

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


def faulty_average(engine, decay, *, alias=False, zeros=False, into=False, buckets=slice(None), late=False):
    shards = [engine.parameters.shards[bucket] for bucket in engine.buckets[buckets]]
    own = [shard if alias else torch.zeros_like(shard) if zeros else shard.clone() for shard in shards]
    last = [shard.clone() for shard in shards] if late else shards

    def update():
        for mine, new, before in zip(own, shards, last, strict=True):
            mine.lerp_(before, 1 - decay)
            if late:
                before.copy_(new)
            if into:
                new.copy_(mine)
        return own

    return update


def in_fp64(engine, decay):
    own = [engine.parameters.shards[bucket].double() for bucket in engine.buckets]

    def update():
        for mine, bucket in zip(own, engine.buckets, strict=True):
            mine.lerp_(engine.parameters.shards[bucket].double(), 1 - decay)
        return [mine.float() for mine in own]

    return update


ANSWERS = {
    page.first: Answers(
        right=[sharded_linear, by_checkpoint, by_freeing],
        wrong=[
            (lambda comm, shard, x, out: comm.all_gather(shard).view(out, -1), "the output is not"),
            (lambda comm, shard, x, out: x @ comm.all_gather(shard).view(-1, out), "the output is not"),
            (freed, "the output is not"),
            (lambda comm, shard, x, out: x @ comm.all_gather(shard).view(out, -1).T,
             "rank 0 of 2: the output is right, but the shard has no gradient"),
            (without_x, "rank 0 of 2: the output is right, but x has no gradient"),
            (partial(faulty, reduced=lambda comm, g: comm.reduce_scatter(g)),
             "the output is right, but not the gradient of the shard: it is 2 times it"),
            (partial(faulty, reduced=lambda comm, g: averaged(comm, g) / comm.world_size),
             "the output is right, but not the gradient of the shard: it is 1/2 of it"),
            (partial(faulty, reduced=lambda comm, g: g.chunk(comm.world_size)[comm.rank].clone()),
             "the output is right, but not the gradient of the shard"),
            (partial(faulty, of_x="sum"), "the output is right, but not the gradient of x"),
            (partial(faulty, scale=0.5), "the output is right, but not the gradient of x: it is 1/2 of it"),
            (flat_forgotten, "your function raises RuntimeError: Function FaultyBackward returned an invalid gradient"),
            (partial(faulty, reduced=all_reduced), "the numbers are right, but a rank sent"),
            (kept_in_bf16, "bytes stay from forward to backward")],
        saves_nothing=(partial(faulty, keep=True),
                       "the numbers are right, but 32,768 bytes stay from forward to backward besides the output"),
    ),
    page.second: Answers(
        right=[average, average_in_a_dict, average_anew],
        wrong=[
            (lambda engine, decay: lambda: [engine.parameters.shards[bucket] for bucket in engine.buckets],
             "shard 0 on rank 0 of 2 is not that of the average after step 1"),
            (lambda engine, decay: average(engine, 1 - decay), "is not that of the average after step 1"),
            (lambda engine, decay: average(engine, 0.9), "rank 0 of 4 is not that of the average after step 1, with a "
                                                         "decay of 0.6"),
            (partial(faulty_average, alias=True), "is not that of the average after step 1"),
            (partial(faulty_average, zeros=True), "is not that of the average after step 1"),
            (partial(faulty_average, late=True), "is not that of the average after step 1"),
            (partial(faulty_average, into=True), "`update` changes the weights themselves on rank 0 of 2"),
            (partial(faulty_average, buckets=slice(None, None, -1)), "shard 0 on rank 0 of 2 is not that"),
            (partial(faulty_average, buckets=slice(3)), "expected 4 shards, one for each bucket; you return 3"),
            (lambda engine, decay: lambda: torch.cat(average(engine, decay)()), "expected a list"),
            (lambda engine, decay: lambda: None, "expected a list"),
            (of_whole_weights, "bytes were sent for it"),
            (in_fp64, "the average is right, but")],
        saves_nothing=(of_shards_anew, "bytes of yours stay after 3 steps; a rank's share of the weights is"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
