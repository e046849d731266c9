"""PyTorch's allocator settings, and the sizes that follow from them.

    PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128,expandable_segments:True"   →   Settings.parse(the same)

Constants and rules are those of c10/core/AllocatorConfig and c10/cuda/CUDACachingAllocator, torch 2.11 to 2.14.
"""

import re
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .snapshot import Snapshot

MIB = 2**20
BLOCK = 512  # bytes; all sizes are multiples
SMALL = MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB  # below it a request in the large pool gets a segment of LARGE_SEGMENT
LARGE_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB
INTERVALS = 16  # of sizes, from 1 MiB on, each up to twice its lower end
VERSIONS = ("2.11", "2.12", "2.13", "2.14")  # of torch, whose rules are known
WITHOUT_EFFECT = {  # keys of PyTorch's by which no address changes
    "pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "pinned_max_register_threads", "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom"}


@dataclass(frozen=True)
class Settings:
    """Says how a CachingAllocator rounds, splits and collects. Sizes are in bytes.

    - `max_split_size`: blocks of this size or more are not split, and serve no smaller request. None: all are split.
    - `max_non_split_rounding`: such a block is up to so much larger than a request that it serves.
    - `divisions`: a request of 1, 2, 4 … MiB and more is rounded up to one of so many parts between two powers of two,
      a number for each of 16 intervals; 0 or 1 rounds to 512 bytes.
    - `garbage_collection_threshold`: of the memory that the process may have: above it, segments that are free and
      have been for long go back to the device before a new one is asked for. It acts only with a `memory_fraction`
      below 1.
    - `memory_fraction`: of the device's memory (`torch.cuda.set_per_process_memory_fraction`). None: all of it.
    - `expandable_segments`: one segment for each pool and stream, which grows.
    - `large_segment_size`: of a new segment for less than 10 MiB. A setting since torch 2.13.
    - `version`: of torch, "2.13" or "2.13.0+cpu". A newer one than is known here is taken for the newest that is known,
      with a warning.
    """

    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    divisions: tuple = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    memory_fraction: float | None = None
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    version: str = "2.13"

    def __post_init__(self):
        object.__setattr__(self, "version", _known(self.version))
        if self.max_split_size is not None and self.max_split_size < LARGE_SEGMENT:
            raise ValueError(f"max_split_size={self.max_split_size}: expected at least {LARGE_SEGMENT} (20 MiB), or "
                             "None")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ValueError(f"garbage_collection_threshold={self.garbage_collection_threshold}: expected a share from "
                             "0 to below 1")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction}: expected a share above 0, up to 1")
        if len(self.divisions) != INTERVALS or any(each & (each - 1) for each in self.divisions):
            raise ValueError(f"divisions={self.divisions}: expected {INTERVALS} powers of two, or 0")
        if self.large_segment_size != LARGE_SEGMENT and self.version in ("2.11", "2.12"):
            raise ValueError(f"large_segment_size={self.large_segment_size} in torch {self.version}: it is fixed to "
                             f"{LARGE_SEGMENT} before 2.13")

    @classmethod
    def parse(cls, text: str, **others: Any) -> Self:
        """Read the text of PYTORCH_CUDA_ALLOC_CONF, but for WITHOUT_EFFECT. ValueError for another key that is not
        simulated, and for a bad value."""
        found = [item for item in items(text) if item[0] not in WITHOUT_EFFECT and item != ("backend", "native")]
        return replace(cls(), **others | dict(map(_setting, found)))

    @classmethod
    def of(cls, snapshot: "Snapshot", **others: Any) -> Self:
        """Read a Snapshot's: what PyTorch wrote as resolved comes before the text of the environment variable. Its
        version is not written: where events do not name their pool it is 2.11, else the newest."""
        resolved, found = snapshot.resolved, {}
        if "max_split_size" in resolved:
            found["max_split_size"] = resolved["max_split_size"] if 0 < resolved["max_split_size"] < 2**60 else None
        for name in ("garbage_collection_threshold", "expandable_segments"):
            if name in resolved:
                found[name] = resolved[name]
        if len(divisions := resolved.get("roundup_power2_divisions", ())) == INTERVALS:
            found["divisions"] = tuple(divisions.values())
        version = VERSIONS[-1] if any("pool_id" in entry for entry in snapshot.entries) else VERSIONS[0]
        return replace(cls.parse(snapshot.settings, **{"version": version} | others), **found)

    def is_since(self, *version: Any) -> bool:
        """Tell whether the rules are those of torch (2, 12), say, or later."""
        return tuple(map(int, self.version.split("."))) >= version

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block that a request of `nbytes` needs."""
        size = max(nbytes, 1)
        divisions = self.divisions[min(max(0, size.bit_length() - 21), INTERVALS - 1)]
        if size >= BLOCK and divisions > 1 and size > BLOCK * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return -(-size // BLOCK) * BLOCK

    def segment(self, size: int) -> int:
        """Return the size of a new segment for a block of `size`."""
        if size <= SMALL:
            return SMALL_SEGMENT
        return self.large_segment_size if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE

    def splits(self, size: int, rest: int) -> bool:
        """Tell whether `rest` of a block becomes one of its own when `size` bytes of it are taken."""
        if size <= SMALL or self.expandable_segments:
            return rest >= BLOCK
        return (self.max_split_size is None or size < self.max_split_size) and rest > SMALL

    def serves(self, block: int, size: int) -> bool:
        """Tell whether a free block of `block` bytes may be taken for `size`: a large one is not, or its rest is."""
        if self.max_split_size is None:
            return True
        if size < self.max_split_size:
            return block < self.max_split_size
        return block < size + self.max_non_split_rounding


def _known(version):
    """Return which of VERSIONS stands for a version of torch. ValueError for one that is older than all, or is none."""
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    minor = f"{found[1]}.{found[2]}" if found else version
    if minor in VERSIONS:
        return minor
    if found is None or (int(found[1]), int(found[2])) < tuple(map(int, VERSIONS[0].split("."))):
        raise ValueError(f"version={version!r}: expected one of {', '.join(VERSIONS)}, or a newer one")
    warnings.warn(f"torch {minor} is newer than {VERSIONS[-1]}, the newest whose allocator is known here: the rules of "
                  f"{VERSIONS[-1]} are used", stacklevel=4)
    return VERSIONS[-1]


def items(text):
    """Return [(key, value)] of "key:value,key:[a:b,c:d]"."""
    items, depth, start = [], 0, 0
    text = "".join(text.split())
    for at, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            if text[start:at]:
                items.append(text[start:at].partition(":")[::2])
            start = at + 1
    return items


# Key -> (whether PyTorch takes a value, what it says of one that it refuses).
_TAKES = {
    "max_split_size_mb": (lambda text: int(text) >= 20,
                          "CachingAllocator option max_split_size_mb too small, must be >= 20"),
    "max_non_split_rounding_mb": (lambda text: int(text) >= 20,
                                  "CachingAllocator option max_non_split_rounding_mb too small, must be >= 20"),
    "large_segment_size_mb": (lambda text: int(text) > 10,
                              "CachingAllocator option large_segment_size_mb must be > 10 MB"),
    "garbage_collection_threshold": (lambda text: 0 < float(text) < 1,
                                     "garbage_collect_threshold is invalid, set it in (0.0, 1.0)"),
    "per_process_memory_fraction": (lambda text: 0 <= float(text) <= 1,
                                    "per_process_memory_fraction is invalid, set it in [0.0, 1.0]"),
    "expandable_segments": (lambda text: text in ("True", "False"),
                            "Expected 'True' or 'False' in ConfigTokenizer"),
    "roundup_power2_divisions": (lambda text: not any(n & (n - 1) for n in _divisions(text)),
                                 "For roundups, the divisions has to be power of 2"),
}


def _setting(item):
    """Return (name, value) of a field of Settings. ValueError in PyTorch's words for a value that it refuses."""
    key, value = item
    if key not in _TAKES:
        raise ValueError(f"{key!r} is not simulated: expected {', '.join([*_TAKES][:-1])} or {[*_TAKES][-1]}")
    takes, words = _TAKES[key]
    try:
        taken = takes(value)
    except ValueError as error:
        raise ValueError(f"{key}:{value} is not a value that PyTorch takes") from error
    if not taken:
        raise ValueError(f"{key}:{value}: PyTorch refuses it: {words}")
    if key == "roundup_power2_divisions":
        return "divisions", _divisions(value)
    if key == "expandable_segments":
        return key, value == "True"
    if key.endswith("_mb"):
        return key.removesuffix("_mb"), int(value) * MIB
    return key.removeprefix("per_process_"), float(value)


def _divisions(value):
    """Return a number for each interval: of one number, or of [64:8,256:4,>:1]. A size in MiB names its interval; the
    first fills those below it, ">" those above the last; what lies between two is not rounded, as in PyTorch."""
    if not value.startswith("["):
        return (_natural(value, 1),) * INTERVALS
    found, last, first = [0] * INTERVALS, 0, True
    for key, number in items(value[1:-1]):
        if key == ">":
            found[last + 1:] = [_natural(number)] * (INTERVALS - last - 1)
            continue
        if _natural(key, 1) & (int(key) - 1):
            raise ValueError(key)
        last = min(int(key).bit_length() - 1, INTERVALS - 1)
        if first:
            found[:last] = [_natural(number)] * last
        found[last], first = _natural(number), False
    return tuple(found)


def _natural(text, least=0):
    if int(text) < least:
        raise ValueError(text)
    return int(text)
