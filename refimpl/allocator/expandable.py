"""Expandable segments: a range of addresses larger than the device's memory, which is given memory piece by piece.

    addresses   |—— live ——|—— free ——|—— live ——|········ without memory ········|
    grows where its last block ends, in pieces of 2 MiB (small pool) or 20 MiB (large pool)

So a request larger than every hole takes the last hole and new pieces behind it. Nothing of it was in a segment of its
own size, which is what fragments. cuMemAddressReserve, cuMemCreate and cuMemMap of CUDA's virtual memory management.
"""

from .blocks import Block
from .settings import SMALL_SEGMENT


class ExpandableSegment:
    """A range of `size` addresses from `base` on, in pieces of `piece` bytes."""

    def __init__(self, base, size, piece):
        self.base, self.size, self.piece = base, size, piece

    def outward(self, address, size):
        """Return (address, size) of the pieces that hold these bytes."""
        first = (address - self.base) // self.piece * self.piece
        last = -(-(address + size - self.base) // self.piece) * self.piece
        return self.base + first, last - first

    def inward(self, address, size):
        """Return (address, size) of the whole pieces in these bytes."""
        first = -(-(address - self.base) // self.piece) * self.piece
        last = (address + size - self.base) // self.piece * self.piece
        return self.base + first, max(0, last - first)


def free_size(block):
    """Return what a free block has, and what it could grow by."""
    grows = block.after is not None and not block.after.mapped
    return block.size + (block.after.size if grows else 0)


def grow(allocator, pool, stream, size):
    """Return a block of `size` or more, from new memory behind a free one; None if the device has none."""
    block = _candidate(allocator, pool, stream, size)
    # the segment begins with addresses that have no memory
    if not block.mapped and (block := _map(allocator, block, min(block.size, size))) is None:
        return None
    while block.size < size:
        following = _map(allocator, block.after, min(size - block.size, block.after.size))
        if following is None:
            return None
        block = following
    pool.remove(block)
    return block


def _candidate(allocator, pool, stream, size):
    """Return where `size` bytes have room, beginning with a free block or with addresses that have no memory."""
    for block in pool.unmapped(stream):
        first = block.before if _may_be_used(block.before) else block
        room, at = 0, first
        while room < size and _may_be_used(at):
            room, at = room + at.size, at.after
        if room >= size:
            return first
    segment = new_segment(allocator, pool)
    block = Block(segment.base, segment.size, stream, pool, segment, mapped=False)
    pool.add(block)
    return block


def new_segment(allocator, pool, base=None):
    """Return an ExpandableSegment with addresses for all the device's memory, and an eighth more."""
    piece = SMALL_SEGMENT if pool.small else allocator.settings.large_segment_size
    whole = -(-(allocator.device.capacity + allocator.device.capacity // 8) // piece) * piece
    return ExpandableSegment(allocator.device.reserve(whole) if base is None else base, whole, piece)


def _may_be_used(block):
    return block is not None and block.free and not block.waits_for


def _map(allocator, block, size):
    """Give memory to the first bytes of a block without; returns it, joined with free neighbours, or None."""
    address, size = block.segment.outward(block.address, size)
    if not allocator.reserve_memory(size, lambda: allocator.device.map(address, size)):
        return None
    pool = block.pool
    pool.remove(block)
    if size < block.size:
        rest, block = block, block.cut(size)
        pool.add(rest)
    block.mapped = True
    return allocator.join_and_keep(block)


def unmap(allocator, block):
    """Take the memory of the whole pieces in a free block back; returns the bytes."""
    address, size = block.segment.inward(block.address, block.size)
    if size == 0:  # no whole piece is free in it
        return 0
    pool = block.pool
    pool.remove(block)
    if address > block.address:
        pool.add(block.cut(address - block.address))
    if size < block.size:
        rest, block = block, block.cut(size)
        pool.add(rest)
    allocator.device.unmap(address, size)
    allocator.reserved -= size
    block.mapped = False
    allocator.join_and_keep(block)
    if block.is_whole:
        pool.remove(block)
        allocator.device.unreserve(block.segment.base)
    return size
