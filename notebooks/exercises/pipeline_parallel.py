"""Exercises of the page *Pipeline parallelism*."""

import torch
from torch import nn
from torch.nn import functional as F

from refimpl import memory
from refimpl.pipeline.messages import message_traffic
from refimpl.pipeline.named_schedules import schedule
from refimpl.pipeline.step_simulation import Costs, simulate
from refimpl.pipeline.validate import validate

from . import SCALAR, exercise, launch


@exercise("bytes", (int, int, float))
def first(predict):
    """Grade `predict(ranks, micro_batches, rank, nbytes)`, which returns (micro-batches that a rank holds at once in
    1F1B, bytes that it sends in a step, share of a step in which rank 0 waits), `nbytes` those of a stage's output for
    one micro-batch; a forward takes 1, a backward 2."""
    for case in ((4, 8, 0, 100), (4, 8, 3, 100), (4, 8, 1, 100), (4, 2, 0, 100), (8, 64, 5, 100), (1, 4, 0, 100)):
        ranks, micro_batches, rank, nbytes = case
        built = schedule("1f1b", ranks, micro_batches)
        step = simulate(built, Costs(1, 1, 1))
        read = (validate(built)[rank].peak, message_traffic(built, rank, nbytes),
                float(step.idle[0] / step.step_time))
        said = predict(*case)
        if not isinstance(said, (tuple, list)) or len(said) != 3:
            return f"expected three numbers, what is held, sent, and the share of waiting; you say {said!r}"
        for what, mine, right in zip(("rank {} holds {:g} micro-batches", "rank {} sends {:g} bytes",
                                      "rank {} waits {:.4f} of a step"), said, read, strict=True):
            if abs(mine - right) > 1e-9:
                who = 0 if "waits" in what else rank
                return (f"{ranks} ranks, {micro_batches} micro-batches: you say {mine:g}, "
                        f"{what.format(who, right)}")
    return None


@exercise("what is computed", [float])
def second(weights):
    """Grade `weights(targets)`: what each micro-batch's mean loss is multiplied by, so that their sum is the mean over
    the batch. `targets`: a list of integer tensors, in which −100 does not count."""
    generator = torch.Generator().manual_seed(0)
    for rows, ignored in (((2, 2, 2), ()), ((2, 2, 1), ()), ((2, 2, 1), (0,)), ((3, 1), (1,))):
        targets = [torch.randint(5, (n, 4), generator=generator) for n in rows]
        logits = [torch.randn(n, 4, 5, generator=generator, dtype=torch.float64) for n in rows]
        for k in ignored:
            targets[k][0] = -100
        loss = [F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in zip(logits, targets, strict=True)]
        right = F.cross_entropy(torch.cat(logits).flatten(0, 1), torch.cat(targets).flatten())
        said = weights([each.clone() for each in targets])
        if len(said) != len(rows):
            return f"{len(rows)} micro-batches, and {len(said)} weights"
        mine = sum(float(w) * each for w, each in zip(said, loss, strict=True))
        if abs(mine - right) > 1e-12:
            return (f"micro-batches of {rows} rows, some targets of {list(ignored) or 'none'} ignored: the batch's "
                    f"mean is {right:.4f}, you get {mine:.4f}")
    return None


C, ROWS, M = 16, 2, 4


def _layers(p):
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)) for _ in range(p)]


def _evaluated(comm, evaluate):
    """Return (what a rank's `evaluate` returned, most bytes kept for a backward, messages' bytes)."""
    stage = _layers(comm.world_size)[comm.rank]
    x, y = torch.randn(2, M, ROWS, C, generator=torch.Generator().manual_seed(0))
    start = comm.traffic["send"]
    with memory.track(stage, x, y) as t:
        said = evaluate(stage, comm, list(x), list(y), F.mse_loss, torch.empty(ROWS, C))
        said = None if said is None else float(said)
    line = t.timeline
    kept = int(line.nbytes[:, line.categories.index("activations")].max()) if "activations" in line.categories else 0
    return said, kept, comm.traffic["send"] - start


@exercise("parity and bytes", SCALAR, process="ranks")
def third(evaluate):
    """Grade `evaluate(stage, comm, inputs, targets, loss, like)`: the batch's mean loss, on every rank, without keeping
    anything for a backward. `inputs`, `targets`: micro-batches of one size; `like`: of what goes between ranks."""
    x, y = torch.randn(2, M, ROWS, C, generator=torch.Generator().manual_seed(0))
    for p in (1, 2, 4):
        right = float(F.mse_loss(nn.Sequential(*_layers(p))(x), y).detach())
        for r, (said, kept, sent) in enumerate(launch(_evaluated, p, evaluate, device="cpu")):
            if said is None or abs(said - right) > 1e-5:
                return f"rank {r} of {p}: you return {said}, the mean loss is {right:.6f}; every rank needs it"
            if kept:
                return f"rank {r} of {p}: the loss is right, and {kept:,} bytes were kept for a backward"
            if r < p - 1 and sent != M * 4 * ROWS * C:
                return f"rank {r} of {p}: {sent:,} bytes were sent, expected {M * 4 * ROWS * C:,}, {M} outputs"
    return None
