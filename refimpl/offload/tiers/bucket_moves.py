"""What a placement knows of a bucket, what it moves, and what it counts."""

from dataclasses import dataclass, field

from ..disk.file import aligned

DEVICE, HOST, DISK = "device", "host", "disk"
LINKS = {(DEVICE, HOST): "out", (HOST, DEVICE): "in"}  # all others are the disk's


@dataclass(eq=False)
class Move:
    """Is a copy of a bucket from one tier to another, which begins when those in `after` have ended. `end`: when it
    ended, in seconds of the mover's clock."""

    bucket: object
    source: str
    target: str
    nbytes: int
    after: list = field(default_factory=list)
    end: float = None

    @property
    def link(self):
        """Return the link that it needs: "out", "in" or "disk"."""
        return LINKS.get((self.source, self.target), "disk")


@dataclass(eq=False)
class TieredBucket:
    """What a placement knows of a key. `where`: the tiers that have its contents, or get them by a move that has begun,
    which is `coming[tier]`."""

    key: object
    nbytes: int
    tensors: list = None
    where: set = field(default_factory=set)
    coming: dict = field(default_factory=dict)
    in_use: bool = False
    loaded: bool = True  # whether anybody has used it since it came to the device
    buffer: object = None  # host memory

    @property
    def host_bytes(self):
        """Return its bytes in host memory and on the disk, in whole blocks."""
        return aligned(self.nbytes)


@dataclass
class Counts:
    """Counts what a placement did: accesses that found their bucket on the device, all accesses, seconds that they
    waited, how many did, and bytes on each way."""

    hits: int = 0
    accesses: int = 0
    stalls: int = 0
    stalled: float = 0.0
    moved: dict = field(default_factory=dict)

    def bytes(self, *, source=None, target=None):
        """Return the bytes of all ways from `source` and to `target`."""
        return sum(nbytes for (begin, end), nbytes in self.moved.items()
                   if source in (None, begin) and target in (None, end))
