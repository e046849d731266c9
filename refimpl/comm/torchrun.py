"""The same call in a world that torchrun made: no process is started, and every worker gets every result."""

import atexit
import datetime
import os

import torch
import torch.distributed as dist

from ..ranks import RankError
from ..ranks.run import unpack
from ..ranks.signs import RECORD
from ..ranks.worker import UnpicklableResult, from_distributed, pickled_result
from .communicator import Communicator
from .records import last_collectives, pages


def inside_torchrun():
    """Tell whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def run_under_torchrun(fn, world_size, args, devices, backend, timeout, debug):
    """Run `fn(comm, *args)` in this worker; return what all ranks returned. `devices`: of the ranks on this machine.

    ValueError if torchrun's world has another size; RankError if `fn` raises here.
    """
    rank, world, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world_size != world:
        raise ValueError(f"world_size={world_size}, but torchrun made a world of {world}: give that, or take "
                         "int(os.environ['WORLD_SIZE'])")
    device = torch.device(devices[local])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        seconds = min(timeout, 365 * 24 * 3600)
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    record = bytearray(RECORD)
    comm = Communicator(rank, world, device, dist.group.WORLD, debug=debug, pages=pages(record))
    try:
        value = pickled_result(fn(comm, *args))
    except UnpicklableResult as error:
        raise RankError(f"rank {rank} returned an unpicklable value: {error}", [rank]) from error
    except Exception as error:
        began = f"\n{last_collectives(record)}" if from_distributed(error, [os.path.dirname(__file__)]) else ""
        raise RankError(f"rank {rank} raised {type(error).__name__}: {error}{began}", [rank]) from error
    results = [None] * world
    dist.all_gather_object(results, value)
    return [unpack(rank, result) for rank, result in enumerate(results)]
