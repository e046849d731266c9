"""Exercises of the page *Offload to the CPU*."""

import functools
import random

import torch
from torch import nn

from refimpl.comm import FakeCommunicator
from refimpl.offload import CPUAdam, HostStore
from refimpl.offload.closed_forms import pipelined
from refimpl.zero import Zero2

from . import exercise

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(parameters, way, micro_batches)`: bytes that a step of Zero2 on one rank copies (to the host, to
    the device), of parameters in 16 bits. `way`: "store" for HostStore, "update" for CPUAdam."""
    for size, micro_batches in ((16, 1), (64, 1), (64, 4)):
        for way in ("update", "store"):
            right, said = _copied(size, way, micro_batches), predict(size * size, way, micro_batches)
            if not isinstance(said, (tuple, list)) or len(said) != 2:
                return f"expected a pair, bytes to the host and to the device; you say {said!r}"
            for direction, mine, read in zip(("to the host", "to the device"), said, right, strict=True):
                if mine != read:
                    return (f"{size * size:,} parameters, way {way!r}, {micro_batches} micro-batches: you say "
                            f"{mine:,} bytes {direction}, {read:,} were copied")
    return None


def _copied(size, way, micro_batches):
    """Return bytes copied in the third step, (to the host, to the device)."""
    model = nn.Linear(size, size, bias=False).bfloat16()
    options = {"store": HostStore()} if way == "store" else {"update": CPUAdam()}
    engine = Zero2(model, FakeCommunicator(0, 1), ADAMW, **options)
    link = options["store"] if way == "store" else engine.update.link
    for _ in range(3):
        before = dict(link.moved)
        for _ in range(micro_batches):
            engine.backward(engine(torch.ones(1, size, dtype=torch.bfloat16)).sum())
        engine.step()
    return [link.moved[direction] - before[direction] for direction in ("to host", "to device")]


@exercise("what is computed", float)
def second(seconds):
    """Grade `seconds(computes, copies, buffers)`: when the last tile has been copied. Tiles are computed one after the
    other; the link carries one at a time; a tile is computed into one of `buffers` buffers, used in turn."""
    dice = random.Random(0)
    cases = [([1.0], [2.0], 2), ([1.0] * 4, [1.0] * 4, 1), ([1.0] * 4, [3.0] * 4, 2), ([3.0] * 4, [1.0] * 4, 2)]
    cases += [([dice.uniform(0, 3) for _ in range(12)], [dice.uniform(0, 3) for _ in range(12)],
               dice.choice((1, 2, 3))) for _ in range(20)]
    for computes, copies, buffers in cases:
        right, said = pipelined(computes, copies, buffers)[0], seconds(list(computes), list(copies), buffers)
        if abs(said - right) > 1e-6:
            shown = f"computes {computes}, copies {copies}" if len(computes) < 5 else f"{len(computes)} tiles"
            return f"{shown}, {buffers} buffers: you say {said:.6g} s, it takes {right:.6g}"
    return None


@exercise("what is computed", int)
def third(put):
    """Grade `put(host, key, tensors, changed)`: keep in host[key] a list of copies, flat or not, empty the tensors'
    storages, and return how many bytes were copied; what did not change is not copied again."""
    host, generator = {}, torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (5, 8, 300)]
    for turn, changed in enumerate((True, False, False, True, False)):
        expected = [tensor.clone() for tensor in tensors]
        said, needed = put(host, ("parameters", 3), tensors, changed), 4 * 313 * (changed or not turn)
        if any(tensor.untyped_storage().nbytes() for tensor in tensors):
            return "a tensor's storage still has bytes after put: resize it to 0"
        kept = host.get(("parameters", 3), ())
        if len(kept) != 3 or not all(torch.equal(mine.view(-1), right) for mine, right in zip(kept, expected,
                                                                                             strict=True)):
            return f"after put number {turn + 1} (changed={changed}) host[key] does not hold what the tensors held"
        if said != needed:
            return f"put number {turn + 1} (changed={changed}): you copied {said} bytes, {needed} are needed"
        for tensor, right in zip(tensors, kept, strict=True):
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.copy_(right.view(-1))
        if turn == 2:
            tensors[2].mul_(2)  # the next put says that it changed
    return None
