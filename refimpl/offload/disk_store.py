"""DiskStore: shards rest in one file, and host memory holds a fixed number of buffers, whatever the model's size.

A bucket's tensors lie side by side in the file, from an aligned place on. They are moved block by block, `buffer_bytes`
at a time, through buffers that are made once. ZeRO-Infinity (Rajbhandari et al. 2021), section 6.3.
"""


from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from .disk.file import BLOCK, aligned
from .disk.flat import check_own_storages, empty, fill
from .disk.space import Space
from .errors import StoreError
from .owner import take_over

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    import torch

    from .disk.space import DiskTraffic


def file_bytes(buckets):
    """Compute the bytes of a store's file, from {key: bytes of its tensors together}: each begins at a whole block.

        Σ_key ⌈bytes / BLOCK⌉ · BLOCK
    """
    return sum(aligned(nbytes) for nbytes in buckets.values())


def buffers_bytes(buffer_bytes, buffer_count):
    """Compute the host memory of a store: half of the buffers write, half read, each with a block for alignment."""
    return buffer_count * (buffer_bytes + BLOCK)


class DiskStore:
    """Keeps what an engine puts into it in a file in `folder`: `Zero2(model, comm, store=DiskStore("/nvme"))`.

    - `capacity_bytes`: reserve so much of the disk now; None: for each bucket when it first comes. No byte leaves
      memory before its space is reserved, so a full disk costs no state: `put` raises, and tensors stay as they are.
    - `buffer_bytes`, `buffer_count`: of host memory, a multiple of 4096 and an even number. All that a store takes.
    - `thread_count`: calls of the file at a time. With two the disk has one while the other's thread wakes.
    - `link`: a `refimpl.comm.Link`, to be as slow as one.

    `put` returns when the tensors are in buffers, or have passed through them; `prefetch` gives them memory and begins
    to read; `get` waits for that. Each block has a checksum. The file has no name: nothing is left of it when the store
    is closed, or the process ends, however it does.

    Raises FileNotFoundError, NotADirectoryError, PermissionError for the folder; ValueError for sizes that do not go
    together; later StoreError, an OSError, where the disk fails, and DamagedBlock for a block that changed.
    """

    below_host = True  # so `CPUAdam` lets its states rest here, not in host memory

    def __init__(self, folder: "str | PathLike[str]", *, capacity_bytes: int | None = None,
                 buffer_bytes: int = 8 * 2**20, buffer_count: int = 6, thread_count: int = 2, link: Any = None) -> None:
        check_sizes(buffer_bytes, buffer_count, thread_count, capacity_bytes)
        check_link("link", link)
        self._space = Space(folder, capacity_bytes, buffer_bytes, buffer_count, thread_count, link)
        self._owner, self._open = None, True
        self._away, self._kept = {}, set()  # key → tensors without bytes; keys whose contents the file has
        self._reading = {}  # key → DiskTransfer

    @property
    def folder(self) -> "Path":
        """Return the folder, a Path."""
        return self._space.file.folder

    @property
    def direct(self) -> bool:
        """Tell whether the page cache is passed by."""
        return self._space.file.direct

    @property
    def traffic(self) -> "DiskTraffic":
        """Return the bytes that went to the file and came from it, a DiskTraffic."""
        return self._space.traffic

    @property
    def file_bytes(self) -> int:
        """Return the bytes of the file."""
        return self._space.file.nbytes

    def attach(self, owner: object) -> None:
        """Note the engine whose shards are here from now on. RuntimeError if another one lives."""
        self._check_open()
        take_over(self, owner, {*self._away, *self._kept}, self.drop)

    def put(self, key: object, tensors: "Sequence[torch.Tensor]", changed: bool = True) -> None:
        """Store `tensors`, and free their bytes. StoreError where the disk is full or fails; if it is full the tensors
        keep their contents, and the call can be made again."""
        self._check()
        if key in self._away:
            raise RuntimeError(f"{key} was put twice without a get between: is the store used by two engines? Give "
                               "each a store of its own")
        tensors = list(tensors)
        check_own_storages(key, tensors)
        if changed or key not in self._kept:
            self._kept.discard(key)  # if the write fails, the file has neither the old contents nor the new
            self._space.write(key, tensors)
            self._kept.add(key)
        empty(tensors)  # only now: all bytes are in buffers, or in the file
        self._away[key] = tensors

    def prefetch(self, key: object) -> None:
        """Give the tensors of `key` their bytes, and begin to read them."""
        self._check()
        if key in self._away and key not in self._reading:
            fill(self._away[key])
            self._reading[key] = self._space.read(key, self._away[key])

    def get(self, key: object) -> None:
        """Return when the tensors of `key` hold their contents. StoreError where the disk fails, DamagedBlock where it
        is not what was written; then the tensors are still away, and `get` reads again."""
        self.prefetch(key)
        if key in self._away:
            transfer = self._reading[key]
            try:
                if transfer is not None:
                    transfer.wait()
            except StoreError:
                del self._reading[key]
                empty(self._away[key])  # so that nobody takes half of it for the contents
                raise
            del self._reading[key], self._away[key]

    def drop(self, key: object) -> None:
        """Forget what was put under `key`. Its place in the file is for what is put next."""
        self._check()
        if transfer := self._reading.pop(key, None):
            transfer.settle()
            empty(self._away[key])
        self._away.pop(key, None)
        self._kept.discard(key)

    def flush(self) -> None:
        """Return when all that was put is in the file."""
        self._check_open()
        self._space.flush()

    def close(self) -> None:
        """Give up the file, with all that is in it. RuntimeError if that is done already."""
        self._check_open()
        self._open = False
        self._space.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self.close()

    def _check(self):
        self._check_open()
        self._space.check()

    def _check_open(self):
        if not self._open:
            raise RuntimeError("this DiskStore is closed, and what was in it is gone: make another one")


def check_sizes(buffer_bytes, buffer_count, thread_count, capacity_bytes):
    """Raise ValueError for sizes that do not go together."""
    for name, value in (("buffer_bytes", buffer_bytes), ("buffer_count", buffer_count), ("thread_count", thread_count),
                        ("capacity_bytes", 0 if capacity_bytes is None else capacity_bytes)):
        if type(value) is not int:
            raise ValueError(f"{name}={value!r}: pass an integer")
    if buffer_bytes < BLOCK or buffer_bytes % BLOCK:
        raise ValueError(f"buffer_bytes={buffer_bytes:,}: a buffer holds whole blocks of the file; pass a multiple of "
                         f"{BLOCK:,}, at least {BLOCK:,}")
    if buffer_count < 2 or buffer_count % 2:
        raise ValueError(f"buffer_count={buffer_count}: half of the buffers write and half read; pass an even number, "
                         "at least 2; with 4 and more a block is copied while another is in a call")
    if thread_count < 1:
        raise ValueError(f"thread_count={thread_count}: pass at least 1")
    if capacity_bytes is not None and capacity_bytes < 0:
        raise ValueError(f"capacity_bytes={capacity_bytes:,}: pass None, or 0 and more")


def check_link(name, link):
    """Raise TypeError for what is no link and not None."""
    if link is not None and not hasattr(link, "seconds"):
        raise TypeError(f"{name}={link!r}: expected a refimpl.comm.Link, such as Link(bytes_per_second=16e9)")
