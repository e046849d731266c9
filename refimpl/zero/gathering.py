"""Gathering, release and prefetch of whole parameters, bucket by bucket.

Every rank gathers the same buckets in the same order, so that the collectives match. The order does not depend on
timing.
"""

import contextlib
import functools
import weakref
from collections import Counter

import torch

from ..common.marks import mark
from ..common.materializing import no_value
from .internals.casts import Casts
from .internals.released import Unread, release, restore
from .internals.store import BucketStore


class Gathering:
    """Gathers and releases the whole parameters of buckets. Each rank's shard of a bucket is `shards[bucket]`; its
    whole parameters are views of the tensor `whole[bucket]`, whose storage has bytes only while they are gathered.

    `look_ahead`: units that are prefetched while one computes, in the order in which the last step gathered them.
    `limit`: elements that may be whole or in flight when a prefetch begins.
    `quantized`: a QuantizedGather, which then gathers in place of `comm`. `large_heads`: buckets that do not stay whole
    between two uses in a row.
    """

    def __init__(self, comm, shards, whole, look_ahead, limit, stored=None):
        self.comm, self.shards, self.whole = comm, shards, whole
        self.stored = BucketStore(None, ()) if stored is None else stored
        self.look_ahead, self.limit, self.casts, self.quantized = look_ahead, limit, Casts(), None
        self._views, self._placeholders = {}, {}  # bucket → `data` of its parameters: views of `whole`, or NaN
        self._nan = {}  # (dtype, device) → the element that all placeholders expand
        self._users, self._gathered, self._in_flight = Counter(), set(), {}
        self._order, self._seen = [], []  # (bucket, unit) in the order of the last step, and of this one
        self.writes, self._versions = None, {}  # a `Writes`; parameter → version when it was gathered
        self.large_heads = set()
        self.computing = 0  # forwards and backwards of the engine that run
        self.outside = {}  # buckets that others than their units read, as a tied head does
        self.kept_for_outside = set()  # those of them that stay whole until backward has ended
        for bucket, tensor in whole.items():
            if not tensor.untyped_storage().nbytes():
                self.hide(bucket)

    def gather(self, bucket, unit=None):
        """Gather `bucket`; return when it is whole. It stays whole until it has been released as often as it was
        gathered. `unit`: the unit that needs it; without one the bucket counts as a unit by itself."""
        kept, use = not self._users[bucket], (bucket, bucket if unit is None else unit)
        self._users[bucket] += 1
        if self.computing and bucket in self.outside and bucket not in self.kept_for_outside:
            self.kept_for_outside.add(bucket)
            self._users[bucket] += 1  # one use more, which only the end of backward takes back
        if bucket in self._gathered:
            if kept:  # `release` had kept it for this use
                self._seen.append(use)
                self._prefetch()
            return
        if bucket not in self._in_flight:
            self._launch(bucket)
        self._wait(bucket)
        self.casts.restore(self.whole[bucket])  # after the gather, from whose values a cast is computed
        self._gathered.add(bucket)
        self._seen.append(use)
        self._prefetch()

    def release(self, bucket):
        """End one use of `bucket`. The last use frees it, unless it is also the next to be used, and no large head:
        that would be there with the gradients of logits, where activations are most."""
        if self._users[bucket]:
            self._users[bucket] -= 1
        stays = self._next() is bucket and bucket not in self.large_heads
        if not self._users[bucket] and bucket in self._gathered and not stays:
            self._free(bucket)

    def unread(self):
        """Return a context in which an operation on what stands for released parameters is a RuntimeError."""
        def names(shape):
            found = [slot.name for bucket in self._placeholders for slot in bucket.slots
                     if slot.parameter.numel() == shape.numel()]
            return ", ".join(found[:3]) or "?"

        return Unread(self._nan.values, names)

    def read(self, name):
        """Gather a released parameter that somebody reads in a forward or backward. From then on it stays whole in each
        step, from its first use to the end of backward, as FSDP2 keeps what is in no unit. RuntimeError elsewhere."""
        if not self.computing:
            raise RuntimeError(f"{name} is in shards, and is read or written outside of forward and backward: "
                               "`with engine.gathered():` makes it whole, with write=True to keep what is written")
        bucket = next(bucket for bucket in self.whole for slot in bucket.slots if slot.name == name)
        self.outside[bucket] = None
        self.gather(bucket)
        self.release(bucket)

    def gather_kept_again(self):
        """Gather again what is read outside of its unit. With several forwards in flight, the end of another backward
        has released it."""
        for bucket in self.outside:
            if bucket not in self.kept_for_outside:
                self.gather(bucket)
                self.release(bucket)

    def release_kept(self, before):
        """Stop keeping buckets for readers outside of their units, after a forward without a backward. `before`: what
        was kept when that forward began."""
        for bucket in self.kept_for_outside - before:
            self.kept_for_outside.remove(bucket)
            self.release(bucket)

    def release_unused(self):
        """Free all buckets not in use. The next gather then counts as the first of a step."""
        for bucket in list(self._in_flight):  # prefetched but not used
            self._wait(bucket)  # the collective writes until it ends: only then can its bytes go
            self._free(bucket)
        for bucket in [bucket for bucket in self._gathered if not self._users[bucket]]:
            self._free(bucket)
        self._seen = []

    def release_all(self):
        """Free everything, also what some forward keeps whole for a backward: the shards are about to change."""
        self._users.clear(), self.kept_for_outside.clear()
        self.release_unused()

    def end_step(self):
        """Free everything, and remember the order of this step's gathers: the next step prefetches by it."""
        self._order = self._seen
        self.release_all()

    def live(self):
        """Return the number of elements that are whole or in flight."""
        return sum(bucket.numel for bucket in (*self._gathered, *self._in_flight))

    def _next(self):
        """Return the bucket that came next in the last step; None if this step's order differs from it."""
        done = len(self._seen)
        return self._order[done][0] if self._order[:done] == self._seen and done < len(self._order) else None

    def _wait(self, bucket):
        handle, shard = self._in_flight.pop(bucket)
        self._make_room(bucket)
        handle.wait()
        del shard
        for slot, view in zip(bucket.slots, self._views[bucket], strict=True):  # not before: a reader would not wait
            restore(slot.parameter)
            slot.parameter.data = view
        self.see([bucket])
        self.stored.put(bucket, "parameters", changed=False)  # it has been gathered, so the shard may leave again

    def _launch(self, bucket):
        self.stored.get(bucket, "parameters")
        shard = self.shards[bucket]
        if shard.dtype == bucket.dtype:
            mark(shard, "parameters")  # a tracker that began after the engine has not met it
        if self.quantized is not None:  # `_wait` makes room
            shard = mark(shard.to(bucket.dtype), "parameters")
            self._in_flight[bucket] = self.quantized.launch(shard, self.whole[bucket], bucket.name), shard
            return
        self._make_room(bucket)
        if shard.dtype != bucket.dtype:  # a master: it is rounded where it will be in the whole
            shard = bucket.shard(self.whole[bucket], self.comm.rank).copy_(shard)
        # with the shard, a copy in 16 bits perhaps: the collective reads it until it ends
        self._in_flight[bucket] = self.comm.all_gather(shard, out=self.whole[bucket], async_op=True,
                                                       label=bucket.name), shard

    def _make_room(self, bucket):
        """Give a bucket's whole parameters bytes, unless they have them: resizing would move them."""
        whole = mark(self.whole[bucket], "parameters")  # registers it with a tracker before it has bytes
        if whole.untyped_storage().nbytes():
            return
        whole.untyped_storage().resize_(bucket.nbytes)
        if bucket not in self._views:  # after resize_: a storage without bytes has no views
            self._views[bucket] = bucket.views(whole)

    @contextlib.contextmanager
    def exact(self):
        """Gather exact parameters in this context, also those that are whole already. All ranks call it."""
        quantized, self.quantized = self.quantized, None  # what is read or saved is exact, what is computed with is not
        try:
            self._gather_again(quantized)
            yield
        finally:
            self.quantized = quantized
            self._gather_again(quantized)

    def _gather_again(self, quantized):
        for bucket in self.whole if quantized is not None else ():
            if bucket in self._in_flight:
                self._wait(bucket)
                self._free(bucket)
            elif bucket in self._gathered:
                self.fetch(bucket)

    def _prefetch(self):
        """Launch the next gathers, within the limits, in the last step's order; none if this step's order differs."""
        if self._next() is None:
            return
        (_, last), units = self._seen[-1], 0
        for bucket, unit in self._order[len(self._seen):]:
            units, last = units + (unit is not last), unit
            if bucket in self._gathered:
                return
            if bucket not in self._in_flight:
                if units > self.look_ahead or self.live() + bucket.numel > self.limit:
                    self.stored.prefetch(bucket, "parameters")  # the store can begin to load its shard
                    return
                self._launch(bucket)

    def see(self, buckets):
        """Note the versions of whole parameters: what was written to them so far is not to be kept."""
        self._versions.update((slot.parameter, slot.parameter._version) for bucket in buckets for slot in bucket.slots)

    def keep_written(self, buckets=None):
        """Take what modules have written to buckets, by default to all that are whole, into their shards. RuntimeError
        if they were gathered in fewer bits."""
        for bucket in self._gathered if buckets is None else buckets:
            names = [slot.name for slot in bucket.slots if slot.parameter._version != self._versions[slot.parameter]]
            if names and self.quantized is not None:
                raise RuntimeError(f"a module has written to {names[0]}, which was gathered in fewer bits: its shard "
                                   "would lose its exact numbers. Use Zero3 without quantized_weights")
            if names and self.writes is not None:
                with self.stored.loaded(bucket, only="parameters"):
                    self.writes.write_to_shard(bucket, self.whole[bucket], names)
                self.see([bucket])

    def _free(self, bucket):
        self._gathered.discard(bucket)
        try:
            self.keep_written([bucket])
        finally:
            self.hide(bucket)

    def fetch(self, bucket):
        """Make a bucket whole, outside of steps, until `hide`."""
        self._launch(bucket)
        self._wait(bucket)

    def hide(self, bucket):
        """Release a bucket's whole parameters: who reads one calls `read` (`internals.released`). Their data are one
        NaN, expanded: as views of a storage without bytes they would be read at address 0, and end the process."""
        if bucket not in self._placeholders:
            kind = bucket.dtype, bucket.device
            if kind not in self._nan:
                nan = torch.full((), no_value(bucket.dtype), dtype=bucket.dtype, device=bucket.device)
                self._nan[kind] = mark(nan, "parameters")
            self._placeholders[bucket] = [self._nan[kind].expand(slot.parameter.shape) for slot in bucket.slots]
        for slot, placeholder in zip(bucket.slots, self._placeholders[bucket], strict=True):
            restore(slot.parameter)
            slot.parameter.data = placeholder
            if slot.parameter.numel():
                # weak: a parameter that a user keeps must not keep the engine with all of its shards
                release(slot.parameter, functools.partial(_served, weakref.ref(self), slot.name))
        self.casts.release(self.whole[bucket])
        self.whole[bucket].untyped_storage().resize_(0)  # this frees it, also where autograd has saved a view


def _served(gathering, name):
    """Let the Gathering serve a reader, if its engine lives."""
    if gathering() is None:
        raise RuntimeError(f"{name} was in shards of an engine that is gone: save the model while it lives, by "
                           "engine.save_weights or in `with engine.gathered():`")
    gathering().read(name)
