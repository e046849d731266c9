"""Run a function on N ranks: real processes, real torch.distributed, from a notebook's cell, a script or a test."""

import atexit
import datetime
import os
import pickle
import socket
import sys
import tempfile
from numbers import Integral, Real

import torch
import torch.distributed as dist

from .communicator import Communicator
from .errors import RankError
from .shipping import pack
from .watch import Ranks
from .worker import LENGTH, CannotReturn, Setup, packed_result

NCCL = "cpu:gloo,cuda:nccl"


def launch(fn, world_size, *args, device=None, timeout=60, debug=None):
    """Run `fn(comm, *args)` on `world_size` ranks and return what each returned, in rank order.

    Each rank is a process of its own on this machine, with a `Communicator` that connects it to the others. `fn` and
    `args` are copied to each, so `fn` may be defined in a notebook's cell, and what a rank changes stays there; what
    it returns is copied back (CUDA tensors arrive on the host). What ranks print appears here, labelled, in rank
    order: the lowest that still runs as it prints, the others after it.

    - `device`: `"cpu"`; `"cuda"`, one GPU for each rank, or shared by several ranks if there are too few; `"cuda:i"`,
      that one for all. By default `"cuda"` where there is one. It is `comm.device`, and the rank's current device.
    - `timeout`: seconds that `fn` may take, on all ranks; None for no limit.
    - `debug`: compare, before each collective, what the ranks are about to do; a mismatch raises CollectiveMismatch,
      which names them, where it would hang or give rubbish. By default the environment's REFIMPL_COMM_DEBUG=1.

    NCCL connects ranks that have a GPU each, gloo all others; CUDA tensors then go through host memory, since NCCL
    refuses two ranks on one GPU.

    RankError names the rank that raised, exited, was killed, did not answer in time (and says where it hangs), or
    returned what cannot travel; all others are ended. No process is left, whatever happens. ValueError for a
    `world_size`, `device` or `timeout` that makes no sense, TypeError for an `fn` or argument that cannot travel,
    naming the variable: both before anything is started.

    Under `torchrun` (RANK, WORLD_SIZE and MASTER_ADDR are in the environment) nothing is started: each of its
    workers calls `fn` with the world that torchrun made, over however many machines, and gets everyone's results.
    `timeout` is then that of a single collective, and it is torchrun that ends the others when a rank fails.
    """
    _check(fn, world_size, timeout)
    world_size, timeout = int(world_size), float("inf") if timeout is None else float(timeout)
    debug = os.environ.get("REFIMPL_COMM_DEBUG") == "1" if debug is None else bool(debug)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        return _run_under_torchrun(fn, world_size, args, device, timeout, debug)
    devices, backend = place(world_size, device)
    packed, sources = pack(fn, args)
    with socket.create_server(("127.0.0.1", 0), backlog=world_size) as listener, tempfile.TemporaryFile() as payload:
        setup = pickle.dumps(Setup(world_size, devices, backend, listener.getsockname()[1], debug, _directory(),
                                   list(sys.path), dict(os.environ), sources))
        for part in (LENGTH.pack(len(setup)), setup, packed):
            payload.write(part)
        payload.flush()
        with Ranks(world_size, payload, listener) as ranks:
            return [_read(rank, value) for rank, value in enumerate(ranks.results(timeout))]


def _read(rank, value):
    """What `rank` returned. RankError if it cannot be made again here, such as an exception of two arguments."""
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RankError(f"rank {rank} returned what cannot be read here: {type(error).__name__}: {error}",
                        [rank]) from error


def _directory():
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current directory, in which ranks would start, was deleted: os.chdir to one that "
                                "exists") from None


def place(world_size, device=None, gpus=None):
    """([device of each rank], torch's name of the backend). `gpus`: how many there are, if not those of this machine.

    ValueError for a device that is not there, or that ranks cannot use.
    """
    gpus = torch.cuda.device_count() if gpus is None else gpus
    if device is None:
        device = "cuda" if gpus else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: ranks run on 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: ranks run on 'cpu' or 'cuda'")
    if device.type == "cpu":
        return ["cpu"] * world_size, "gloo"
    if (device.index or 0) >= gpus:
        raise ValueError(f"device={str(device)!r}: this machine has {gpus} CUDA GPU{'s' * (gpus != 1)}")
    if device.index is not None:
        return [str(device)] * world_size, NCCL if world_size == 1 else "gloo"
    return [f"cuda:{rank % gpus}" for rank in range(world_size)], NCCL if world_size <= gpus else "gloo"


def _check(fn, world_size, timeout):
    if not callable(fn):
        raise TypeError(f"launch({type(fn).__name__}, …): expected a function fn(comm, *args)")
    if not isinstance(world_size, Integral) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: expected an integer of at least 1")
    if timeout is not None and (not isinstance(timeout, Real) or isinstance(timeout, bool) or not timeout > 0):
        raise ValueError(f"timeout={timeout!r}: expected seconds, more than 0, or None")


def _run_under_torchrun(fn, world_size, args, device, timeout, debug):
    rank, world, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world_size != world:
        raise ValueError(f"world_size={world_size}, but torchrun made a world of {world}: give that, or take "
                         "int(os.environ['WORLD_SIZE'])")
    devices, backend = place(int(os.environ.get("LOCAL_WORLD_SIZE", world)), device)
    device = torch.device(devices[local])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        seconds = min(timeout, 365 * 24 * 3600)
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    comm = Communicator(rank, world, device, dist.group.WORLD, debug=debug)
    try:
        value = packed_result(fn(comm, *args))
    except CannotReturn as error:
        raise RankError(f"rank {rank} returned what cannot travel: {error}", [rank]) from error
    except Exception as error:
        raise RankError(f"rank {rank} raised {type(error).__name__}: {error}", [rank]) from error
    results = [None] * world
    dist.all_gather_object(results, value)
    return [_read(rank, result) for rank, result in enumerate(results)]
