"""What a store raises when it cannot keep its promise."""


class StoreError(OSError):
    """A store could not write or read. `errno`: the operating system's, or None. The message says what failed, where,
    and what to do."""

    def __str__(self):
        return str(self.args[-1])


class DamagedBlock(StoreError):
    """What was read of a block is not what was written."""
