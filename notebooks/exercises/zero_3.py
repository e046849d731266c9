"""Exercises of the page *ZeRO-3*."""

import torch

from refimpl import memory
from refimpl.zero import Zero3

from . import close, exercise, launch, readable
from .asking import ANYTHING, Asked, fault

HINTS = {
    "first": [
        "Write a `torch.autograd.Function` whose forward gathers the weight and whose backward gathers it again.",
        "`ctx.save_for_backward(shard, x)` keeps both, and not the weight. The whole weight is "
        "`comm.all_gather(shard).view(out, -1)`.",
        "With g the gradient of the output: that of x is g W. That of the shard is the reduce_scatter of gᵀ x, flat, "
        "with 'avg'."],
    "second": [
        "`engine.parameters.shards[bucket]` is this rank's shard of the weights. Clone each of them at the beginning.",
        "`own.lerp_(new, 1 - decay)` moves `own` in place. Return the list of your clones."]}

OUT, FEATURES = 128, 64
BESIDE = 8000  # bytes that may stay: torch.utils.checkpoint keeps 5,056, the state of random numbers


def _weight():
    return torch.randn(OUT, FEATURES, generator=torch.Generator().manual_seed(0))


def _inputs(rank):
    return torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1 + rank))


def _sharded(comm, sharded_linear):
    """Return (output, gradients of x and of the shard, bytes kept until backward, bytes sent) of this rank."""
    shard = _weight().flatten().chunk(comm.world_size)[comm.rank].clone().requires_grad_()
    x = _inputs(comm.rank).requires_grad_()
    with memory.track(shard, x) as t:
        y = sharded_linear(comm, shard, x, OUT)
        kept = t.now.total - t.start.total - y.nbytes
        if readable(y) and y.requires_grad:
            Asked(y.square().sum().backward, ANYTHING)()  # runs what the reader has written
    found = [each.detach() if each is not None and readable(each) else None for each in (y, x.grad, shard.grad)]
    return *found, kept, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def first(sharded_linear):
    """Grade `sharded_linear(comm, shard, x, out)`, which returns x Wᵀ. `shard` is this rank's 1/N of W, flat, of shape
    (out, features). W is whole in forward and in backward, and not between; `shard.grad` is a mean over ranks."""
    for N in (2, 4):
        weight = _weight().requires_grad_()
        xs = [_inputs(rank).requires_grad_() for rank in range(N)]
        expected = [x @ weight.T for x in xs]
        sum(y.square().sum() for y in expected).backward()
        mean, sent = (weight.grad / N).flatten().chunk(N), 3 * (N - 1) * weight.nbytes // N
        for rank, result in enumerate(launch(_sharded, N, sharded_linear, device="cpu")):
            y, of_x, of_shard, kept, traffic = result
            where = f"rank {rank} of {N}"
            if y is None or not close(y, expected[rank].detach()):
                return f"{where}: the output is not x Wᵀ"
            for name, found, right in (("x", of_x, xs[rank].grad), ("the shard", of_shard, mean[rank])):
                if found is None:
                    return f"{where}: the output is right, but {name} has no gradient"
                if not close(found, right):
                    times = next((f": it is {text} it" for factor, text in ((N, f"{N} times"), (1 / N, f"1/{N} of"))
                                  if close(found, right * factor)), "")
                    return f"{where}: the output is right, but not the gradient of {name}{times}"
            if kept > BESIDE:
                return f"the numbers are right, but {kept:,} bytes stay from forward to backward besides the output"
            if traffic != sent:
                return f"the numbers are right, but a rank sent {traffic:,} bytes; three times (N-1)/N is {sent:,}"
    return None


CASES, STEPS = ((2, 0.9), (4, 0.6)), 3  # (ranks, decay)


def _averaged(comm, average, decay):
    """Return which shards of the last `update` are not those of the average of whole weights, whether the weights have
    changed, and of the reader's calls the bytes that stay, the bytes sent, and the bytes of this rank's shards."""
    torch.manual_seed(0)
    widths = 64, 51, 33, 64, 7
    model = torch.nn.Sequential(*(torch.nn.Linear(i, o) for i, o in zip(widths, widths[1:], strict=False)))
    engine = Zero3(model, comm, look_ahead=0)
    right, before = _whole(engine), comm.traffic.total
    with memory.track(engine.model, engine.optimizer) as t:
        update = average(engine, decay)
    stays, sent = t.now.total - t.start.total, comm.traffic.total - before
    for step in range(STEPS):
        engine.backward(engine(torch.full((2, widths[0]), 1.0 + step + comm.rank)).square().sum())
        engine.step()
        whole, before = _whole(engine), comm.traffic.total
        with memory.track(engine.model, engine.optimizer) as t:
            found = update()
        stays, sent = stays + t.now.total - t.start.total, sent + comm.traffic.total - before
        changed = not all(map(torch.equal, whole, _whole(engine)))
        right = [old * decay + new * (1 - decay) for old, new in zip(right, whole, strict=True)]
        expected = [bucket.shard(flat, comm.rank) for bucket, flat in zip(engine.buckets, right, strict=True)]
        wrong = fault(found, [torch.Tensor]) or len(found) != len(expected) and (
            f"expected {len(expected)} shards, one for each bucket; you return {len(found)}")
        wrong = wrong or [k for k, pair in enumerate(zip(found, expected, strict=True)) if not close(*pair)]
        if wrong or changed:
            break
    return wrong, changed, step + 1, stays, sent, sum(x.nbytes for x in expected)


def _whole(engine):
    """Return all parameters of each bucket, flat."""
    with engine.gathered():
        return [engine.parameters.whole[bucket].clone() for bucket in engine.buckets]


@exercise("parity and bytes", callable, process="ranks")
def second(average):
    """Grade `average(engine, decay)`, which returns a function `update()`. Called after each step, that returns [this
    rank's shard of the running average of the weights] in the order of `engine.buckets`; Ψ/N numbers, nothing sent."""
    for N, decay in CASES:
        for rank, result in enumerate(launch(_averaged, N, average, decay, device="cpu")):
            wrong, changed, step, stays, sent, share = result
            if isinstance(wrong, str):
                return wrong
            if changed:
                return f"`update` changes the weights themselves on rank {rank} of {N}: keep clones"
            if wrong:
                return (f"shard {wrong[0]} on rank {rank} of {N} is not that of the average after step {step}, with a "
                        f"decay of {decay}")
            if sent:
                return f"the average is right, but {sent:,} bytes were sent for it; each rank has all that it needs"
            if stays > share + 1024:
                return (f"the average is right, but {stays:,} bytes of yours stay after {STEPS} steps; a rank's share "
                        f"of the weights is {share:,}")
    return None
