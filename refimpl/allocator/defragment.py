"""Defragmentation: live tensors move together, so that what is free becomes one hole, and their owners follow.

    before  |—— a ——|· · ·|— b —|· · ·|— c —|· ·|      a request of 5 · fails, although 8 · are free
    after   |—— a ——|— b —|— c —|· · · · · · · ·|

A tensor cannot be moved behind the back of who holds it: the address is in the tensor. So all owners have to be
known: parameters, gradients, buffers, states of optimizers, and views of these. `defragment` counts the references to
the pool's memory, and refuses to move anything if there is one that nobody named. Mark-compact collection: Knuth,
"The Art of Computer Programming", volume 1, section 2.5, exercise 33.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from .device import OutOfMemory
from .free_list import PlannedPool
from .pool import SEGMENT

if TYPE_CHECKING:
    from .pool import GPUMemoryPool

PIECE = 2**20  # bytes: a copy onto itself goes in pieces of so many, through memory besides


@dataclass
class Defragmentation:
    """What was done: `moved` bytes, `repointed` tensors, and the largest hole in bytes, `before` and `after`."""

    moved: int
    repointed: int
    before: int
    after: int


def defragment(pool: "GPUMemoryPool", *owners: Any) -> Any:
    """Move the live tensors of a GPUMemoryPool together in each of its segments, and re-point who holds them.

    - `owners`: modules (parameters, buffers, gradients), optimizers (states and gradients), tensors, and lists or dicts
      of these. Tensors that are elsewhere are left alone.

    A view stays a view: it moves with the tensor in whose memory it is. It takes up to 1 MiB besides. ValueError, and
    nothing has moved, if somebody else holds a tensor of the pool, or its memory: a detached one, a graph that saved
    one for backward, NumPy, DLPack, a storage. TypeError for an owner of another kind.
    """
    with pool._lock:  # no other thread may take a block while they move
        pool._check_open()
        return _defragment(pool, owners)


def _defragment(pool, owners):
    tensors = {id(tensor): tensor for owner in owners for tensor in _tensors_of(owner)}
    inside = [_in_segment(pool, list(tensors.values()), i) for i in range(len(pool.segments))]
    for i, held in enumerate(inside):
        _refuse_unknown(pool, i, held)
    if pool.device.type != "cpu":
        torch.accelerator.synchronize(pool.device)  # other streams may still write
    found = Defragmentation(0, 0, pool.largest_hole, 0)
    shifts = _move_blocks(pool, found)
    for i, held in enumerate(inside):
        for tensor in held:
            found.repointed += _repoint(pool, i, tensor, shifts)
    found.after = pool.largest_hole
    return found


# --- owners ----------------------------------------------------------------------------------------------------------


def _tensors_of(owner):
    """List what an owner holds, with gradients."""
    if isinstance(owner, torch.nn.Module):
        found = [*owner.parameters(), *owner.buffers()]
    elif isinstance(owner, torch.optim.Optimizer):
        found = [each for group in owner.param_groups for each in group["params"]]
        found += [each for state in owner.state.values() for each in tree_leaves(state)]
    elif isinstance(owner, (torch.Tensor, list, tuple, dict)):
        leaves = tree_leaves(owner)
        if any(isinstance(each, (torch.nn.Module, torch.optim.Optimizer)) for each in leaves):
            return [tensor for each in leaves for tensor in _tensors_of(each)]
        found = leaves
    else:
        raise TypeError(f"a {type(owner).__name__} owns no tensors: expected modules, optimizers, tensors, or lists of "
                        "these")
    found = [each for each in found if isinstance(each, torch.Tensor)]
    return found + [each.grad for each in found if each.is_leaf and each.grad is not None]


def _in_segment(pool, tensors, i):
    """List the tensors on a segment's memory."""
    key = pool.segments[i].untyped_storage()._cdata
    return [each for each in tensors if each.layout is torch.strided and each.untyped_storage()._cdata == key]


def _references(tensor):
    """Count what holds a tensor's storage: each tensor on it once, and this call."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _refuse_unknown(pool, i, held):
    """Raise ValueError if somebody holds a tensor of segment `i` that is not among `held` and not the pool's own."""
    alone = torch.empty(1)  # what a tensor that nobody shares counts: the base line
    own = [pool.segments[i], *(flat for (segment, _), (flat, _) in pool._typed.items() if segment == i)]
    known = {id(each): each for tensor in own + held for each in (tensor, tensor._base) if each is not None}
    unknown = _references(own[0]) - (_references(alone) - 1) - len(known)  # a view also holds what it is a view of
    if unknown > 0:
        raise ValueError(f"{unknown} tensors in segment {i} of the pool have an owner that was not named: give their "
                         "modules, optimizers or the tensors themselves, and call it when no graph waits for backward")
    if sys.getrefcount(own[0].untyped_storage()) > sys.getrefcount(alone.untyped_storage()):
        raise ValueError(f"somebody holds the storage of segment {i} of the pool (x.untyped_storage()): let go of it, "
                         "so that its tensors can move")
    holders = Counter(id(each._base) for each in held) + Counter(id(each.grad) for each in held if each.is_leaf)
    for each in held:
        if (others := each._use_count() - 1 - holders[id(each)]) > 0:
            raise ValueError(f"a tensor of shape {tuple(each.shape)} in segment {i} of the pool is used by {others} "
                             "more than its owners: a graph that waits for backward, NumPy or DLPack; let them end")


# --- moving ----------------------------------------------------------------------------------------------------------


def _move_blocks(pool, found):
    """Move all live blocks down. Returns {where a block began: (its size, by how much it moved)}."""
    shifts, moves, live = {}, [], {}
    tops = [i * SEGMENT for i in range(len(pool.segments))]
    for address, (begin, size, *rest) in sorted(pool._live.items(), key=lambda item: item[1][0]):
        segment = begin // SEGMENT
        shift = begin - tops[segment]
        shifts[begin], tops[segment] = (size, shift), tops[segment] + size
        live[address - shift] = begin - shift, size, *rest
        if shift:
            # the lowest first: none is moved onto one that is still to move
            moves.append((segment, begin % SEGMENT, size, shift))
    for move in moves:
        _move(pool.segments, *move)
        found.moved += move[2]
    pool._live = live
    pool._forget_holes()
    for i, top in enumerate(tops):
        if rest := i * SEGMENT + pool.segments[i].numel() - top:
            pool._add_hole(top, rest)
    return shifts


def _move(segments, segment, begin, size, shift):
    """Move `size` bytes down by `shift`, from the lowest on. Where old and new overlap, pieces go by way of a copy."""
    memory, piece = segments[segment], max(shift, PIECE)
    for first in range(begin, begin + size, piece):
        source = memory[first:min(first + piece, begin + size)]
        memory[first - shift:first - shift + source.numel()].copy_(source if shift >= source.numel() else
                                                                   source.clone())


def _repoint(pool, i, tensor, shifts):
    """Let a tensor point at where its memory is now. Returns 1 if that is elsewhere."""
    begin = i * SEGMENT + tensor.data_ptr() - pool.segments[i].data_ptr()
    for first, (size, shift) in shifts.items():
        if first <= begin < first + size:
            if shift:
                flat, start = pool._of(i, tensor.dtype)
                at = start + (begin - shift - i * SEGMENT) // tensor.dtype.itemsize
                # the same tensor object: its owners see the move
                tensor.data = flat.as_strided(tensor.shape, tensor.stride(), at)
            return int(bool(shift))
    raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is in no live block of the pool: it was freed")


# --- on traces -------------------------------------------------------------------------------------------------------


class CompactingPool(PlannedPool):
    """A PlannedPool that moves what is live together when a request finds no hole. `moved`: bytes so far."""

    moved = 0

    def allocate(self, nbytes, stream=0):
        """Return a Block. OutOfMemory only if too little is free in all."""
        try:
            return super().allocate(nbytes, stream)
        except OutOfMemory:
            # moving cannot help if too little is free in all
            if self.rounded(nbytes) > self.limit // self.alignment * self.alignment - self.allocated:
                raise
            self._compact()
            return super().allocate(nbytes, stream)

    def _compact(self):
        top, live = 0, {}
        for begin, block in sorted(self._live.items()):
            self.moved += block.size * (begin != top)
            block.address, live[top] = top, block
            top += block.size
        self._live = live
        self._forget_holes()
        self._add_hole(top, self.limit // self.alignment * self.alignment - top)
