"""Where shards stay while nothing computes with them: the seam for offload to host memory or to a disk.

A bucket's optimizer state and masters, 12 of the 16 bytes a parameter in mixed precision, are needed in its update
alone; at stage 3 its parameters, too, are needed only to be gathered and updated. An engine tells its store which
shards it needs, and which come next. What the store does with them in between is not ZeRO's business.
"""

from typing import Protocol


class ShardStore(Protocol):
    """What an engine takes as `store`. A key stands for the tensors of one bucket that are stored and loaded together.

    The tensors stay the same objects, so that views of them stay right: a store that moves their contents elsewhere
    empties their storages (`tensor.untyped_storage().resize_(0)`), and fills them again in `get`. Nobody reads the
    tensors in between.
    """

    def put(self, key, tensors, changed=True):
        """Store `tensors`: nothing computes with them for a while. `changed`: whether they differ from what `get` last
        loaded."""

    def prefetch(self, key):
        """Begin to load `key`: `get(key)` comes soon."""

    def get(self, key):
        """Return when the tensors that were put under `key`, if any, hold their contents again."""


class DeviceMemory:
    """The default store of an engine: tensors remain on the device."""

    def put(self, key, tensors, changed=True):
        """No-op: the tensors remain on the device."""

    def prefetch(self, key):
        """No-op: the tensors are on the device."""

    def get(self, key):
        """No-op: the tensors are on the device."""
