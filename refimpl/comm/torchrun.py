"""The same call in a world that torchrun, SLURM or MPI made: no process is started, and every worker gets every result.

Each rank watches the others through torch's store (`hosts.watch`), as `launch` watches its ranks on one machine: so the
error of each rank names the rank that failed, and its host.
"""

import atexit
import datetime
import itertools
import os
import traceback

import torch
import torch.distributed as dist

from ..phantom.status import pretending
from ..ranks import RankError
from ..ranks.running import unpack
from ..ranks.signs import RECORD, set_own_record
from ..ranks.worker import UnpicklableResult, from_distributed, pickled_result
from .communicator import Communicator
from .hang_diagnosis import last_collectives, pages
from .hosts import joining, sockets
from .hosts.notes import ReportedFailure
from .hosts.patience import FILES
from .hosts.watch import PeerWatch

TRACE = 3000  # characters of the traceback that other ranks see
FOLDER = os.path.dirname(__file__)

_met = None  # (the world's Hosts, the number of the meeting), once its ranks have met
_launches = itertools.count(1)


def run_under_torchrun(fn, world_size, args, devices, backend, timeout, debug):
    """Run `fn(comm, *args)` in this worker; return what all ranks returned. `devices`: of the ranks on this machine.

    ValueError if torchrun's world has another size, and for GPUs without LOCAL_RANK; RankError for ranks that do not
    meet or that differ in what has to be alike, and if `fn` raises, here or on another rank.
    """
    global _met
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != world:
        raise ValueError(f"world_size={world_size}, but torchrun made a world of {world}: give that, or take "
                         f"int(os.environ['WORLD_SIZE']); of a mesh, axes whose product is {world}")
    device = torch.device(devices[_local_rank(rank, devices)])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if pretending():
        return _run_pretended(fn, rank, world, args, device, backend, debug)
    store = store_of(rank, world)
    if _met is None:
        _met = joining.meet(store, rank, world, backend)
    hosts, store = _met[0], dist.PrefixStore(f"world {_met[1]}", store)
    prefix, record = f"launch {next(_launches)}", set_own_record(bytearray(RECORD))
    watch = PeerWatch(dist.PrefixStore(prefix, store), lambda: dist.PrefixStore(prefix, store.clone()), rank, hosts,
                  record, timeout)
    with watch:
        try:
            if not dist.is_initialized():
                watch.wait_for_all()
                connect(backend, store, rank, world, timeout)
            comm = Communicator(rank, world, device, dist.group.WORLD, debug=debug, pages=pages(record), hosts=hosts)
            value = pickled_result(fn(comm, *args))
            watch.returned()
            results = [None] * world
            dist.all_gather_object(results, value)
        except BaseException as error:
            raise_for(error, watch, rank, record)
            raise
    return [unpack(rank, result) for rank, result in enumerate(results)]


def _run_pretended(fn, rank, world, args, device, backend, debug):
    """Run `fn` as one rank of a world whose others are not there: there is nobody to meet, or to watch."""
    if not dist.is_initialized():
        dist.init_process_group(backend)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    comm = Communicator(rank, world, device, dist.group.WORLD, debug=debug, pages=pages(bytearray(RECORD)))
    try:
        value = pickled_result(fn(comm, *args))
    except Exception as error:
        raise RankError(f"rank {rank} raised {type(error).__name__}: {error}", [rank]) from error
    return [unpack(each, value) for each in range(world)]


def _local_rank(rank, devices):
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if any(device.startswith("cuda") for device in devices) and len(devices) > 1:
        raise ValueError(f"RANK={rank} is set and LOCAL_RANK is not, so no rank knows its GPU, and all would take "
                         "cuda:0: set LOCAL_RANK to the rank's number on its host, from 0 on, as torchrun does")
    return 0


def store_of(rank, world):
    """Return torch's store: that of a world which is connected already, or a new one."""
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore("refimpl", store)
    return dist.PrefixStore("refimpl", joining.open_store(rank, world))


def connect(backend, store, rank, world, timeout):
    """Connect this rank to all others. The timeout of a collective is only the last resort: `PeerWatch`
    knows sooner."""
    seconds = min(max(timeout, FILES), 365 * 24 * 3600)
    with sockets.noted():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world,
                                timeout=datetime.timedelta(seconds=seconds))
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def raise_for(error, watch, rank, record):
    """Tell the others of an exception of this rank, and raise what it should see: its own, as a RankError, or that of
    the rank to blame. Returns for what is not an Exception, once the others know of it."""
    here, hosts = watch.hosts.format_ranks([rank]), watch.hosts
    if watch.verdict and type(error) is RankError and error.ranks == tuple(watch.verdict.ranks):
        raise error  # of the verdict itself
    consequence = from_distributed(error, [FOLDER]) or watch.interrupted and isinstance(error, KeyboardInterrupt)
    began = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}\n{last_collectives(record)}".rstrip()
    began = hosts.in_text(f"rank {rank} raised {began}") if consequence else ""
    if consequence and (better := watch.error(began)):
        raise better from error
    if isinstance(error, UnpicklableResult):
        what = f"returned an unpicklable value: {error}"
    elif isinstance(error, Exception):
        what = f"raised {type(error).__name__}: {hosts.in_text(str(error))}"
    else:
        what = f"ended by {type(error).__name__}{f' {error}' if str(error) else ''}"
    of_others = isinstance(error, RankError) and error.ranks and rank not in error.ranks
    kind = type(error).__name__ if isinstance(error, RankError) else "RankError"
    trace = "".join(traceback.format_exception(error))[-TRACE:]
    watch.failed(ReportedFailure(f"{here} {what}", list(error.ranks) if of_others else [rank], kind,
                         f"where it was raised:\n{trace}", consequence=bool(consequence or of_others)))
    if isinstance(error, Exception):
        more = began.partition("\n")[2]
        raise RankError(f"{here} {what}" + (f"\n{more}" if more else ""),
                        error.ranks if of_others else [rank]) from error
