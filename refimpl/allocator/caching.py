"""PyTorch's CUDA caching allocator, rule by rule: which request gets which address, and which segments there are.

    allocate   a free block of the pool and stream that fits best; else garbage collection, a new segment, and if the
               device has no memory: large free segments, then all free segments, go back, and once more
    free       at once, or when the streams that used it are done; then it joins its free neighbours

The rules are those of c10/cuda/CUDACachingAllocator, torch 2.11 to 2.14. `papers/caching_allocator` has them in one
screen.
"""

from collections.abc import Callable
from typing import Any

from . import expandable
from .blocks import Block, Pool
from .device import OutOfMemory, VirtualDevice
from .settings import SMALL, Settings


class CachingAllocator:
    """Gives out addresses as PyTorch would on a CUDA device with these `settings`.

    - `device`: where segments come from, by default a VirtualDevice of `capacity` bytes.
    - `settings`: a Settings, or the text of PYTORCH_CUDA_ALLOC_CONF.

    `reserved`: bytes of segments; `allocated`: of live blocks (rounded); `requested`: what was asked for, all in bytes.
    """

    def __init__(self, capacity: int | None = None, settings: Any = None, device: Any = None) -> None:
        self.settings = Settings.parse(settings) if isinstance(settings, str) else settings or Settings()
        self.device = VirtualDevice(capacity) if device is None else device
        self.pools, self.live = {}, {}  # (small, owner) → Pool; address → Block
        self.reserved = self.allocated = self.requested = 0
        self._freed = []  # blocks that streams still use
        self._segments = {}  # address of a segment that is not expandable → its size
        self._born = self.oldest = 0  # how many of these there were; below 0: some that were there before a recording
        self.capturing = False  # a graph: then nothing that is free goes back for a request
        self.gone = set()  # owners of private pools that are in use no more

    # --- what a program calls ----------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int = 0, owner: tuple[int, int] = (0, 0)) -> Any:
        """Return the Block for a request of `nbytes` on a stream. `owner`: of a private pool (a CUDA graph, a MemPool).

        OutOfMemory, which says what is reserved, if the device has no memory even when all that is free went back;
        ValueError for a negative size.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: expected 0 or more")
        size = self.settings.rounded(nbytes)
        pool = self._pool(size <= SMALL, owner)  # by the rounded size: 1 MiB is still small
        block = self._best_fit(pool, size, stream) or self._more(pool, size, stream)
        if block is None:
            raise OutOfMemory(f"{size} bytes for a request of {nbytes}: {self.reserved} of {self.limit} bytes are "
                              f"reserved, {self.allocated} of these allocated", size)
        if self.settings.splits(size, block.size - size):
            rest, block = block, block.cut(size)
            pool.add(rest)
        block.free, block.requested = False, nbytes
        self.live[block.address] = block
        self.allocated += block.size
        self.requested += nbytes
        return block

    def free(self, block: Any) -> None:
        """Free a block: at once, or when the streams that use it are done. ValueError if it is not live."""
        if self.live.get(block.address) is not block:
            raise ValueError(f"{block!r} is not live: it was freed before, or is not from this allocator")
        if block.waits_for:
            if block not in self._freed:
                self._freed.append(block)
            return
        self._complete(block)

    def record_stream(self, block: Any, stream: int) -> None:
        """Note that work on another stream uses the block, as `Tensor.record_stream` does."""
        if stream != block.stream:
            block.waits_for.add(stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Note that a stream, or all streams, have finished: freed blocks that waited for them become free."""
        for block in self._freed:
            block.waits_for -= block.waits_for if stream is None else {stream}
        done, self._freed = ([each for each in self._freed if bool(each.waits_for) is waits] for waits in (False, True))
        for block in done:
            self._complete(block)

    def empty_cache(self) -> Any:
        """Give all segments without a live block back to the device (`torch.cuda.empty_cache`), except those of private
        pools that are in use; returns their bytes."""
        self.synchronize()  # PyTorch waits for events before it gives memory back
        return self._give_back(self.unused())

    def release_pool(self, owner: tuple[int, int]) -> Any:
        """Note that a private pool's graph or MemPool is gone: its free segments go back, now and with each
        `empty_cache`. Returns their bytes."""
        self.gone.add(owner)
        return self._give_back(self.unused([owner]))

    def unused(self, owners: object = None) -> list[Any]:
        """List the free blocks whose memory `empty_cache` gives back, in its order; of pools of `owners` alone."""
        found = []
        for (_, owner), pool in sorted(self.pools.items(), key=_order_of_release):
            if owner in owners if owners else owner == (0, 0) or owner in self.gone:
                found += [block for block in pool if block.is_whole and block.segment is None]
                found += [block for block in pool if block.segment is not None]
        return found

    def _give_back(self, blocks):
        before = self.reserved
        for block in blocks:
            self.release(block) if block.segment is None else expandable.unmap(self, block)
        return before - self.reserved

    @property
    def limit(self) -> int:
        """Return the bytes that may be reserved."""
        share, rounds = self.settings.memory_fraction, self.settings.is_since(2, 13)
        return self.device.capacity if share is None else int(share * self.device.capacity + 0.5 * rounds)

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block that a request of `nbytes` needs."""
        return self.settings.rounded(nbytes)

    def why(self, size: int, stream: int) -> tuple[int, int, Any]:
        """Return (free bytes, bytes of the largest free block that a request may have, its neighbours)."""
        free = [block for pool in self.pools.values() for block in pool]
        mine = [block for block in free if block.stream == stream and block.pool.small == (size <= SMALL)]
        largest = max(mine, key=lambda block: block.size, default=None)
        beside = [] if largest is None else [block for block in (largest.before, largest.after) if block is not None]
        return sum(block.size for block in free), 0 if largest is None else largest.size, beside

    # --- a block that is free ----------------------------------------------------------------------------------------

    def _pool(self, small, owner):
        if (small, owner) not in self.pools:
            self.pools[small, owner] = Pool(small, owner, by_age=self.settings.is_since(2, 12))
        return self.pools[small, owner]

    def _best_fit(self, pool, size, stream):
        """Take the smallest free block that serves `size`, out of the pool; None if there is none."""
        pool.requests += 1  # a free block's age counts requests of its pool
        fitting = pool.at_least(stream, size)
        block = next(fitting, None)
        if block is not None and block.segment is not None:
            if self.settings.expandable_segments:
                for other in fitting:  # by what it could grow to, so that the end of a segment is taken last
                    if block.segment is None or expandable.free_size(other) >= expandable.free_size(block):
                        break
                    block = other
            else:
                block = next((other for other in fitting if other.segment is None), None)
        if block is None or not self.settings.serves(block.size, size):
            return None
        pool.remove(block)
        return block

    def _complete(self, block):
        del self.live[block.address]
        self.allocated -= block.size
        self.requested -= block.requested
        block.free = True
        self.join_and_keep(block)

    def join_and_keep(self, block: Any) -> Any:
        """Join a block with its free neighbours, and put it into its pool; returns it."""
        for other in (block.before, block.after):
            if other is not None and other.free and not other.waits_for and other.mapped == block.mapped:
                block.pool.remove(other)
                block.join(other)
        block.pool.add(block)
        return block

    # --- memory of the device ----------------------------------------------------------------------------------------

    def _more(self, pool, size, stream):
        """Return a block of new memory; None if the device has none."""
        # PyTorch collects only where the process has a limit
        if (self.settings.memory_fraction or 1) < 1 and self.settings.garbage_collection_threshold:
            self._collect()
        block = self._new(pool, size, stream)
        # blocks that may not be split serve no smaller request
        if block is None and self._release_large(pool, size, stream):
            block = self._new(pool, size, stream)
        if block is None and not self.capturing:
            self.empty_cache()
            block = self._new(pool, size, stream)
        return block

    def _new(self, pool, size, stream):
        if self.settings.expandable_segments and self.device.expands(pool.owner):
            return expandable.grow(self, pool, stream, size)
        nbytes = self.settings.segment(size)  # cudaMalloc is slow: small requests share a segment
        address = self.reserve_memory(nbytes, lambda: self.device.malloc(nbytes))
        if address is None:
            return None
        self._segments[address], self._born = nbytes, self._born + 1
        return Block(address, nbytes, stream, pool, born=self._born)

    def reserve_memory(self, nbytes: int, ask: Callable[[], Any]) -> Any:
        """Call `ask()` for `nbytes` of the device's memory, and count them as reserved. Returns what `ask` does; None
        if that would exceed the limit, or if the device refuses."""
        given = ask() if self.reserved + nbytes <= self.limit else None
        if given is not None:
            self.reserved += nbytes
        return given

    def release(self, block: Any) -> int:
        """Give a segment that is one free block back to the device; returns its bytes."""
        block.pool.remove(block)
        self.device.free(block.address, self._segments.pop(block.address))
        self.reserved -= block.size
        return block.size

    def _collect(self):
        """Give segments back that have been free for longer than the average, until less than the threshold is
        reserved: of the large pool, and whole."""
        excess = self.reserved - self.settings.garbage_collection_threshold * self.limit
        if excess <= 0:
            return
        pool = self._pool(False, (0, 0))
        found = [block for block in pool if block.is_whole]
        age = {block: pool.requests - block.since for block in found}
        total, released = sum(age.values()), True
        while excess > 0 and released and age:
            average, released = total / len(age), False  # anew in each round: the oldest ones have gone
            for block in [block for block in age if block.segment is None]:
                if age[block] >= average:
                    total -= age.pop(block)
                    excess -= self.release(block)
                    released = True

    def _release_large(self, pool, size, stream):
        """With `max_split_size`, give back one free segment as large as the request, or several large ones that are
        together. Tells whether that was enough."""
        if self.settings.max_split_size is None:
            return False
        size = max(size, self.settings.max_split_size)  # only blocks that are never split are given back here
        fitting = next(pool.at_least(stream, size), None)
        if fitting is not None:
            self.release(fitting)
            return True
        released = 0
        for block in pool.largest(stream):
            if released >= size or block.size < self.settings.max_split_size:
                break
            released += self.release(block) if block.segment is None else 0
        return released >= size


def _order_of_release(item):
    """Return a sort key: of the allocator's own pools the large one goes back first, of private ones the small one."""
    (small, owner), _ = item
    return owner, small is (owner == (0, 0))
