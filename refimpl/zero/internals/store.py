"""Where shards stay while nothing computes with them: the seam for offload to host memory or to a disk.

A bucket's optimizer state and masters, 12 of the 16 bytes a parameter in mixed precision, are needed in its update
alone, and from stage 2 on its gradients from their reduction to the update; at stage 3 its parameters, too, are needed
only to be gathered and updated. An engine tells its store which shards it needs, and which come next. What the store
does with them in between is not ZeRO's business. At most two buckets are needed at a time, one and the prefetched one;
at stage 3 also the shards that are being gathered ahead, those of `look_ahead` units.
"""

import contextlib
from typing import Protocol

import torch

from ..update import ShardedUpdate


class ShardStore(Protocol):
    """What an engine takes as `store`. A key stands for the tensors of one bucket that are stored and loaded together:
    ("states", 3), ("gradients", 3) or ("parameters", 3).

    The tensors stay the same objects, so that views of them stay right: a store that moves their contents elsewhere
    empties their storages (`tensor.untyped_storage().resize_(0)`), and fills them again in `get`. Nobody reads the
    tensors in between. A store of one engine alone has `attach(owner)`, too, which raises if another one was given it.
    One for which host memory is a place to leave, such as a disk, has `below_host = True`: an update that runs on the
    host then gives it the states that rest there.
    """

    def put(self, key, tensors, changed=True):
        """Store `tensors`: nothing computes with them for a while. `changed`: whether they differ from what `get` last
        loaded."""

    def prefetch(self, key):
        """Begin to load `key`: `get(key)` comes soon."""

    def get(self, key):
        """Return when the tensors that were put under `key` since it was last loaded, if any, hold their contents
        again."""

    def drop(self, key):
        """Forget what was put under `key`, if anything: nobody needs it."""


class DeviceMemory:
    """The default store of an engine: tensors remain on the device."""

    def put(self, key, tensors, changed=True):
        """No-op: the tensors remain on the device."""

    def prefetch(self, key):
        """No-op: the tensors are on the device."""

    def get(self, key):
        """No-op: the tensors are on the device."""

    def drop(self, key):
        """No-op: nothing is kept here."""


class BucketStore:
    """Puts the tensors of buckets into a store and gets them back: states, gradients and parameters, by kind."""

    def __init__(self, store, buckets):
        self.store = DeviceMemory() if store is None else store
        self._number, self._kinds = {bucket: i for i, bucket in enumerate(buckets)}, {}
        if hasattr(self.store, "attach"):
            self.store.attach(self)

    def register(self, kind, tensors):
        """Add a kind of tensors that the store keeps: `tensors(bucket)` returns those of a bucket."""
        self._kinds[kind] = tensors

    def put(self, bucket, only=None, changed=True):
        """Store a bucket's tensors, of all kinds or of one."""
        for key, tensors in self._of(bucket, only):
            self.store.put(key, tensors, changed)

    def get(self, bucket, only=None):
        """Return when a bucket's tensors hold their contents again."""
        for key, _ in self._of(bucket, only):
            self.store.get(key)

    def prefetch(self, bucket, only=None):
        """Begin to load a bucket."""
        for key, _ in self._of(bucket, only):
            self.store.prefetch(key)

    def drop(self, bucket, only):
        """Forget a bucket's tensors of one kind."""
        for key, _ in self._of(bucket, only):
            self.store.drop(key)

    @contextlib.contextmanager
    def loaded(self, bucket, following=None, only=None):
        """Load a bucket's tensors for the context, and store them at its end; `following` is prefetched."""
        self.get(bucket, only)
        if following is not None:
            self.prefetch(following, only)
        try:
            yield
        finally:
            self.put(bucket, only)

    def _of(self, bucket, only):
        return [((kind, self._number[bucket]), found) for kind, tensors in self._kinds.items()
                if only in (None, kind) and (found := tensors(bucket))]


class StoredUpdate(ShardedUpdate):
    """`ShardedUpdate` that keeps masters, states and gradients in a store, but for the bucket that is updated."""

    def __init__(self, *args, **options):
        self._away = set()  # buckets whose gradients the store has
        *_, stored = args
        stored.register("states", self.states)
        stored.register("gradients", self.apart)
        super().__init__(*args, **options)
        for bucket in self.pieces if self.optimizer.state else ():  # some optimizers make their states at once
            with stored.loaded(bucket, only="states"):  # their first put, from which the store knows them
                pass

    @contextlib.contextmanager
    def loaded(self, bucket, following=None, only=None):
        """Load a bucket for the context. While the store has its gradients, its pieces have none."""
        try:
            with super().loaded(bucket, following, only):
                if bucket in self._away:
                    self._away.discard(bucket)
                    self.set_gradients(bucket, self.gradients[bucket])
                yield
        finally:
            if bucket in self.gradients and not self.gradients[bucket].untyped_storage().nbytes():
                self._away.add(bucket)
                for _, own in self.pieces[bucket]:
                    own.grad = None

    def drop_gradients(self, bucket):
        """Drop the gradients of a bucket."""
        self.stored.drop(bucket, "gradients")
        super().drop_gradients(bucket)
        self._away.discard(bucket)

    def states(self, bucket):
        """Return the bucket's master, if it has one, and the tensors that the optimizer keeps of its elements."""
        state = self.optimizer.state if self.optimizer else {}
        kept = [value for _, own in self.pieces.get(bucket, ()) for value in state.get(own, {}).values()]
        return [*([self.masters[bucket]] if bucket in self.masters else []),
                *(value for value in kept if isinstance(value, torch.Tensor) and value.dim())]

    def apart(self, bucket):
        """Return the bucket's shard of gradients, if that is a tensor of its own, and no part of a whole buffer."""
        shard = self.gradients.get(bucket)
        return [] if shard is None or shard.untyped_storage().nbytes() not in (0, shard.nbytes) else [shard]
