"""TieredStore: shards stay on the device as far as they fit, then in host memory, then on a disk; the next come ahead.

The order in which an engine needs its buckets is the same in each step. It is recorded, and from then on a bucket is
evicted that is needed furthest in the future, and one is loaded when there is just time to. ZeRO-Infinity (Rajbhandari
et al. 2021), sections 5.1 and 6.2, moves by such an order, too; where each bucket stays is fixed there.
"""

import collections
import itertools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch

from ..common.eviction import RULES, moved_bytes
from .disk.flat import check_own_storages
from .disk.space import Space
from .disk_store import check_link, check_sizes
from .owner import take_over
from .tiers.bucket_moves import DEVICE
from .tiers.mover import Mover
from .tiers.placement import TierPlacement

if TYPE_CHECKING:
    from os import PathLike

    from .tiers.bucket_moves import Counts

SHARE = 0.9  # of the free memory that `device="auto"` takes


class TieredStore:
    """Keeps what an engine puts into it on the device, in host memory and in a file in `folder`.

    - `device`: bytes of shards that may rest or be loaded there; "auto": what is computed with at a time during the
      first steps, and 0.9 of the least that was free then besides. What an engine makes there itself, such as
      gradients, may be above it by one bucket until another has left.
    - `host`: bytes of host memory. Room for one bucket is for two to change places.
    - `folder`, `disk`: where the rest goes, and bytes to reserve now (None: as they come); without a folder nowhere.
    - `rule`: "belady", or "lru" to compare with.
    - `links`: {"out": Link, "in": Link} and `disk_link`, to be as slow as these; on a CPU.
    - `buffer_bytes`, `buffer_count`, `thread_count`: of the disk, as `DiskStore`'s.

    `counts`: hits, accesses, stalls, seconds stalled, bytes on each way. `recording.departures`: accesses that were not
    those of the step before, which cost time and nothing else; a warning says the first.

    ValueError for sizes that do not go together; StoreError where they do not hold what is put, with the least that
    would, and where the disk fails; DamagedBlock; RuntimeError for a store that is closed, or used by two engines.
    """

    def __init__(self, folder: "str | PathLike[str] | None" = None, *, device: int | str = "auto", host: int = 0,
                 disk: int | None = None, rule: str = "belady", links: Any = None, disk_link: Any = None,
                 buffer_bytes: int = 8 * 2**20, buffer_count: int = 6, thread_count: int = 2) -> None:
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: expected one of {', '.join(RULES)}")
        for name, value in (("device", 0 if device == "auto" else device), ("host", host)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}={value!r}: expected bytes, 0 or more{', or auto' * (name == 'device')}")
        if folder is None and disk is not None:
            raise ValueError(f"disk={disk:,} bytes without a folder: pass the folder of the disk")
        check_sizes(buffer_bytes, buffer_count, thread_count, disk)
        if links is not None and (not isinstance(links, dict) or not links.keys() <= {"out", "in"}):
            raise ValueError(f'links={links!r}: expected {{"out": Link, "in": Link}}; the disk\'s is disk_link')
        for name, link in {"disk_link": disk_link, **(links or {})}.items():
            check_link(name, link)
        space = folder and Space(folder, disk, buffer_bytes, buffer_count, thread_count, disk_link)
        self._mover = Mover(space or None, links)
        self.plan = TierPlacement(self._mover, None if device == "auto" else device, host, bool(folder), rule)
        self._owner, self._open, self._said = None, True, False
        self._least_free = float("inf") if device == "auto" else None
        self._events, self._ended = collections.deque(), None  # (accesses so far, is one, what, key, …)

    @property
    def counts(self) -> "Counts":
        """Return what was counted, a Counts."""
        return self.plan.counts

    @property
    def recording(self) -> Any:
        """Return the order of accesses, a Recording."""
        return self.plan.recording

    def bytes_in(self, tier: str) -> int:
        """Return the bytes in a tier, "device" or "host", those on their way there included."""
        return self.plan.tiers[tier].used

    def attach(self, owner: object) -> None:
        """Note the engine whose shards are here from now on. RuntimeError if another one lives."""
        self._check()
        take_over(self, owner, list(self.plan.buckets), self.plan.drop)

    def put(self, key: object, tensors: Sequence[torch.Tensor], changed: bool = True) -> None:
        """Note that nothing computes with `tensors`. They may stay, or leave while the caller goes on."""
        self._check()
        bucket, tensors = self.plan.buckets.get(key), list(tensors)
        if bucket is not None and not bucket.in_use:
            raise RuntimeError(f"{key} was put twice without a get between: is the store used by two engines? Give "
                               "each a store of its own")
        check_own_storages(key, tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._event("changed" if changed else "same", key, nbytes, bucket is None or bucket.nbytes != nbytes)
        self.plan.end_use(key, nbytes, changed, tensors)
        self._after(tensors)

    def prefetch(self, key: object) -> None:
        """Begin to load `key`, unless that costs another bucket that is needed sooner."""
        self._check()
        if key in self.plan.buckets:
            self._event("hint", key, self.plan.buckets[key].nbytes)
            self.plan.hint(key)
            self._ended = self._mover.now()

    def get(self, key: object) -> None:
        """Return when the tensors of `key` are on the device."""
        self._check()
        if key in self.plan.buckets and not self.plan.buckets[key].in_use:
            self._event("need", key, self.plan.buckets[key].nbytes, access=True)
            self.plan.need(key)
            self._after(self.plan.buckets[key].tensors)

    def drop(self, key: object) -> None:
        """Forget what was put under `key`."""
        self._check()
        if key in self.plan.buckets:
            self._event("drop", key, self.plan.buckets[key].nbytes)
            self.plan.drop(key)
            self._ended = self._mover.now()

    def flush(self) -> None:
        """Return when nothing is under way."""
        for bucket in self.plan.buckets.values():
            for move in bucket.coming.values():
                self._mover.wait(move)
        self._check()

    def close(self) -> None:
        """Give all contents up. RuntimeError if that is done already."""
        self._check_open()
        self._open = False
        self._mover.close()
        for bucket in self.plan.buckets.values():
            bucket.buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self.close()

    def trace(self) -> Any:
        """Return what was asked in the last step, once one was recorded: [(what, key, bytes, seconds of computation
        before it)], which `simulate` and `moved_bytes` replay."""
        first = self.recording.accesses - len(self.recording.step)
        begin = next((i for i, event in enumerate(self._events) if event[:2] == (first, True)), len(self._events))
        return [event[2:] for event in itertools.islice(self._events, begin, None)]

    def beside(self, rules: Sequence[str] = RULES) -> dict[str, int]:
        """Return {rule: bytes of a step that each rule would load and evict on the device}, by the recorded trace."""
        trace = [("need" if what == "hint" else what, key, nbytes) for what, key, nbytes, _ in self.trace()]
        return {rule: moved_bytes(trace, self.plan.tiers[DEVICE].capacity, rule, steps=12, first=2) for rule in rules}

    def _event(self, what, key, nbytes, access=False):
        """Note what is asked. `access`: whether it is recorded as one."""
        now, first = self._mover.now(), self.recording.accesses - 2 * len(self.recording.step)
        self._events.append((self.recording.accesses, access, what, key, nbytes, now - (self._ended or now)))
        while self.recording.whole and self._events[0][0] < first:  # two steps are enough for `trace`
            self._events.popleft()
        self._ended = now

    def _after(self, tensors):
        """Look at the memory that is free, and at departures."""
        self._ended = self._mover.now()
        if self._least_free is not None:
            self._least_free = min(self._least_free, free_bytes(tensors))
            if self.recording.whole:
                # once a whole step is known: the least that was free in it is what shards may take
                self.plan.tiers[DEVICE].grow(int(SHARE * self._least_free))
                self._least_free = None
        if self.recording.departures and not self._said:
            self._said = True
            expected, found = self.recording.last_departure
            warnings.warn(f"the engine asked for {found} where {expected} came in the step before: results are the "
                          "same, but buckets come late until the new order has been recorded", stacklevel=3)

    def _check(self):
        self._check_open()
        if self._mover.failure is not None:
            raise self._mover.failure
        if self._mover.space is not None:
            self._mover.space.check()

    def _check_open(self):
        if not self._open:
            raise RuntimeError("this TieredStore is closed, and what was in it is gone: make another one")


def free_bytes(tensors):
    """Return the bytes that are free where `tensors` are: of a GPU with what PyTorch has reserved and not allocated."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return psutil.virtual_memory().available
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved
