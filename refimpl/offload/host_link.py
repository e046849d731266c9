"""The copies of an update on the host, and the host memory that they need: gradients there, weights of a tile back."""

from collections import defaultdict, deque

import torch

from .copies import TO_DEVICE, TO_HOST, host_bytes, link_of

CPU = torch.device("cpu")
DEPTH = 2  # copies to the host at a time: the device has the memory of each until it is done


class HostLink:
    """Copies between one engine's shards and host memory.

    `rate`: of a link that is rehearsed on a CPU, a `comm.Link`, or None. `locked`: whether that memory is page-locked;
    what a store below host memory takes and frees is not.
    `.moved`: bytes copied so far, by direction. `.host_bytes`: host memory taken for gradients and tiles.
    """

    def __init__(self, sub_group_size, rate, locked):
        self.sub_group_size, self.rate, self.locked = sub_group_size, rate, locked
        self.moved, self.host_bytes = dict.fromkeys((TO_HOST, TO_DEVICE), 0), 0
        self._links, self._leaving, self._adding = {}, deque(), deque()  # by device; Copies; HostParts
        self._largest = defaultdict(int)  # (dtype, device) → elements of the largest part
        self._tiles, self._scratch = {}, {}  # (dtype, device) → [[flat, its Copy], …], the next one first; [flat, …]

    def expect(self, dtype, device, numel):
        """Note that a part of so many elements exists."""
        self._largest[dtype, device] = max(self._largest[dtype, device], numel)

    def allocate(self, numel, dtype, device):
        """Return host memory, (numel,)."""
        self.host_bytes += numel * dtype.itemsize
        return host_bytes(numel * dtype.itemsize, device if self.locked else CPU).view(dtype)

    def start(self, direction, target, source, name):
        """Start a copy; return the Copy. No more than DEPTH are on their way to the host."""
        device = source.device if direction == TO_HOST else target.device
        if device not in self._links:
            self._links[device] = link_of(device, self.rate)
        if direction == TO_HOST:
            while len(self._leaving) >= DEPTH:  # else gradients would pile up on the device
                self._leaving.popleft().finish()
        self.moved[direction] += source.nbytes
        copy = self._links[device].start(direction, [(target, source)], source, name=name)
        if direction == TO_HOST:
            self._leaving.append(copy)
        return copy

    def add(self, part, shard, name):
        """Start to copy a gradient that is to be added to `part.gradient`; return (where it is, its Copy). Two are on
        their way at most: the one before them is added now."""
        kind = shard.dtype, shard.device
        if len(self._adding) == DEPTH:
            self._adding[0].wait_for_gradients()
        if kind not in self._scratch:
            size = max(count for (_, device), count in self._largest.items() if device == shard.device)
            self._scratch[kind] = deque(self.allocate(size, *kind) for _ in range(DEPTH))
        scratch = self._scratch[kind].popleft()
        self._adding.append(part)
        return scratch, self.start(TO_HOST, scratch[: shard.numel()], shard, name)

    def mark_added(self, part, scratch, device):
        """Note that it was added."""
        self._adding.remove(part)
        self._scratch[scratch.dtype, device].append(scratch)

    def tile(self, dtype, device):
        """Return host memory for the weights of a tile, whose last copy is done."""
        kind = dtype, device
        if kind not in self._tiles:
            size = min(self.sub_group_size, self._largest[kind])
            # two: one is computed while the other one travels
            self._tiles[kind] = deque([self.allocate(size, *kind), None] for _ in range(2))
        tiles = self._tiles[kind]
        if tiles[0][1] is not None:
            tiles[0][1].finish()
            tiles[0][1] = None
        return tiles[0][0]

    def send(self, target, tile, name):
        """Start to copy the tile that `tile` returned to its place on the device; return the Copy."""
        tiles = self._tiles[target.dtype, target.device]
        copy = tiles[0][1] = self.start(TO_DEVICE, target, tile[: target.numel()], name)
        tiles.rotate(-1)
        return copy
