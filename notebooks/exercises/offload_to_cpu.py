"""Exercises of the page *Offload to the CPU*."""

import functools
import random

import torch
from torch import nn

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.offload import CPUAdam, HostStore
from refimpl.offload.closed_forms import pipelined
from refimpl.zero import Zero2

from . import exercise, readable
from .asking import fault

HINTS = {
    "first": [
        "A parameter has a gradient of 2 bytes, and 12 bytes of states: two moments and a master, 4 bytes each.",
        "`CPUAdam` copies each micro-batch's gradients to the host, and the weights back once, 2 bytes each.",
        "A store copies 12 bytes of states there and back, once in a step. It copies gradients there and back, too, "
        "once for each micro-batch: before a second one adds to them they come back."],
    "second": [
        "Keep two moments for each tile: when it is computed, and when it has been copied.",
        "A tile begins when the one before is computed, and the copy that last used its buffer has ended.",
        "computed[i] = max(computed[i - 1], copied[i - buffers]) + computes[i], and "
        "copied[i] = max(computed[i], copied[i - 1]) + copies[i]. What does not exist is 0."],
    "third": [
        "Copy if `changed or key not in host`. A copy has a storage of its own: `tensor.clone()`.",
        "`tensor.untyped_storage().resize_(0)` empties a storage. `tensor.nbytes` is what was copied of it."]}

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(parameters, way, micro_batches)`: bytes that a step of Zero2 on one rank copies (to the host, to
    the device), of parameters in 16 bits. `way`: "store" for HostStore, "update" for CPUAdam."""
    for size, micro_batches in ((16, 1), (64, 1), (64, 4), (32, 3)):
        for way in ("update", "store"):
            said, copied = predict(size * size, way, micro_batches), _copied(size, way, micro_batches)
            for direction, mine, read in zip(("to the host", "to the device"), said, copied, strict=True):
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


@exercise("seconds", float)
def second(seconds):
    """Grade `seconds(computes, copies, buffers)`: when the last tile has been copied. Tiles are computed one after the
    other; the link carries one at a time; a tile is computed into one of `buffers` buffers, used in turn."""
    dice = random.Random(0)
    cases = [([1.0], [2.0], 2), ([1.0] * 4, [1.0] * 4, 1), ([1.0] * 4, [3.0] * 4, 2), ([3.0] * 4, [1.0] * 4, 2)]
    cases += [([dice.uniform(0, 3) for _ in range(12)], [dice.uniform(0, 3) for _ in range(12)],
               dice.choice((1, 2, 3))) for _ in range(20)]
    for computes, copies, buffers in cases:
        right, said = pipelined(computes, copies, buffers)[0], seconds(list(computes), list(copies), buffers)
        if not abs(said - right) <= 1e-5 * right:
            shown = f"computes {computes}, copies {copies}" if len(computes) < 5 else f"{len(computes)} tiles"
            return f"{shown}, {buffers} buffers: you say {said:.6g} s, it takes {right:.6g}"
    return None


SIZES = {("parameters", 3): (torch.bfloat16, [(5,), (8, 3), (300,)]), "masters": (torch.float32, [(7, 2), (64,)])}
PUTS = [("masters", False), (("parameters", 3), True), ("masters", False), (("parameters", 3), False),
        (("parameters", 3), True), ("masters", True), (("parameters", 3), False)]  # (key, changed)


@exercise("parity and bytes", int)
def third(put):
    """Grade `put(host, key, tensors, changed)`: keep in host[key] a list of copies, flat or not, empty the tensors'
    storages, and return how many bytes were copied; what did not change, and is there, is not copied again."""
    device = {key: [torch.empty(shape, dtype=dtype) for shape in shapes] for key, (dtype, shapes) in SIZES.items()}
    storages = {key: [x.untyped_storage() for x in tensors] for key, tensors in device.items()}
    host, held, generator = {}, {}, torch.Generator().manual_seed(0)
    for number, (key, changed) in enumerate(PUTS, 1):
        tensors, copies, needed = device[key], changed or key not in held, sum(x.nbytes for x in device[key])
        for x in tensors:  # other numbers each time, of which `put` must not know where nothing changed
            x.untyped_storage().resize_(x.nbytes)
            x.normal_(generator=generator)
        now, more = [x.clone() for x in tensors], needed if key not in held else 0
        held[key] = now if copies else held[key]
        with memory.track(tensors, *host.values()) as t:
            said = put(host, key, list(tensors), changed)
        where = f"put number {number} (of key {key!r}, changed={changed})"
        if any(storage.nbytes() for storage in storages[key]):
            return f"after {where} a tensor's storage still has bytes: resize it to 0"
        if [x.shape for x in tensors] != [x.shape for x in held[key]]:
            return f"after {where} a tensor has another shape: empty its storage alone"
        for each in held:
            if wrong := _not_in(host, each, held[each], now if each == key else None):
                return f"after {where} {wrong}"
        if said != needed * copies:
            return f"{where}: you say that {said:,} bytes were copied, {needed * copies:,} are needed"
        stays = t.now.total - t.start.total + needed - more
        if stays > 0:
            return f"after {where} host[key] is right, but {stays:,} bytes more than its copies stay in memory"
    return None


def _not_in(host, key, held, now):
    """Return what is wrong with host[key], which has to be equal to `held`; `now`: what was there at the last put."""
    kept = host.get(key, ())
    if fault(kept, [torch.Tensor]) or len(kept) != len(held):
        return f"host[{key!r}] is not a list of {len(held)} tensors"
    if not all(map(readable, kept)):
        return f"host[{key!r}] has tensors of the storage that was emptied: keep clones"
    if _equal(kept, held):
        return None
    if now is not None and _equal(kept, now):
        return f"host[{key!r}] was copied again, but nothing changed"
    return f"host[{key!r}] does not hold what the tensors held"


def _equal(kept, held):
    return all(mine.dtype == right.dtype and torch.equal(mine.flatten(), right.flatten())
               for mine, right in zip(kept, held, strict=True))
