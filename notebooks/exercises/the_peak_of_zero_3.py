"""Exercises of the page *The peak of ZeRO-3*."""

import torch
from torch import nn

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero3

from . import exercise

HINTS = {
    "first": [
        "A rank keeps 1/N of all layers. On top of that, the layer that computes is whole, and those ahead. No more "
        "layers can be whole than there are.",
        "Forward gathers each layer. Backward does, too, but for the last layer, which is still whole. Each gradient "
        "is reduced once.",
        "A gather and a reduce_scatter of a layer both send (N − 1)/N of its bytes. There are 2L − 1 gathers."],
    "second": [
        "In backward, while unit k computes, units k and k − 1 are whole, and the gradients of unit k are there. The "
        "first unit has none before it.",
        "The shards of all parameters are there, and the shards of the gradients of the units after k.",
        "Return the largest, over k, of sum(units)/N + 2 units[k] + units[k − 1] + sum(units[k + 1:])/N."]}


def _stack(layers, width, world_size, ahead):
    """Return (peak bytes of parameters, bytes sent of parameters and gradients) of a stack's third step."""
    model, x = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))), torch.ones(2, width)
    engine = Zero3(model, FakeCommunicator(0, world_size), look_ahead=ahead)
    sent = []
    for _ in range(3):
        before = engine.comm.traffic
        with memory.track(model, engine.optimizer) as t:
            engine.backward(engine(x).sum())
            engine.step()
        sent.append(engine.comm.traffic - before)
    checks = 3 * (world_size - 1) * 24  # that all ranks do the same, before forward, backward and step
    most = int(t.timeline.nbytes[:, t.timeline.categories.index("parameters")].max())
    return most, sent[-1]["all_gather"] - checks + sent[-1]["reduce_scatter"]


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(layers, nbytes, world_size, ahead)`, which returns (the most bytes of parameters at a moment,
    bytes that a rank sends of parameters and gradients) in a step of stage 3, of layers of `nbytes` each, with
    `look_ahead` of `ahead`, a layer being a unit."""
    for layers, width, world_size, ahead in ((4, 64, 4, 0), (8, 64, 4, 2), (8, 32, 2, 1), (3, 64, 4, 9), (1, 48, 2, 1)):
        nbytes = 4 * width * width
        most, sent = _stack(layers, width, world_size, ahead)
        asked = f"{layers} layers of {nbytes:,} bytes, {world_size} ranks, {ahead} ahead"
        said = predict(layers, nbytes, world_size, ahead)
        if most - said[0] not in (0, 4):  # one NaN of 4 bytes, which released parameters show
            return f"{asked}: you say {said[0]:,} at most, a rank has {most:,} bytes of parameters"
        if said[1] != sent:
            return f"{asked}: the bytes held are right; you say {said[1]:,} are sent, a rank sends {sent:,}"
    return None


WIDTH = 64  # features between units


def _unequal(hidden, world_size):
    """Return (bytes of units, most bytes of parameters and gradients) of a third step of units of two layers each,
    WIDTH → hidden → WIDTH."""
    wide = [((WIDTH, h), (h, WIDTH)) for h in hidden]
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(*each) for each in sizes)) for sizes in wide))
    engine = Zero3(model, FakeCommunicator(0, world_size), units=list(model), in_flight_bytes=0)
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        with memory.track(model, engine.optimizer) as t:
            engine.backward(engine(x).sum())
            engine.step()
    columns = [t.timeline.categories.index(kind) for kind in ("parameters", "gradients")]
    units = [sum(4 * (i * o + o) for i, o in sizes) for sizes in wide]
    return units, int(t.timeline.nbytes[:, columns].sum(1).max())


@exercise("bytes", int)
def second(highest):
    """Grade `highest(units, world_size)`, which returns the most bytes of parameters and gradients in a step of stage 3
    with one unit ahead and nothing on the wire: `units` are the bytes of each, in the order of forward."""
    for hidden, world_size in (([128] * 4, 4), ([64, 256, 128], 2), ([256, 64, 64, 128], 4), ([512, 64], 8), ([96], 2)):
        units, most = _unequal(hidden, world_size)
        said = highest(list(units), world_size)
        if most - said not in (0, 4):
            return (f"units of {units} bytes, {world_size} ranks: you say {said:,} at most, a rank has {most:,} "
                    "bytes of parameters and gradients")
    return None
