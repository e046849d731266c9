"""Exercises of the page *Data parallel*."""

import contextlib

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel

from . import exercise, launch

CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=1, hidden=32, heads=2)
LENGTHS = ((16, 3, 9), (0, 0), (12,), (5, 16, 1, 2))  # targets of each row, of each rank


def _step(world_size, micro_batches, no_sync):
    """Return (parameters, bytes of model states, bytes sent for gradients) of one rank's second step."""
    layers = [torch.nn.Linear(128, 128, bias=False) for _ in range(4)]
    engine = DataParallel(torch.nn.Sequential(*layers), FakeCommunicator(0, world_size))
    x = torch.ones(2, 128)
    for _ in range(2):
        before = engine.comm.traffic
        with memory.track(engine.model, engine.optimizer) as t:
            for i in range(micro_batches):
                with engine.no_sync() if no_sync and i < micro_batches - 1 else contextlib.nullcontext():
                    engine.backward(engine(x).sum())
            held = t.now
            engine.step()
    states = sum(held[name] for name in ("parameters", "gradients", "optimizer state"))
    return 4 * 128 * 128, states, (engine.comm.traffic - before)["all_reduce"]


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(parameters, world_size, micro_batches, no_sync)`, which returns (bytes of model states on a rank,
    bytes of gradients that it sends in a step), in fp32 with AdamW, within one percent."""
    for world_size, micro_batches, no_sync in ((1, 1, False), (2, 1, False), (4, 3, False), (4, 3, True)):
        parameters, *read = _step(world_size, micro_batches, no_sync)
        said = predict(parameters, world_size, micro_batches, no_sync)
        for what, mine, theirs in zip(("holds", "sends"), said, read, strict=True):
            if not abs(mine - theirs) <= 0.01 * theirs:
                return (f"{parameters:,} parameters, {world_size} ranks, {micro_batches} micro-batches"
                        f"{', no_sync' * no_sync}: you say {mine:,}, a rank {what} {theirs:,} bytes")
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


def _unequal(comm, backward):
    """Return the gradients that `backward` left, and the bytes that it sent."""
    model = _model()
    backward(comm, model, *_batch(comm.rank))
    return [parameter.grad for parameter in model.parameters()], comm.traffic.total


@exercise("parity and bytes", process="ranks")
def second(backward):
    """Grade `backward(comm, model, tokens, targets)`, which leaves in every `.grad` the gradient of the mean loss over
    the targets of all ranks. Ranks have different numbers of them; besides gradients a number or two is sent."""
    model, batches = _model(), [_batch(rank) for rank in range(len(LENGTHS))]
    model(*(torch.cat(part) for part in zip(*batches, strict=True))).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    sent = 2 * (len(LENGTHS) - 1) * expected.nbytes // len(LENGTHS)
    for rank, (found, traffic) in enumerate(launch(_unequal, len(LENGTHS), backward, device="cpu")):
        if any(gradient is None for gradient in found):
            return f"a parameter has no gradient on rank {rank}"
        apart = ((torch.cat([each.flatten() for each in found]) - expected).norm() / expected.norm()).item()
        if not apart <= 1e-5:
            return f"the gradient of all targets is another one: rank {rank}'s is off by {apart:.1%} of its norm"
        if not 0.99 * sent <= traffic <= 1.01 * sent:
            return f"the gradient is right, but a rank sent {traffic:,} bytes; 2(N-1)/N of gradients is {sent:,}"
    return None
