"""Exercises of the page *Data parallel*."""

import contextlib

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel

from . import exercise, launch, readable

HINTS = {
    "first": [
        "Every rank holds all model states: a parameter, its gradient and two moments, each 4 bytes.",
        "An all_reduce of B bytes sends 2(N-1)/N · B from each rank. One rank alone sends nothing.",
        "Without `no_sync` each micro-batch's gradients are averaged; with it only those of the last micro-batch."],
    "second": [
        "The gradient of a mean over n targets is the sum of all rows' gradients, divided by n.",
        "Find n first: `comm.all_reduce` of the number of this rank's targets that are not -100. A rank that has none "
        "takes part, too.",
        "Run the backward of the sum of losses / n. Then all_reduce each parameter's `.grad` with 'sum', into itself."]}

CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=1, hidden=32, heads=2)
LENGTHS = ((16, 3, 9), (12,), (0, 0), (5, 16, 1, 2))  # targets of each row, of each rank


def _step(width, world_size, micro_batches, no_sync):
    """Return (parameters, bytes of model states, bytes sent for gradients) of one rank's second step."""
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
    engine = DataParallel(torch.nn.Sequential(*layers), FakeCommunicator(0, world_size))
    x = torch.ones(2, width)
    for _ in range(2):
        before = engine.comm.traffic
        with memory.track(engine.model, engine.optimizer) as t:
            for i in range(micro_batches):
                with engine.no_sync() if no_sync and i < micro_batches - 1 else contextlib.nullcontext():
                    engine.backward(engine(x).sum())
            held = t.now
            engine.step()
    states = sum(held[name] for name in ("parameters", "gradients", "optimizer state"))
    return 4 * width * width, states, (engine.comm.traffic - before)["all_reduce"]


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(parameters, world_size, micro_batches, no_sync)`, which returns (bytes of model states on a rank,
    bytes of gradients that it sends in a step), in fp32 with AdamW, within one percent."""
    for case in ((128, 1, 1, False), (128, 2, 1, False), (192, 4, 3, False), (192, 4, 3, True), (128, 8, 2, False)):
        (parameters, *read), (_, world_size, micro_batches, no_sync) = _step(*case), case
        said = predict(parameters, world_size, micro_batches, no_sync)
        for what, mine, theirs in zip(("holds", "sends"), said, read, strict=True):
            if not abs(mine - theirs) <= 0.01 * theirs:
                return (f"{parameters:,} parameters, {world_size} rank{'s' * (world_size > 1)}, {micro_batches} "
                        f"micro-batch{'es' * (micro_batches > 1)}{', no_sync' * no_sync}: you say {mine:,}, a rank "
                        f"{what} {theirs:,} bytes")
    return None


def _batch(rank):
    """Return (tokens, targets) of a rank: a row for each of its LENGTHS, padded with targets of −100."""
    rows = torch.randint(0, 64, (2, len(LENGTHS[rank]), 16), generator=torch.Generator().manual_seed(rank))
    for row, length in enumerate(LENGTHS[rank]):
        rows[1, row, length:] = -100
    return rows


def _model():
    torch.manual_seed(0)
    return GPT(CONFIG)


def _norm(tensors):
    return torch.cat([each.flatten() for each in tensors]).norm().item()


def _unequal(comm, backward):
    """Return the gradients that `backward` left, those without numbers as None, and the bytes that it sent."""
    model = _model()
    backward(comm, model, *_batch(comm.rank))
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: g if g is not None and readable(g) else None for name, g in found.items()}, comm.traffic.total


@exercise("parity and bytes", bool, process="ranks")
def second(backward):
    """Grade `backward(comm, model, tokens, targets)`, which leaves in every `.grad` the gradient of the mean loss over
    the targets of all ranks. Ranks have different numbers of them; besides gradients a number or two is sent."""
    for world_size in (2, 4):
        model, batches = _model(), [_batch(rank) for rank in range(world_size)]
        model(*(torch.cat(part) for part in zip(*batches, strict=True))).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        norm, nbytes = _norm(expected.values()), sum(gradient.nbytes for gradient in expected.values())
        sent = 2 * (world_size - 1) * nbytes // world_size
        for rank, (found, traffic) in enumerate(launch(_unequal, world_size, backward, device="cpu")):
            for name, gradient in found.items():
                if gradient is None:
                    return f"{name} has no gradient on rank {rank} of {world_size}"
            apart = {name: gradient - expected[name] for name, gradient in found.items()}
            if not _norm(apart.values()) <= 1e-5 * norm:
                worst = max(apart, key=lambda name: _norm([apart[name]]))
                return (f"the gradient of the mean over all ranks' targets is another: rank {rank} of {world_size} is "
                        f"off by {_norm(apart.values()) / norm:.2g} of its norm, most in {worst}")
            if not 0.99 * sent <= traffic <= 1.01 * sent:
                return (f"the gradient is right, but rank {rank} of {world_size} sent {traffic:,} bytes; 2(N-1)/N of "
                        f"gradients is {sent:,}")
    return None
