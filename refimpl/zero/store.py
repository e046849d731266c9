"""Where shards rest while nothing computes with them: the seam at which host memory or a disk comes in.

A bucket's optimizer state and masters are needed in its update alone, 12 of the 16 bytes a parameter in mixed
precision; at stage 3 its parameters, too, are needed only to be gathered and updated. An engine tells its store when it
needs which, and which come next; what the store does with them meanwhile is not ZeRO's business.
"""

from typing import Protocol


class ShardStore(Protocol):
    """What an engine takes as `store`. A key stands for tensors of one bucket that come and go together.

    The tensors stay the same objects, so that views of them stay right: a store that takes their contents elsewhere
    empties their storages (`tensor.untyped_storage().resize_(0)`), and gives these their bytes back in `get`. Nobody
    reads them in between.
    """

    def put(self, key, tensors, changed=True):
        """Nothing computes with `tensors` for a while. `changed`: whether they differ from what `get` brought."""

    def begin(self, key):
        """`get(key)` comes soon."""

    def get(self, key):
        """The tensors that were put, if any were, hold their contents when this returns."""


class DeviceMemory:
    """The store of an engine that is given none: everything stays where it is."""

    def put(self, key, tensors, changed=True):
        """It stays."""

    def begin(self, key):
        """It is there."""

    def get(self, key):
        """It is there."""
