"""Exercises of the page *Pipeline parallelism*."""

import torch
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.pipeline.messages import message_traffic
from refimpl.pipeline.named_schedules import schedule
from refimpl.pipeline.step_simulation import Costs, simulate
from refimpl.pipeline.validate import validate

from . import SCALAR, exercise, launch, readable

HINTS = {
    "first": [
        "Rank r does one backward after each forward as soon as it has begun as many micro-batches as there are ranks "
        "from r to the last. There may be fewer in the batch.",
        "A rank sends one message for each micro-batch to each neighbour. The first rank and the last have one "
        "neighbour; a rank alone has none.",
        "Rank 0 waits for p − 1 forwards and p − 1 backwards of the other ranks. It works for m of each."],
    "second": [
        "A micro-batch's mean is divided by its own count of targets. The batch's mean is divided by all of them.",
        "`(targets != -100).sum()` is the count of a micro-batch. Multiply its mean by its count over the sum of all "
        "counts."],
    "third": [
        "Under `torch.no_grad()`, for each micro-batch: take the input, or `comm.recv(like, rank - 1)`; call the "
        "stage; `comm.send` the output to rank + 1.",
        "The last rank adds up `loss(output, target) / len(inputs)`. The others have 0.",
        "`comm.all_reduce` of that sum gives it to every rank. Send with `async_op=True`, and wait for the handles "
        "in the end."]}


@exercise("bytes and time", (int, int, float))
def first(predict):
    """Grade `predict(ranks, micro_batches, rank, nbytes)`, which returns (micro-batches that a rank holds at once in
    1F1B, bytes that it sends in a step, share of a step in which rank 0 waits), `nbytes` those of a stage's output for
    one micro-batch; a forward takes 1, a backward 2."""
    for case in ((4, 8, 0, 100), (4, 8, 3, 100), (4, 8, 2, 60), (4, 2, 0, 100), (4, 2, 1, 100), (8, 64, 5, 12),
                 (1, 4, 0, 100)):
        ranks, micro_batches, rank, nbytes = case
        built = schedule("1f1b", ranks, micro_batches)
        step = simulate(built, Costs(1, 1, 1))
        asked, (held, sent, waits) = f"{ranks} ranks, {micro_batches} micro-batches", predict(*case)
        most, traffic, share = validate(built)[rank].peak, message_traffic(built, rank, nbytes), (
            float(step.idle[0] / step.step_time))
        if held != most:
            return f"{asked}: you say that rank {rank} holds {held:g} micro-batches, it holds {most}"
        if sent != traffic:
            return f"{asked} of {nbytes} bytes: you say that rank {rank} sends {sent:g} bytes, it sends {traffic}"
        if not abs(waits - share) <= 1e-4:
            return f"{asked}: you say that rank 0 waits for {waits:.6f} of a step, it waits for {share:.6f}"
    return None


def _number(value):
    """Return a number, or a tensor of one, as a float: NaN if the tensor's storage was freed."""
    return float(value) if not isinstance(value, torch.Tensor) or readable(value) else float("nan")


def _targets(*counts):
    """Return micro-batches of (rows, 4) targets, of which so many are not −100, in random places."""
    generator = torch.Generator().manual_seed(0)
    for count in counts:
        flat = torch.randint(5, (-(-count // 4) * 4 or 4,), generator=generator)
        flat[torch.randperm(len(flat), generator=generator)[count:]] = -100
        yield flat.view(-1, 4)


@exercise("shares of the targets", [SCALAR])
def second(weights):
    """Grade `weights(targets)`, which returns a list: what each micro-batch's mean loss is multiplied by, so that their
    sum is the mean over the batch. `targets`: a list of integer tensors, in which −100 does not count."""
    for counts in ((8, 8, 8), (8, 8, 4), (5, 8, 4), (9, 3), (7, 0, 2, 1)):
        said = weights(list(_targets(*counts)))
        if len(said) != len(counts):
            return f"{len(counts)} micro-batches, and {len(said)} weights"
        for number, (mine, count) in enumerate(zip(map(_number, said), counts, strict=True)):
            if not abs(mine - count / sum(counts)) <= 1e-5:
                return (f"of micro-batches with {counts} targets that count, number {number} has a share of "
                        f"{count / sum(counts):.6f}; you multiply its loss by {mine:.6f}")
    return None


C, ROWS = 16, 2
CASES = (1, 4, F.mse_loss), (2, 3, F.binary_cross_entropy_with_logits), (4, 5, F.mse_loss)  # ranks, micro-batches, loss


def _layers(p):
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)) for _ in range(p)]


def _batch(m):
    return torch.randn(2, m, ROWS, C, generator=torch.Generator().manual_seed(0))


def _evaluated(comm, evaluate, m, loss):
    """Return (what a rank's `evaluate` returned, most bytes kept for a backward, bytes sent to another rank, and by
    collectives)."""
    stage, (x, y) = _layers(comm.world_size)[comm.rank], _batch(m)
    with memory.track(stage, x, y) as t:
        said = _number(evaluate(stage, comm, list(x), list(y), loss, torch.empty(ROWS, C)))
    line = t.timeline
    kept = int(line.nbytes[:, line.categories.index("activations")].max()) if "activations" in line.categories else 0
    return said, kept, comm.traffic["send"], comm.traffic.total - comm.traffic["send"]


@exercise("parity and bytes", SCALAR, process="ranks")
def third(evaluate):
    """Grade `evaluate(stage, comm, inputs, targets, loss, like)`: the batch's mean loss, on every rank, without keeping
    anything for a backward. `inputs`, `targets`: micro-batches of one size; `like`: of what goes between ranks."""
    for p, m, loss in CASES:
        x, y = _batch(m)
        right, nbytes = float(loss(nn.Sequential(*_layers(p))(x), y).detach()), 4 * ROWS * C
        for r, (said, kept, sent, shared) in enumerate(launch(_evaluated, p, evaluate, m, loss, device="cpu")):
            outputs = m if r < p - 1 else 0
            if not abs(said - right) <= 1e-5:
                return f"rank {r} of {p}: you return {said:.6f}, the mean loss is {right:.6f}; every rank needs it"
            if kept:
                return f"rank {r} of {p}: the loss is right, and {kept:,} bytes were kept for a backward"
            if sent != outputs * nbytes:
                return (f"rank {r} of {p}: the loss is right, but {sent:,} bytes were sent, expected "
                        f"{outputs * nbytes:,}: {outputs} outputs")
            if shared > m * nbytes // 2:
                return (f"rank {r} of {p}: the loss is right, but collectives sent {shared:,} bytes; every rank needs "
                        "one number")
    return None
