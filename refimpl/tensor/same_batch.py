"""The check that all ranks of a tensor-parallel group got the same batch, before each forward of a split model.

Each rank computes a part of every sum. With another batch on another rank the sums would mean nothing, the loss would
still fall, and no collective would fail. So the ranks exchange 16 bytes that say what each is about to read: names,
shapes and dtypes of the arguments, and a checksum of their values. They go by `comm.host()`, and
`closed_forms.same_batch_traffic` counts them.
"""

import inspect
import json
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..comm import CollectiveMismatch
from ..comm.texts import texts_if_other

OWN = ("past_key_values",)  # arguments in which ranks have their own heads
PIECE = 2**20  # words of 8 bytes whose weights a checksum makes at a time
MIX, MIX_AGAIN = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, of which many bits are set
FIX = ("Every rank of a tp group gets the same batch: seed the sampler by the data-parallel rank, or broadcast from "
       "the group's first rank")


class SameBatch:
    """Compares what the ranks of `comm` give a model: `model.register_forward_pre_hook(SameBatch(comm, model), …)`.

    All tensors among the arguments are compared to the bit, also those in dicts, lists and tuples, and numbers. A rank
    that differs raises CollectiveMismatch on all ranks before the model runs, with the names of ranks and arguments.
    Not compared are `past_key_values`, in which each rank has its own heads; nor tensors of other classes that wrap
    tensors (DTensor), but for their class; nor the values of sparse ones.

    No rank waits for a GPU: values there are summed on the GPU, and compared before the next forward, when the sum has
    long been copied to the host. So a forward with other values runs, and the next one raises; those of the last
    forward are not compared. Shapes are, at once, and so are values in host memory.

    A forward within a backward is a recomputation, and is not checked again. Fake tensors have shapes alone.
    """

    def __init__(self, comm, model):
        self.comm = comm
        self.names = [each.name for each in inspect.signature(model.forward).parameters.values()
                      if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        self.late = []  # of the last forward: (name, its HostChecksum)

    @torch._disable_dynamo
    @torch.no_grad()
    def __call__(self, model, args, kwargs):
        if self.comm.world_size == 1 or torch._C._current_graph_task_id() != -1:  # within a backward: a recomputation
            return
        # Ranks may pass keywords in another order.
        given = sorted((name, x) for name, x in self._given(args, kwargs) if comparable(x))
        shapes = {name: described(x) for name, x in given}
        sums = [(name, HostChecksum.of(x)) for name, x in given if has_values(x)]
        before = {name: each.value() for name, each in self.late}
        now = {name: each.value() for name, each in sums if each.event is None}
        self.late = [(name, each) for name, each in sums if each.event is not None]
        texts = texts_if_other(self.comm, "the batch", json.dumps([shapes, now, before]))
        if texts is not None:
            self.late = []  # they are of a batch that is refused
            raise mismatch(self.comm.ranks, [json.loads(each) for each in texts])

    def _given(self, args, kwargs):
        """Yield (name, value) of what the model is given, under the names of its parameters."""
        for i, value in enumerate(args):
            yield from named_values(self.names[i] if i < len(self.names) else f"argument {i}", value)
        for name, value in kwargs.items():
            yield from named_values(name, value)


def named_values(name, value):
    """Yield (name, value) of a value, or of what is in it: {"x": …} of an argument `batch` is "batch.x"."""
    if name in OWN:
        return
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_values(f"{name}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from named_values(f"{name}.{i}", each)
    else:
        yield name, value


def comparable(x):
    """Tell whether x is a tensor or a number: what ranks compare."""
    return torch.is_tensor(x) or isinstance(x, (bool, int, float))


def has_values(x):
    """Tell whether x is a tensor whose numbers can be read."""
    return (torch.is_tensor(x) and not isinstance(x, FakeTensor) and not is_traceable_wrapper_subclass(x)
            and x.layout is torch.strided and not x.is_meta and not x.is_quantized)


def described(x):
    """Return what the host knows of x."""
    if not torch.is_tensor(x):
        return repr(x)
    if is_traceable_wrapper_subclass(x):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


class HostChecksum(NamedTuple):
    """Holds a tensor's checksum in host memory, and the event after which it is there; None: it is there now."""

    host: torch.Tensor
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, x):
        """Launch the sum where x is, without waiting for it."""
        found = checksum(x)
        if not found.is_cuda:
            return cls(found, None)
        host = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
        with torch.cuda.device(found.device):
            host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return cls(host, event)

    def value(self):
        """Return the checksum as a number."""
        if self.event is not None:
            self.event.synchronize()  # the forward that it preceded is launched, and its backward: the GPU has work
        return self.host.item()


def checksum(x):
    """Return Σ_i r_i · w_i modulo 2^64, an int64 tensor of no dimensions, of the words w_i of 8 bytes that x is of.

    The weights r_i, odd, are scrambled from i. So it differs for other values, and for the same ones in another order,
    except by a chance of 2^-63. It takes at most three times PIECE words at a time, and reads at the speed of memory.
    Of one number that is expanded, the sum is the number's.
    """
    if x.numel() > 1 and not any(x.stride()):
        x = x[(0,) * x.dim()]
    octets = x.detach().reshape(-1).view(torch.uint8)
    if len(octets) % 8:
        octets = torch.nn.functional.pad(octets, (0, -len(octets) % 8))
    elif octets.storage_offset() % 8:
        octets = octets.clone()  # a view in int64 has to begin at a whole word
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in octets.view(torch.int64).split(PIECE):
        weights = torch.arange(1, len(piece) + 1, device=x.device).mul_(MIX)
        weights.bitwise_xor_(weights >> 29).mul_(MIX_AGAIN).bitwise_xor_(weights >> 32).bitwise_or_(1)
        total = total.mul_(MIX_AGAIN).add_(weights.mul_(piece).sum())  # multiplied: pieces that change places show, too
    return total


def mismatch(ranks, said):
    """Return the CollectiveMismatch that says which ranks differ from the first, and in what. `said`: [shapes, values,
    values of the forward before] of each rank."""
    (shapes, now, before), differ, lines = said[0], set(), []
    for name in sorted({name for each in said for name in each[0]}):
        have = {rank: each[0].get(name, "not given") for rank, each in zip(ranks, said, strict=True)}
        others = {rank: each for rank, each in have.items() if each != shapes.get(name, "not given")}
        if others:
            differ |= others.keys()
            lines.append(f"{name} is " + ", ".join(f"{have[rank]} on rank {rank}" for rank in (ranks[0], *others)))
    for index, mine, where in ((1, now, ""), (2, before, " in the forward before this one")):
        for name, value in mine.items():
            others = [rank for rank, each in zip(ranks, said, strict=True) if each[index].get(name, value) != value]
            if others and not any(line.startswith(f"{name} is ") for line in lines):
                differ |= {*others}
                lines.append(f"{name} has other values on ranks {others}{where}")
    differ = sorted(differ)
    return CollectiveMismatch(f"ranks {differ} of tensor-parallel group {list(ranks)} have another batch than rank "
                              f"{ranks[0]}: {'; '.join(lines)}. {FIX}", differ)
