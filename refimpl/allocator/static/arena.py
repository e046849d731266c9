"""An arena: one piece of memory, and tensors at addresses in it that a plan chose.

Each tensor has a storage of its own, a slice of the arena's. Autograd may keep it and views may share it; when the
last of them is gone a weak reference tells, and its addresses are free. So the arena knows what is live, and gives no
address away twice, whatever the plan says.
"""

import weakref
from collections import deque

import torch
from sortedcontainers import SortedDict


class Arena:
    """Memory of `nbytes` on a device, at an address that is a multiple of `alignment`.

    `live`: {offset: top} of its live tensors. Slices of a storage keep the whole alive, so tensors
    stay valid when the arena itself is dropped.
    """

    def __init__(self, nbytes, device="cpu", alignment=64):
        raw = torch.empty(nbytes + alignment, dtype=torch.uint8, device=device)
        self.nbytes, self.device, self.alignment = nbytes, raw.device, alignment
        self._first, self._memory = -raw.data_ptr() % alignment, raw.untyped_storage()
        self._live, self._watched, self._ended = SortedDict(), {}, deque()

    @property
    def live(self):
        """Return {offset: top} of what is live, in bytes."""
        self._settle()
        return dict(self._live)

    def occupant(self, offset, nbytes):
        """Return the offset of a live tensor that these bytes would overlap, or None."""
        self._settle()
        i = self._live.bisect_left(offset + nbytes) - 1  # the last one that begins below their top
        if i >= 0:
            low, top = self._live.peekitem(i)
            if top > offset:
                return low
        return None

    def name_at(self, offset):
        """Return the name of the live tensor that begins there."""
        return self._watched[offset][1]

    def empty_strided(self, offset, size, stride, dtype, nbytes, name=None):
        """Return an uninitialized tensor in the `nbytes` bytes from `offset`. Nothing live may be there (`occupant`).

        ValueError if something is, or if they are not in the arena.
        """
        if not 0 <= offset <= self.nbytes - nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes}: the arena has {self.nbytes}")
        if (low := self.occupant(offset, nbytes)) is not None:
            raise ValueError(f"bytes {offset} to {offset + nbytes}: a live tensor has {low} to {self._live[low]}")
        first = self._first + offset
        storage = self._memory[first:first + nbytes]  # a storage of its own: a weak reference can tell its end
        self._live[offset] = offset + nbytes
        self._watched[offset] = weakref.ref(storage, lambda _, ended=self._ended: ended.append(offset)), name
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, size, stride)

    def _settle(self):
        """Forget what has ended. A callback may come in the middle of anything, so it only leaves a note."""
        while self._ended:
            offset = self._ended.popleft()
            del self._live[offset], self._watched[offset]

    def __contains__(self, tensor):
        """Tell whether a tensor is in the arena."""
        first = self._memory.data_ptr() + self._first
        return tensor.device == self.device and first <= tensor.data_ptr() < first + max(1, self.nbytes)

    def __repr__(self):
        return f"an arena of {self.nbytes:,} bytes on {self.device}, {len(self.live)} tensors live in it"
