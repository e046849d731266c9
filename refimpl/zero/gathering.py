"""Buckets that come and go: which are whole at the moment, who needs them, and which come next.

Every rank needs the same buckets in the same order, so that the collectives match. Nothing here depends on how fast
anything is.
"""

from collections import Counter

import torch

from ..memory import mark


class Gathering:
    """Whole parameters of buckets whose shards are in `shards`; `full[bucket]` is the tensor that they come to.

    `look_ahead`: elements that may be on their way before they are needed; `limit`: that may be whole or on their way
    when something is begun ahead of time.
    """

    def __init__(self, comm, shards, full, look_ahead, limit):
        self.comm, self.shards, self.full = comm, shards, full
        self.look_ahead, self.limit = look_ahead, limit
        self._views, self._away, self._nothing = {}, {}, {}  # bucket → parameters that are here, away; dtype → NaN
        self._users, self._whole, self._coming = Counter(), set(), {}
        self._order, self._seen = [], []  # buckets in the order of the last step, and of this one
        for bucket, tensor in full.items():
            if not tensor.untyped_storage().nbytes():
                self._hide(bucket)

    def need(self, bucket):
        """`bucket` is whole from here on, until it is let go as often as it was needed."""
        self._users[bucket] += 1
        if bucket in self._whole:
            if self._users[bucket] == 1:  # it was kept for this
                self._seen.append(bucket)
                self._begin_ahead()
            return
        if bucket not in self._coming:
            self._begin(bucket)
        self._coming.pop(bucket).wait()
        self._whole.add(bucket)
        self._seen.append(bucket)
        self._begin_ahead()

    def let_go(self, bucket):
        """One who needed it does not any more; the last one frees it."""
        if self._users[bucket]:
            self._users[bucket] -= 1
        if not self._users[bucket] and bucket in self._whole and self._next() is not bucket:
            self._free(bucket)

    def drop(self, bucket):
        """Nobody needs it any more."""
        self._users[bucket] = 0
        if bucket in self._whole:
            self._free(bucket)

    def end(self):
        """The end of a step's gathers: everything is let go, and their order is that of the next step."""
        for bucket, handle in list(self._coming.items()):  # begun ahead, and never needed
            handle.wait()
            del self._coming[bucket]
            self._free(bucket)
        for bucket in list(self._whole):
            self.drop(bucket)
        self._order, self._seen = self._seen, []
        for nothing in self._nothing.values():
            nothing.fill_(torch.nan)  # somebody may have filled a parameter with zeros, say

    def live(self):
        """Elements that are whole or on their way."""
        return sum(bucket.numel for bucket in (*self._whole, *self._coming))

    def _next(self):
        """The bucket that was needed next in the last step, if this one goes the same way."""
        done = len(self._seen)
        return self._order[done] if self._order[:done] == self._seen and done < len(self._order) else None

    def _begin(self, bucket):
        full = mark(self.full[bucket], "parameters")  # so that a tracker meets it now, while it has no bytes
        full.untyped_storage().resize_(bucket.nbytes)
        if bucket not in self._views:  # which cannot be made of a storage without bytes
            self._views[bucket] = bucket.views(full)
        for slot, view in zip(bucket.slots, self._views[bucket], strict=True):
            slot.parameter.data = view
        self._coming[bucket] = self.comm.all_gather(self.shards[bucket], out=full, async_op=True)

    def _begin_ahead(self):
        """Begin what comes next, as far as it may; nothing in a step that goes another way than the last one."""
        if self._next() is None:
            return
        for bucket in self._order[len(self._seen):]:
            if bucket in self._coming:
                continue
            ahead = bucket.numel + sum(each.numel for each in self._coming)
            if bucket in self._whole or ahead > self.look_ahead or self.live() + bucket.numel > self.limit:
                return
            self._begin(bucket)

    def _free(self, bucket):
        self._whole.discard(bucket)
        self._hide(bucket)
        self.full[bucket].untyped_storage().resize_(0)

    def _hide(self, bucket):
        """Parameters that are away read as NaN: one number, seen in their shape. Of a storage without bytes torch reads
        all the same, at address 0, and a `print(parameter)` would be the end of the process."""
        if bucket not in self._away:
            kind = bucket.dtype, bucket.device
            if kind not in self._nothing:
                nothing = torch.full((), torch.nan, dtype=bucket.dtype, device=bucket.device)
                self._nothing[kind] = mark(nothing, "parameters")
            self._away[bucket] = [self._nothing[kind].expand(slot.parameter.shape) for slot in bucket.slots]
        for slot, away in zip(bucket.slots, self._away[bucket], strict=True):
            slot.parameter.data = away
