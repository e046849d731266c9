"""Other ranks that are not there: torch.distributed takes this process for rank r of N.

    phantom.start(memory=80 * 2**30)
    from refimpl.phantom import group
    group.pretend(world_size=8)         # what torchrun would have set; then, as ever, in the script:
    torch.distributed.init_process_group("nccl")

DDP, FSDP2, DTensor and pipelines of others, and our engines, take the bytes of one of N ranks in one process. What a
collective returns is as if every rank held what this one holds, and a sum is one of its terms (device/libraries.c, and
torch's own fake group for tensors on the host). So numbers of other ranks are never right.
"""

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from .status import pretended, running

UNIQUE = b"0" * 128  # as long as what rank 0 of NCCL tells the others; a number, too


class Store(dist.Store):
    """What ranks tell each other while a group is made. What another rank would have said is all zeros."""

    def __init__(self):
        super().__init__()
        self._said = {}

    def set(self, key, value):
        self._said[key] = value

    def get(self, key):
        return self._said.get(key, UNIQUE)

    def add(self, key, amount):
        self._said[key] = str(int(self._said.get(key, b"0")) + amount).encode()
        return int(self._said[key])

    def compare_set(self, key, expected, desired):
        return self._said.setdefault(key, desired)

    def check(self, keys):
        return all(key in self._said for key in keys)

    def wait(self, keys, timeout=None):
        """Return at once: there is nobody to wait for."""


def pretend(world_size, rank=0):
    """Be rank `rank` of `world_size` for every process group that is made from here on. ValueError for numbers that
    cannot be, RuntimeError without the device, or if there is a group already."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: expected 0 ≤ rank < world_size")
    if not running():
        raise RuntimeError("other ranks are pretended on a device without kernels alone: call phantom.start first")
    if dist.is_initialized():
        raise RuntimeError("there is a process group already: pretend before init_process_group")
    pretended.add("group")
    local = rank % torch.cuda.device_count()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(
        min(world_size, torch.cuda.device_count())), MASTER_ADDR="localhost", MASTER_PORT="29500")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # its thread asks the store, which is Python's

    store = Store()  # held by `meet`: torch's own code holds what is behind it alone

    def meet(url, **options):
        yield store, rank, world_size

    _rendezvous_handlers.update(dict.fromkeys(_rendezvous_handlers, meet))
    distributed_c10d.ProcessGroupGloo = _OnTheHost
    FakeProcessGroup._set_sequence_number_for_group = lambda group: None  # up to 2.13 it has no numbers
    original = distributed_c10d.init_process_group

    def init_process_group(*args, device_id=None, **kwargs):  # a group that knows its device is split by NCCL
        return original(*args, **kwargs)

    distributed_c10d.init_process_group = dist.init_process_group = init_process_group


class _AnyFake(type):
    def __call__(cls, store, rank, size, timeout=None, **options):
        return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())

    def __instancecheck__(cls, group):
        return isinstance(group, FakeProcessGroup)


class _OnTheHost(metaclass=_AnyFake):
    """Stands where torch has ProcessGroupGloo: up to 2.13 it asks of what it has made whether it is one."""
