"""Exercises of the page *ZeRO-1 and 2*."""

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero import DataParallel, Zero1, Zero2

from . import close, exercise, launch

HINTS = {
    "first": [
        "Write p, g and k for the bytes of a parameter, its gradient and its optimizer state. Masters are in k.",
        "In fp32 they are 4, 4 and 8. In bf16 they are 2, 2 and 12: two moments and a master, 4 bytes each.",
        "Stage 1 divides k by the world size, stage 2 also g. Stage 0 divides nothing."],
    "second": [
        "`flat.chunk(comm.world_size)[comm.rank]` is this rank's part, a view: what is written to it stands in flat.",
        "Give AdamW an `nn.Parameter` of that part alone. It makes two moments for the part.",
        "In `step`: reduce_scatter the gradient with 'avg' into the part's `.grad`, step, set `.grad` to None, "
        "all_gather the part with `out=flat`."],
    "third": [
        "`register_post_accumulate_grad_hook` calls your function when a parameter's gradient is complete.",
        "In the hook: reduce_scatter `parameter.grad.flatten()` with 'avg', keep the result in a dict by parameter, "
        "set `.grad` to None.",
        "The hook's handle has `remove()`. Call it for every handle after `loss.backward()`."]}

ENGINES = (DataParallel, Zero1, Zero2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _layers(number=4, width=64, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(number)))


def _states(world_size, stage, dtype):
    """Return (parameters, bytes of model states on a rank when all gradients exist)."""
    engine = ENGINES[stage](_layers(width=128, dtype=DTYPES[dtype]), FakeCommunicator(0, world_size))
    x = torch.ones(2, 128, dtype=DTYPES[dtype])
    for _ in range(2):
        with memory.track(engine.model, engine.optimizer) as t:
            engine.backward(engine(x).sum())
            held = t.now
            engine.step()
    return 4 * 128 * 128, sum(held[name] for name in ("parameters", "gradients", "optimizer state"))


@exercise("bytes", float)
def first(predict):
    """Grade `predict(parameters, world_size, stage, dtype)`, which returns the bytes of model states on a rank with
    AdamW and, in bf16, fp32 masters, within one percent."""
    for case in ((4, 0, "fp32"), (4, 1, "fp32"), (4, 2, "fp32"), (8, 1, "bf16"), (8, 2, "bf16")):
        parameters, read = _states(*case)
        said = predict(parameters, *case)
        if not abs(said - read) <= 0.01 * read:
            world_size, stage, dtype = case
            return (f"{parameters:,} parameters in {dtype}, {world_size} ranks, stage {stage}: you say {said:,}, "
                    f"a rank holds {read:,} bytes")
    return None


NUMEL, STEPS = 4096, 3


def _gradient(step, rank):
    """Return a gradient; half of it is as small as AdamW's eps, so that twice the gradient is another step."""
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + rank))
    gradient[::2] *= 1e-8
    return gradient


def _weights():
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000))  # AdamW's decay moves them, Adam does not


def _sharded(comm, sharded):
    """Return the parameters after some steps, the bytes kept beside them, and the bytes sent."""
    flat, gradients = _weights(), [_gradient(step, comm.rank) for step in range(STEPS)]
    with memory.track(flat, gradients) as t:
        step = sharded(comm, flat)
        for gradient in gradients:
            step(gradient)
    return flat, t.now.total - t.start.total, comm.traffic.total


@exercise("parity and bytes", callable, process="ranks")
def second(sharded):
    """Grade `sharded(comm, flat)`, which returns a function `step(gradient)`: an AdamW step with lr=1e-3 on `flat`, in
    place, with the mean over ranks of `gradient`. Each rank keeps the moments of 1/N of the elements."""
    for world_size in (2, 4):
        expected = torch.nn.Parameter(_weights())
        optimizer = torch.optim.AdamW([expected], lr=1e-3)
        for step in range(STEPS):
            expected.grad = sum(_gradient(step, rank) for rank in range(world_size)) / world_size
            optimizer.step()
        moments, sent = 8 * NUMEL // world_size, STEPS * 2 * (world_size - 1) * 4 * NUMEL // world_size
        for rank, (flat, stays, traffic) in enumerate(launch(_sharded, world_size, sharded, device="cpu")):
            if not torch.allclose(flat, expected.detach(), rtol=0, atol=1e-6):
                return f"rank {rank} of {world_size} has other parameters than AdamW after {STEPS} steps"
            if stays > moments + 1024:
                return (f"the parameters are right, but {stays:,} bytes stay on rank {rank} of {world_size}; two "
                        f"moments of a shard are {moments:,}")
            if traffic != sent:
                return f"the parameters are right, but a rank sent {traffic:,} bytes; 2(N-1)/N of all is {sent:,}"
    return None


def _in_shards(comm, backward):
    """Return the shards that `backward` returned, how many gradients and hooks it left, the peak bytes of gradients,
    and the bytes sent."""
    model, x = _layers(8), torch.full((2, 64), 1.0 + comm.rank)
    with memory.track(model) as t:
        shards = backward(comm, model, model(x).sum())
    columns = [t.timeline.categories.index(name) for name in ("gradients", "communication")]
    held = int(t.timeline.nbytes[:, columns].sum(axis=1).max())
    whole = [p for p in model.parameters() if p.grad is not None]
    hooked = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    return shards, len(whole), len(hooked), held, comm.traffic.total


@exercise("parity and bytes", [torch.Tensor], process="ranks")
def third(backward):
    """Grade `backward(comm, model, loss)`, which returns [this rank's chunk of each parameter's mean gradient], in the
    order of `model.parameters()`, with never more than two whole gradients at a time, and none in the end."""
    for world_size in (2, 4):
        model = _layers(8)
        sum(model(torch.full((2, 64), 1.0 + rank)).sum() for rank in range(world_size)).div(world_size).backward()
        expected = [p.grad.flatten().chunk(world_size) for p in model.parameters()]
        nbytes, largest = 8 * 4 * 64 * 64, 4 * 64 * 64
        most, sent = nbytes // world_size + 2 * largest, (world_size - 1) * nbytes // world_size
        for rank, result in enumerate(launch(_in_shards, world_size, backward, device="cpu")):
            shards, whole, hooked, held, traffic = result
            if len(shards) != len(expected):
                return f"expected {len(expected)} shards, one for each parameter; you return {len(shards)}"
            for number, (mine, chunks) in enumerate(zip(shards, expected, strict=True)):
                if not close(mine.flatten(), chunks[rank]):
                    return f"shard {number} on rank {rank} of {world_size} is not chunk {rank} of the mean gradient"
            if whole or hooked:
                return f"{whole} gradients and hooks on {hooked} parameters are left: set None, and remove() them"
            if held > most:
                return (f"the shards are right, but gradients took {held:,} bytes; shards and two whole ones are "
                        f"{most:,}")
            if traffic != sent:
                return f"the shards are right, but a rank sent {traffic:,} bytes; (N-1)/N of all is {sent:,}"
    return None
