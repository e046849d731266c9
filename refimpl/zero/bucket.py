"""Parameters side by side in one buffer that is cut into N shards: the unit of all communication of ZeRO.

    | w₁ | b₁ · | w₂      | … |       each tensor begins at a multiple of 16 bytes
    | rank 0  | rank 1  | … |         N shards of equal size; the last one is padded

One collective moves a whole bucket, whatever tensors are in it. A shard begins and ends anywhere: a rank holds a flat
piece of a tensor. "ZeRO" (Rajbhandari et al. 2020), section 5, shards states like this; the padding is ours.
"""

import os
from typing import NamedTuple

import torch

from ..sharding import is_apart, room_of

ALIGNMENT = 16  # bytes: vectorised loads and matrix units need it
MOST, LEAST, PARTS = 25 * 2**20, 2**20, 16  # bytes of a bucket by default, and buckets of a model between these


class Slot(NamedTuple):
    """Where one parameter lies in its bucket: elements first … end − 1. `order`: of its dims, see `order_of`."""

    name: str
    parameter: torch.nn.Parameter
    first: int
    end: int
    order: tuple = ()

    def view(self, flat):
        """Return the parameter's part of a flat tensor of the bucket, in the parameter's shape and memory format."""
        part, shape = flat[self.first : self.end], self.parameter.shape
        if not self.order:
            return part.view(shape)
        return part.view([shape[dim] for dim in self.order]).permute([*map(self.order.index, range(len(shape)))])


def order_of(parameter):
    """Return the dims from the outermost to the innermost if a parameter is in torch.channels_last (or _3d); else ().
    It lies in its bucket in that order."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    if last is None or parameter.is_contiguous() or not parameter.is_contiguous(memory_format=last):
        return ()
    return (0, *range(2, parameter.dim()), 1)


class Piece(NamedTuple):
    """The part of a parameter that one shard holds: its elements first … end − 1, which begin at `place` in the
    shard."""

    slot: Slot
    first: int
    end: int
    place: int


class Bucket:
    """Parameters of one dtype and device, `numel` elements with the padding, N · `shard_numel`. `name` is the common
    prefix of their names, such as a block's; else the first name and a count."""

    def __init__(self, named_parameters, world_size):
        self.slots, end = [], 0
        for name, parameter in named_parameters:
            self.slots.append(Slot(name, parameter, end, end + parameter.numel(), order_of(parameter)))
            # its room, not its elements: ranks that share what follows cut it alike
            end = aligned(end + room_of(parameter), parameter.itemsize)
        first = self.slots[0].parameter
        self.dtype, self.device, self.world_size = first.dtype, first.device, world_size
        self.shard_numel = aligned(-(-end // world_size), first.itemsize)  # each shard begins aligned, too
        self.numel = self.shard_numel * world_size
        self.name = _common_name([slot.name for slot in self.slots])

    @property
    def parameters(self):
        """Return its parameters, in order."""
        return [slot.parameter for slot in self.slots]

    @property
    def nbytes(self):
        """Return the bytes of all parameters and the padding."""
        return self.numel * self.dtype.itemsize

    def views(self, flat):
        """Return each parameter's part of a flat tensor of this bucket, in the parameter's shape."""
        return [slot.view(flat) for slot in self.slots]

    def clear_padding(self, flat):
        """Write zeros where no parameter lies."""
        ends = [0, *(slot.end for slot in self.slots)]
        for end, first in zip(ends, [*(slot.first for slot in self.slots), self.numel], strict=True):
            if end < first:
                flat[end:first].zero_()

    def shard(self, flat, rank):
        """Return a rank's shard of a flat tensor of this bucket."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def pieces(self, rank):
        """Return a Piece for each parameter that a rank's shard has a part of, in order."""
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        cut = [(slot, max(slot.first, begin), min(slot.end, end)) for slot in self.slots]
        return [Piece(slot, first - slot.first, last - slot.first, first - begin) for slot, first, last in cut
                if first < last]


def _common_name(names):
    first, *rest = names
    return ".".join(os.path.commonprefix([name.split(".") for name in names])) or f"{first} + {len(rest)}"


def aligned(count, itemsize):
    """Return `count` elements rounded up to a multiple of ALIGNMENT bytes."""
    step = max(1, ALIGNMENT // itemsize)
    return -(-count // step) * step


def default_bucket_bytes(named_parameters, stage):
    """Return the bytes of a bucket of stages 0 to 2: 25 MiB, as torch's DDP has them. From stage 1 on whole buckets are
    what is to be saved: then it is a sixteenth of all gradients, from 1 to 25 MiB."""
    total = sum(p.nbytes for _, p in named_parameters)
    return max(LEAST, min(MOST, total // PARTS)) if stage else MOST


def buckets_of(named_parameters, world_size, bucket_bytes):
    """Return Buckets of at most `bucket_bytes` each, of one dtype and device; a larger parameter has one of its own,
    and so has one that is `set_apart`. They are in the order in which gradients appear, the last parameters first."""
    kinds = {}
    for name, parameter in reversed(list(named_parameters)):
        filling = kinds.setdefault((parameter.dtype, parameter.device), [[]])
        used = sum(aligned(room_of(p), p.itemsize) * p.itemsize for _, p in filling[-1])
        alone = is_apart(parameter) or any(is_apart(p) for _, p in filling[-1])
        if filling[-1] and (alone or used + room_of(parameter) * parameter.itemsize > bucket_bytes):
            filling.append([])
        filling[-1].append((name, parameter))
    return [Bucket(filled, world_size) for lists in kinds.values() for filled in lists]
