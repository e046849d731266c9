"""Partitioned activation checkpoints: of the input of a recomputed region each rank keeps 1/n, and gathers it again.

Under tensor parallelism all n ranks of a group compute with the same input of a block, so recomputation keeps n copies
of it. "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al. 2020), section 6.1,
calls this P_a, and P_a+cpu where the part sleeps in host memory:

    forward    pack: rank r keeps elements r·⌈N/n⌉ … (r+1)·⌈N/n⌉ − 1 of the N, padded with zeros
    backward   unpack, before the recomputation: an all_gather of the n parts

`refimpl.checkpointing` says how a region's input is kept (`keep=`): `recompute(blocks, keep=PartitionedInputs(comm))`.
"""

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from ..comm.communicator import Communicator

SMALLEST = 2**16  # bytes
SUM_BYTES = 8  # of a checksum
WORDS = 64  # of 8 bytes, that a checksum adds before it weighs their sum
PLAIN = (torch.Tensor, FakeTensor)


class UnequalInputs(RuntimeError):
    """Raised in backward if what the ranks' parts make up is not the tensor that this rank had in the forward."""


def partitioned_bytes(elements, ranks, dtype=torch.float32, check=True):
    """Predict the bytes that one rank keeps of an input of N = `elements`, over n = `ranks`:

        ⌈N/n⌉ · e + 8 for its checksum; N · e for n = 1, where it stays whole

    With device="cpu" the ⌈N/n⌉ · e are in host memory, for n = 1 too, and the 8 on the device.
    Rajbhandari et al. 2020, section 6.1.
    """
    return part_elements(elements, ranks) * dtype.itemsize + SUM_BYTES * (check and ranks > 1)


def partitioned_traffic(elements, ranks, dtype=torch.float32):
    """Predict the bytes that one rank sends for one recomputation from an input of N = `elements`, over n = `ranks`:

        (n−1) · ⌈N/n⌉ · e, which is (n−1)/n of the input's bytes if n divides N

    One all_gather, as a ring sends it. Rajbhandari et al. 2020, section 8, counts it as a tenth or less of tensor
    parallelism's own.
    """
    return (ranks - 1) * part_elements(elements, ranks) * dtype.itemsize


def part_elements(elements, ranks):
    """Return ⌈N/n⌉, the elements of each rank's part."""
    return -(-elements // ranks)


class PartitionedInputs:
    """Keep 1/n of each input of a recomputed region on each of the n ranks of `comm`: the `keep` of `checkpoint`.

    `keep = PartitionedInputs(comm)`, then `recompute(model.blocks, keep=keep)` or `checkpoint(block, x, keep=keep)`.
    Gradients are bit for bit those with whole inputs. All ranks of `comm` have to run the same regions on the same
    inputs, as those of a tensor-parallel group do.

    - `device`: where parts sleep. None: where the input is. "cpu": in pinned host memory, if the input is on CUDA.
    - `smallest`: inputs of fewer bytes stay whole.
    - `check`: record a checksum of each input, and compare it with that of what is gathered. It reads the input twice
      in a step, and on CUDA the host waits once for each region. False: ranks that differ mix their inputs silently.

    These stay whole, too: what wants no gradient (tokens, rotary tables, masks), parameters and views of them, which
    are kept anyway, and tensors whose elements overlap. An input that several regions share is kept once. On one rank
    without `device` nothing is done.

    A graph has to go backward on all ranks alike, as often. Raises ValueError for another `device` or a negative
    `smallest`, and in backward UnequalInputs if some rank had another input.
    """

    def __init__(self, comm: "Communicator", device: torch.device | str | None = None, *, smallest: int = SMALLEST,
                 check: bool = True) -> None:
        if device is not None and str(device) != "cpu":
            raise ValueError(f"device={device!r}: expected None, the input's own, or 'cpu', pinned host memory")
        if type(smallest) is not int or smallest < 0:
            raise ValueError(f"smallest={smallest!r}: expected a number of bytes, 0 or more")
        self.comm, self.smallest = comm, smallest
        self.device = None if device is None else torch.device("cpu")
        self.check = check and comm.world_size > 1
        self._parts = weakref.WeakValueDictionary()  # of inputs that are kept now, so that a shared one is kept once
        self._parameters = {}  # address of a storage -> weak reference; a recomputation sees them detached

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> Any:
        """Return this rank's part and how to make the tensor of it; None if the tensor stays whole."""
        dense = self._is_dense(tensor)
        if dense is None:
            return None
        storage = tensor.untyped_storage()
        # The version: an input that was changed in place is another one.
        key = (storage._cdata, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.numel(),
               None if dense else (tensor.shape, tensor.stride()))
        known = self._parts.get(key)
        part = None if known is None else known.part()  # weak: None once the regions that shared it are done
        if part is None:
            flat = tensor.detach()
            # A dense one is read in memory's order, without a copy.
            flat = flat.as_strided((tensor.numel(),), (1,)) if dense else flat.reshape(-1)
            part, checksum = self._cut(flat), bit_sum(flat) if self.check else None
            known = self._parts[key] = _KeptInput(part, checksum, storage)
        return part, _TensorLayout(known, tensor.shape, tensor.stride(), tensor.device, dense)

    @torch.no_grad()
    def unpack(self, part: torch.Tensor, layout: Any) -> torch.Tensor:
        """Gather the tensor. UnequalInputs if it is not the one that was packed here."""
        part = part.to(layout.device, non_blocking=True)
        whole = self.comm.all_gather(part, label="a region's input") if self.comm.world_size > 1 else part
        flat = whole[:layout.shape.numel()]
        if self.check and not isinstance(flat, FakeTensor) and self.comm.has_others:
            self._compare(flat, layout)
        if layout.dense:
            return flat.as_strided(layout.shape, layout.stride)
        return torch.empty_strided(layout.shape, layout.stride, dtype=part.dtype, device=layout.device).copy_(
            flat.view(layout.shape))

    def _is_dense(self, tensor):
        """Tell whether the tensor is dense, without gaps between its elements; None if it stays whole."""
        # A tensor of a subclass may hold more than its elements.
        if self._is_parameter(tensor) or type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return None
        if not tensor.requires_grad or tensor.is_complex() or tensor.nbytes < max(self.smallest, 1):
            return None
        if self.comm.world_size == 1 and (self.device is None or tensor.device == self.device):
            return None
        extent = 1  # elements from the first to the last, dimension by dimension
        for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
                                   if size > 1):
            if stride < extent:
                return None  # they overlap
            extent += stride * (size - 1)
        return extent == tensor.numel()

    def _is_parameter(self, tensor):
        """Tell whether the tensor is a parameter or a view of one, also where it is one detached."""
        base = tensor._base if tensor._is_view() else tensor
        if isinstance(tensor, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter):
            self._parameters[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
            return True
        return bool(self._parameters) and tensor.untyped_storage()._cdata in self._parameters

    def _cut(self, flat):
        """Copy this rank's part of a flat tensor to where it sleeps."""
        length, rank = part_elements(flat.numel(), self.comm.world_size), self.comm.rank
        mine = flat[rank * length:(rank + 1) * length]
        device = self.device or flat.device
        pinned = device.type == "cpu" and flat.device.type == "cuda" and not isinstance(flat, FakeTensor)
        part = torch.empty(length, dtype=flat.dtype, device=device, pin_memory=pinned)
        part[:len(mine)].copy_(mine, non_blocking=True)  # read again on the same stream, so after it
        part[len(mine):].zero_()
        return part

    def _compare(self, flat, layout):
        if not torch.equal(bit_sum(flat), layout.known.checksum):
            described = f"{str(flat.dtype).removeprefix('torch.')} {list(layout.shape)}"
            raise UnequalInputs(
                f"{self.comm.place}: the input of a recomputed region, {described}, is "
                "not what this rank computed with in the forward, now that it is gathered from the parts of all ranks: "
                "some rank had another input, or changed it. Give all ranks of this communicator the same batch and "
                "the same random state; under sequence_parallel a rank has 1/n of the tokens already, so leave `keep` "
                "out; if inputs differ by rounding alone, check=False takes the parts as they are")


class _KeptInput:
    """Holds what is known of an input while it is kept: its part, its checksum, and its storage (so that no other one
    gets the same address)."""

    __slots__ = ("__weakref__", "checksum", "part", "storage")

    def __init__(self, part, checksum, storage):
        self.part, self.checksum, self.storage = weakref.ref(part), checksum, StorageWeakRef(storage)


class _TensorLayout(NamedTuple):
    """Says how a tensor lay in memory."""

    known: _KeptInput
    shape: torch.Size
    stride: tuple
    device: torch.device
    dense: bool


def bit_sum(flat):
    """Return a checksum of a flat tensor's bits, an int64 tensor of one element: Σ_i (2i + 1) · s_i modulo 2^64.

    s_i is the sum of 64 words of 8 bytes, the i-th 512 bytes. So it differs for other values, and where 512 bytes or
    more changed places, such as two sequences of a batch. It reads at the speed of memory and makes 1/32 of its bytes.
    """
    # A view in int64 has to begin at a whole word.
    flat = flat if flat.storage_offset() * flat.itemsize % SUM_BYTES == 0 else flat.clone()
    octets = flat.view(torch.uint8)
    whole = len(octets) // (SUM_BYTES * WORDS) * SUM_BYTES * WORDS
    sums = octets[:whole].view(torch.int64).view(-1, WORDS).sum(1)
    weights = torch.arange(1, 2 * len(sums) + 1, 2, device=flat.device)  # odd: no change of one s_i is 0 modulo 2^64
    return sums.mul_(weights).sum() - octets[whole:].sum()
