"""Exercises of the page *The peak of ZeRO-3*."""

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.zero import Zero3

from . import exercise

WIDTH, NBYTES = 64, 4 * 64 * 64  # of a layer: its features, and the bytes of its weight


def _layers(number):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)))


def _stack(layers, world_size, ahead):
    """Return (peak bytes of parameters, bytes sent of parameters and gradients) of a stack's third step."""
    model, x = _layers(layers), torch.ones(2, WIDTH)
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
    for layers, world_size, ahead in ((4, 4, 0), (8, 4, 2), (8, 2, 1), (3, 4, 9)):
        most, sent = _stack(layers, world_size, ahead)
        asked = f"{layers} layers of {NBYTES:,} bytes, {world_size} ranks, {ahead} ahead"
        said = predict(layers, NBYTES, world_size, ahead)
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            return f"expected a pair, the most bytes and the bytes sent; you say {said!r}"
        if not 0 <= most - said[0] <= 4:  # one NaN, which released parameters show
            return f"{asked}: you say {said[0]:,} at most, a rank has {most:,} bytes of parameters"
        if said[1] != sent:
            return f"{asked}: the bytes held are right; you say {said[1]:,} are sent, a rank sends {sent:,}"
    return None


def _unequal(hidden, world_size):
    """Return (bytes of units, most bytes of parameters and gradients) of a third step of units of two layers each,
    WIDTH → hidden → WIDTH."""
    torch.manual_seed(0)
    wide = [((WIDTH, h), (h, WIDTH)) for h in hidden]
    model = torch.nn.Sequential(*(torch.nn.Sequential(*(torch.nn.Linear(*each) for each in sizes)) for sizes in wide))
    engine = Zero3(model, FakeCommunicator(0, world_size), units=list(model), in_flight_bytes=0)
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        with memory.track(model, engine.optimizer) as t:
            engine.backward(engine(x).sum())
            engine.step()
    columns = [t.timeline.categories.index(kind) for kind in ("parameters", "gradients")]
    units = [sum(4 * (i * o + o) for i, o in sizes) for sizes in wide]
    return units, int(t.timeline.nbytes[:, columns].sum(1).max())


@exercise("what is computed", int)
def second(highest):
    """Grade `highest(units, world_size)`, which returns the most bytes of parameters and gradients in a step of stage 3
    with one unit ahead and nothing on the wire: `units` are the bytes of each, in the order of forward."""
    for hidden, world_size in (([128] * 4, 4), ([64, 256, 128], 2), ([256, 64, 64, 128], 4), ([512, 64], 8)):
        units, most = _unequal(hidden, world_size)
        said = highest(list(units), world_size)
        if not 0 <= most - said <= 4:  # one NaN, which released parameters show
            return (f"units of {units} bytes, {world_size} ranks: you say {said:,} at most, a rank has {most:,} "
                    "bytes of parameters and gradients")
    return None
