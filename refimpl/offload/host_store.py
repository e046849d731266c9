"""Shards in host memory while nothing computes with them: copies go on beside the computation.

    put        a copy to the host begins; the device's memory is free when it is done
    prefetch   a copy back begins, into device memory that is taken now
    get        the computation goes on when that copy is done

A bucket's states of 12 bytes a parameter are on the device for its update alone. Bytes on the link in a step: a state
goes there and back. "ZeRO-Offload" (Ren et al. 2021), section 4, moves states like this; `CPUAdam` lets them rest.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self

import torch

from .copies import TO_DEVICE, TO_HOST, host_bytes, link_of
from .owner import take_over

DEPTH = 2  # copies to the host at a time: each holds device memory until it is done


class StoredTensors:
    """What the store has of one key: the tensors, the host memory of their contents, and the copies on their way."""

    def __init__(self):
        self.tensors, self.host, self.sizes, self.away = (), None, (), False
        self.leaving = self.coming = None  # a Copy

    def parts(self):
        """Yield (tensor, its part of the host memory)."""
        yield from zip(self.tensors, self.host.split(self.sizes), strict=True) if self.tensors else ()


class HostStore:
    """A `ShardStore` of refimpl.zero in host memory: `Zero3(model, comm, optimizer, store=HostStore())`.

    Stages 1 and 2 keep masters, optimizer states and gradients in it, stage 3 also parameters; on one rank, too. What
    the device computes is the same to the bit. On a CPU tensors are copied within host memory, and their own storages
    are emptied: the same order and bytes. Host memory is kept for the next `put` of as many bytes, until `close`, and
    has the category "host memory" in `memory.track`.

    - `depth`: how many copies to the host may be on their way. The device has their memory until they are done.
    - `rate`: on a CPU, a `comm.Link`: copies take as long as over a link of that rate, in each direction.

    `.moved`: bytes copied so far, by direction. `.host_bytes`: host memory that it has taken. ValueError for a depth
    below 1 and a tensor that is a part of a storage; RuntimeError for a store that is closed, or used by two engines.
    """

    def __init__(self, *, depth: int = DEPTH, rate: Any = None) -> None:
        if type(depth) is not int or depth < 1:
            raise ValueError(f"depth={depth!r}: expected an integer of at least 1, the copies to the host at a time")
        if rate is not None and not hasattr(rate, "seconds"):
            raise TypeError(f"rate={rate!r}: expected a refimpl.comm.Link, such as Link(bytes_per_second=16e9)")
        self.depth, self.rate, self.host_bytes = depth, rate, 0
        self.moved = dict.fromkeys((TO_HOST, TO_DEVICE), 0)
        self._kept, self._links = defaultdict(StoredTensors), {}  # by key; by device
        self._leaving = []  # StoredTensors on their way to the host, the oldest first
        self._spare = defaultdict(list)  # (bytes, device) → host memory that nobody needs at the moment
        self._owner, self._closed = None, False

    # --- what an engine asks -----------------------------------------------------------------------------------------

    def attach(self, owner: object) -> None:
        """Note the engine whose shards are here from now on. RuntimeError if another one lives."""
        self._check_open()
        take_over(self, owner, list(self._kept), self.drop)

    def put(self, key: object, tensors: Sequence[torch.Tensor], changed: bool = True) -> None:
        """Copy `tensors` to the host, unless their contents are there, and empty their storages."""
        kept, tensors = self._of(key), tuple(tensors)
        if kept.away:
            if len(tensors) != len(kept.tensors) or any(a is not b for a, b in zip(tensors, kept.tensors, strict=True)):
                raise RuntimeError(f"{key} was put again while its tensors are in host memory: is the store used by "
                                   "two engines? Give each a store of its own")
            return
        sizes = tuple(_whole_bytes(key, tensor) for tensor in tensors)
        fits = kept.host is not None and kept.sizes == sizes
        if not fits:
            self._release_host_memory(kept, again=False)
            kept.host = self._allocate(sum(sizes), tensors)
        kept.tensors, kept.sizes, kept.away = tensors, sizes, True
        if changed or not fits:  # what was only read is on the host already
            self._send(key, kept)
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)  # a GPU's allocator gives it away when the copy is done

    def prefetch(self, key: object) -> None:
        """Begin to copy back, if the tensors are away."""
        self._fetch(key, self._of(key))

    def get(self, key: object) -> None:
        """Let the computation go on when the tensors hold their contents again."""
        kept = self._of(key)
        self._fetch(key, kept)
        if kept.coming is not None:
            kept.coming.wait()
        kept.coming, kept.away = None, False

    def drop(self, key: object) -> None:
        """Forget `key`; its host memory is for the next `put`."""
        self._check_open()
        kept = self._kept.pop(key, None)
        if kept is not None:
            if kept.coming is not None:
                kept.coming.finish()  # its memory is about to be used again
            self._release_host_memory(kept)

    # --- in the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Return when no copy is on its way."""
        self._check_open()
        self._settle(0)
        for link in self._links.values():
            link.finish()

    def close(self) -> None:
        """Wait for all copies and free the host memory, with all that is in it. RuntimeError if it is closed."""
        self.finish()
        self._closed = True
        self._kept.clear(), self._spare.clear(), self._links.clear()
        self.host_bytes = 0

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- host memory and copies --------------------------------------------------------------------------------------

    def _check_open(self):
        if self._closed:
            raise RuntimeError("this HostStore is closed, and what it had is gone: make a new one")

    def _of(self, key):
        self._check_open()
        return self._kept[key]

    def _allocate(self, nbytes, tensors):
        device = tensors[0].device
        spare = self._spare[nbytes, device]
        if spare:
            return spare.pop()
        self.host_bytes += nbytes
        return host_bytes(nbytes, device)

    def _release_host_memory(self, kept, again=True):
        """Keep a key's host memory for the next `put` of as many bytes, or free it, when copies to it are done."""
        if kept.host is None:
            return
        self._wait_for_copy(kept)
        if again:
            self._spare[kept.host.numel(), kept.tensors[0].device].append(kept.host)  # locking pages takes long: kept
        else:
            self.host_bytes -= kept.host.numel()
        kept.host = None

    def _fetch(self, key, kept):
        if not kept.away or kept.coming is not None:
            return
        for tensor, size in zip(kept.tensors, kept.sizes, strict=True):
            tensor.untyped_storage().resize_(size)
        kept.coming = self._copy(TO_DEVICE, [(_flat(tensor), part) for tensor, part in kept.parts()], kept, key)

    def _send(self, key, kept):
        self._wait_for_copy(kept)
        self._settle(self.depth - 1)  # room for the one that begins now
        kept.leaving = self._copy(TO_HOST, [(part, _flat(tensor)) for tensor, part in kept.parts()], kept, key)
        self._leaving.append(kept)

    def _settle(self, most):
        """Wait for copies to the host, the oldest first, until at most so many keys are on their way."""
        while len(self._leaving) > most:
            self._wait_for_copy(self._leaving[0])

    def _wait_for_copy(self, kept):
        """Return when a key's copy to the host is done."""
        if kept.leaving is not None:
            kept.leaving.finish()
        kept.leaving = None
        if kept in self._leaving:
            self._leaving.remove(kept)

    def _copy(self, direction, pairs, kept, key):
        device = kept.tensors[0].device
        if device not in self._links:
            self._links[device] = link_of(device, self.rate)
        self.moved[direction] += kept.host.nbytes
        after = kept.leaving if direction == TO_DEVICE else None  # it reads what that copy is still writing
        name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        return self._links[device].start(direction, pairs, kept.host, after, name)


def _whole_bytes(key, tensor):
    """Return the bytes of a tensor that fills its storage. ValueError for another: emptying it would lose the rest."""
    size = tensor.untyped_storage().nbytes()
    if size != tensor.nbytes or not tensor.is_contiguous():
        raise ValueError(f"{key}: a tensor of {tensor.nbytes} bytes in a storage of {size}: expected one that is "
                         "contiguous and fills its storage")
    return size


def _flat(tensor):
    """Return a tensor's bytes, (n,) uint8."""
    return tensor.detach().view(-1).view(torch.uint8)
