"""Ranks that hold the same compare it, in the first step and in every hundredth: gradients and values of parameters
that tensor parallelism leaves whole, and of what ranks of a pipeline share.

Such ranks compute the same, or sum what they compute, so that their optimizers stay alike. A gradient that nobody sums
would let them drift apart without a word. Of each part two numbers travel, Σ x² and Σ x_i cos i, in fp64.
"""

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...comm import CollectiveMismatch
from ...comm.texts import gather_results
from .argument_checks import settings_of
from .persistence import spec
from .store import DeviceMemory

EVERY = 100  # steps
CHUNK = 2**16  # elements that are in fp64 at once
# How far apart two are in proportion to their norm: what is not summed differs by about 1, what a device adds up in
# another order by a few roundings of its dtype.
FAR = {torch.float64: 1e-9, torch.float32: 1e-3}
FAR_16_BIT = 3e-2


def check_replicas(engine):
    """Raise CollectiveMismatch on all ranks, with its name and the ranks, for a parameter whose replicas differ, in
    value or in the gradient of this step, and for an optimizer's setting that does. No-op in other steps, and where no
    rank of `world` holds what others do."""
    if engine.world is engine.comm or engine._steps % EVERY or not engine.world.has_others:
        return
    from ...comm.same_model import check_settings

    found = gather_results(engine.world, lambda: [settings_of(engine), _described(engine)])
    check_settings(engine.world, [settings for settings, _ in found], common=True)
    if text := difference([lines for _, lines in found]):
        raise CollectiveMismatch(*text)


def _described(engine):
    """Return [[name, first element, ranks that hold the same, how far they may differ, numbers of the gradient, of the
    value, unless a store has it]] of this rank's parts of which there are replicas."""
    lines, here = [], isinstance(engine._stored.store, DeviceMemory)
    for bucket, pieces in engine.update.with_gradients():
        for piece, own in pieces:
            part = spec(engine, piece)
            if len(part.replicas) > 1 and not isinstance(own, FakeTensor):
                grad, far = own.grad, FAR.get(bucket.dtype, FAR_16_BIT)
                lines.append([part.name, [*part.offsets, part.first], [*part.replicas], far,
                              None if grad is None else numbers_of(grad), numbers_of(own) if here else None])
    return lines


@torch.no_grad()
def numbers_of(x):
    """Return [Σ x², Σ x_i cos i], computed in fp64 in chunks."""
    flat, total = x.detach().reshape(-1), torch.zeros(2, dtype=torch.float64, device=x.device)
    for begin in range(0, flat.numel(), CHUNK):
        part = flat[begin:begin + CHUNK].double()
        weights = torch.arange(begin, begin + len(part), dtype=torch.float64, device=x.device).cos_()
        total += torch.stack((part.square().sum(), part.dot(weights)))
    return total.tolist()


def difference(found):
    """Return (text, ranks that differ) of the first part whose replicas differ, from [lines of each rank]; or None."""
    parts = {}
    for rank, lines in enumerate(found):
        for name, place, replicas, far, *what in lines:
            parts.setdefault((name, *place, *replicas), (replicas, far, {}))[2][rank] = what
    for (name, *_), (replicas, far, each) in parts.items():
        first = next(rank for rank in replicas if rank in each)
        for i, kind in enumerate(("gradient", "value")):
            differ = [rank for rank in replicas if rank in each and _apart(each[first][i], each[rank][i]) > far]
            if differ:
                norms = {rank: None if each[rank][i] is None else f"{math.sqrt(each[rank][i][0]):.6g}"
                         for rank in replicas if rank in each}
                return (f"the {kind} of {name} differs between ranks {replicas}, which hold the same: ranks {differ} "
                        f"from rank {first} (norms {norms}). What each rank computes of its own part has to be summed "
                        "over them: in a plan of tensor parallelism the style 'whole', in a pipeline tied=", differ)
    return None


def _apart(one, other):
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if not all(map(math.isfinite, (*one, *other))):
        return 0.0 if repr(one) == repr(other) else math.inf
    norm = math.sqrt(max(one[0], other[0]))
    return 0.0 if norm == 0 else max(abs(math.sqrt(one[0]) - math.sqrt(other[0])), abs(one[1] - other[1])) / norm
