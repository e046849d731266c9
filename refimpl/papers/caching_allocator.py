"""A caching allocator in one screen: memory that is freed is kept, and given out again without asking the device.

cudaMalloc is slow and cudaFree waits for the GPU. So PyTorch asks for large segments, cuts blocks from them, and keeps
segments when their blocks are free: the driver sees what is reserved, reserved = allocated + free blocks.

    size of a request      512 bytes · ⌈nbytes / 512⌉
    its pool               small up to 1 MiB, large above
    the block              the smallest free one of pool and stream that has room; of equal ones the first (torch 2.11)
    else a new segment     2 MiB in the small pool; 20 MiB below 10 MiB; else ⌈size / 2 MiB⌉ · 2 MiB
    what is left of it     becomes a free block: in the small pool always, in the large one if it is more than 1 MiB
    no memory              all segments without a live block go back to the device, then once more

A freed block joins its free neighbours. A segment goes back as a whole or not at all: one live tensor of 1.5 MiB
keeps 20 MiB. That is fragmentation: memory is free, in pieces too small, and a request fails. PyTorch,
c10/cuda/CUDACachingAllocator.cpp; best fit and coalescing: Knuth, "The Art of Computer Programming", section 2.5.
"""

from bisect import bisect_left, insort

MIB = 2**20


class Block:  # bytes address … address + size − 1 of a segment, between its neighbours there
    def __init__(self, address, size, stream, small, before=None, after=None):
        self.address, self.size, self.stream, self.small = address, size, stream, small
        self.before, self.after, self.free = before, after, False

    def __lt__(self, other):
        return (self.stream, self.size, self.address) < (other.stream, other.size, other.address)


class CachingAllocator:
    """`malloc(nbytes)` returns a new segment's address, or None without memory; `free(address)` gives it back."""

    def __init__(self, malloc, free):
        self.device_malloc, self.device_free = malloc, free
        self.pools = {True: [], False: []}  # free blocks, small and large, by stream, size and address
        self.reserved = self.allocated = 0

    def allocate(self, nbytes, stream=0):
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        block = self.best_fit(size, stream, small) or self.new_segment(size, stream, small)
        if (rest := block.size - size) > (0 if small else MIB):
            block.size, left = size, Block(block.address + size, rest, stream, small, block, block.after)
            self.link(left)
            self.keep(left)
        block.free = False
        self.allocated += block.size
        return block

    def best_fit(self, size, stream, small):
        pool = self.pools[small]
        at = bisect_left(pool, Block(0, size, stream, small))
        return pool.pop(at) if at < len(pool) and pool[at].stream == stream else None

    def new_segment(self, size, stream, small):
        nbytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        address = self.device_malloc(nbytes) or self.empty_cache() or self.device_malloc(nbytes)
        if address is None:
            raise MemoryError(f"{size} bytes: {self.reserved} reserved, {self.allocated} allocated")
        self.reserved += nbytes
        return Block(address, nbytes, stream, small)

    def release(self, block):
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other and other.free:
                self.pools[block.small].remove(other)
                first, last = (other, block) if other is block.before else (block, other)
                block.address, block.size = first.address, first.size + last.size
                block.before, block.after = first.before, last.after
        self.link(block)
        self.keep(block)

    def link(self, block):
        for other, side in ((block.before, "after"), (block.after, "before")):
            if other:
                setattr(other, side, block)

    def keep(self, block):
        block.free = True
        insort(self.pools[block.small], block)

    def empty_cache(self):
        for pool in self.pools.values():
            for block in [block for block in pool if not block.before and not block.after]:
                pool.remove(block)
                self.device_free(block.address)
                self.reserved -= block.size
