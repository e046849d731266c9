"""One rank: from the fork to the function that it was started for, and back with what that returned or raised."""

import ctypes
import datetime
import faulthandler
import io
import linecache
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from .communicator import Communicator
from .errors import RankError
from .shipping import pack_result

LENGTH = struct.Struct("q")
READY, RETURNED, FAILED = "ready", "returned", "failed"
OURS = (os.path.dirname(__file__), os.path.dirname(dist.__file__))  # where a rank waits for others


@dataclass
class Setup:
    """What all ranks of a launch need to know before they can unpickle the function."""

    world_size: int
    devices: list  # one for each rank
    backend: str
    port: int
    debug: bool
    directory: str
    path: list
    environment: dict
    sources: dict  # file name -> lines, of code that is in no file (a notebook's cell)


@dataclass
class Failure:
    """How a rank did not return. `when` is time.monotonic, one clock for all processes of a machine."""

    rank: int
    what: str  # "raised ValueError: …", "was killed by SIGKILL", …
    text: str = ""  # traceback, or where it hangs
    when: float = 0.0
    exception: bytes | None = None
    consequence: bool = False  # torch.distributed raised it, perhaps because another rank is gone; or it tells of one


def run(rank, control, out, err, stacks, payload, listener=None):
    """The life of a rank. `control`, `out`, … are file descriptors.

    A rank that has returned or failed stays until it is told to go, so that its end breaks no one's connection: of the
    others, only those fail that have a reason of their own.
    """
    parent = socket.socket(fileno=control)
    redirect(out, err)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    try:
        setup, packed = read_payload(payload)
        prepare(rank, setup)
        fn, args = pickle.loads(packed)
        comm = connect(rank, setup, listener)
        report(parent, READY, None)
        value = packed_result(fn(comm, *args))
        flush()
        report(parent, RETURNED, value)
    except BaseException as error:
        flush()
        report(parent, FAILED, describe(rank, error))
    parent.recv(1)  # until the caller closes its end
    flush()
    redirect(*[os.open(os.devnull, os.O_WRONLY)] * 2)  # connections end in any order now, and torch would log it
    if dist.is_initialized():
        dist.destroy_process_group()


def redirect(out, err):
    """Send to `out` and `err` all that this process writes, from Python, C or a child, as soon as it is written."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", write_through=True))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def flush():
    """Python's buffers, if the function has left streams that have any, and those of C's stdio."""
    for stream in (sys.stdout, sys.stderr):
        if not getattr(stream, "closed", True):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def read_payload(fd):
    """(Setup, pickled (fn, args)) from the file that all ranks share; its position too, so it is mapped, not read."""
    view = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    size, = LENGTH.unpack(view[:LENGTH.size])
    return pickle.loads(view[LENGTH.size:LENGTH.size + size]), view[LENGTH.size + size:]


def prepare(rank, setup):
    """Make this process like the caller's: directory, environment, import path, sources; and share out the cores."""
    os.chdir(setup.directory)
    os.environ.clear()
    os.environ.update(setup.environment)
    sys.path[:] = setup.path
    linecache.cache.update({name: (sum(map(len, lines)), None, lines, name) for name, lines in setup.sources.items()})
    np.random.seed()  # noqa: NPY002  a fork copies its state, and all ranks would draw the same
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // setup.world_size))


def connect(rank, setup, listener):
    """Meet the other ranks; the world's communicator.

    Rank 0 keeps the store through which they find each other, on a port that the caller has bound already: nobody can
    take it, nobody comes too early, and no file is left.
    """
    device = torch.device(setup.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    forever = datetime.timedelta(days=365)  # how long is too long, the caller decides
    store = dist.TCPStore("127.0.0.1", setup.port, setup.world_size, is_master=rank == 0, wait_for_workers=False,
                          master_listen_fd=listener, timeout=forever)
    dist.init_process_group(setup.backend, store=store, rank=rank, world_size=setup.world_size, timeout=forever)
    return Communicator(rank, setup.world_size, device, dist.group.WORLD, debug=setup.debug)


def report(parent, kind, content):
    """One message to the caller: its length, then (kind, content) pickled."""
    message = pickle.dumps((kind, content))
    parent.sendall(LENGTH.pack(len(message)))
    parent.sendall(message)


class CannotReturn(TypeError):
    """What the function returned cannot travel."""


def packed_result(value):
    """`value`, pickled; CannotReturn if that cannot be."""
    try:
        return pack_result(value)
    except TypeError as error:
        raise CannotReturn(str(error)) from error


def describe(rank, error):
    """A Failure of what `error` tells, ready to travel."""
    if isinstance(error, CannotReturn):
        return Failure(rank, f"returned what cannot travel: {error}", when=time.monotonic())
    if isinstance(error, SystemExit):
        what = f"exited with code {error.code!r} (sys.exit) before it returned"
    else:
        what = f"raised {''.join(traceback.format_exception_only(error)).strip()}"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # the reader's own code comes first
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    try:
        exception = pack_result(error)
        pickle.loads(exception)
    except Exception:  # it will be told in words only
        exception = None
    # Where ranks tell each other of an exception, those that had none raise a RankError that names the one that had.
    of_another = type(error) is RankError and error.ranks and rank not in error.ranks
    return Failure(rank, what, text, time.monotonic(), exception, bool(of_another) or _from_distributed(error))


def _from_distributed(error):
    """Whether torch.distributed raised `error`, or what `error` was raised from."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        raised_by_torch = isinstance(error, RuntimeError) and not isinstance(error, RankError)
        if raised_by_torch and frames and frames[-1].filename.startswith(OURS):
            return True
        error = error.__cause__ or error.__context__
    return False
