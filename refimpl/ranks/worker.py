"""One rank: from the fork to the function that it was started for, and back with what that returned or raised."""

import ctypes
import datetime
import faulthandler
import io
import linecache
import mmap
import os
import pickle
import resource
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

from .errors import RankError
from .pickling import pack_result
from .signs import map_own_record
from .world import World

LENGTH = struct.Struct("q")
READY, RETURNED, FAILED = "ready", "returned", "failed"
TORCH_DISTRIBUTED = os.path.dirname(dist.__file__)


@dataclass
class Setup:
    """Holds what a rank needs before it can unpickle the function."""

    world: World
    port: int  # of rank 0's store
    directory: str
    path: list
    environment: dict
    sources: dict  # file name -> lines, of code not in a file (a notebook's cell)
    open_files: tuple  # limits, soft and hard


@dataclass
class RankFailure:
    """Says why a rank did not return. `when`: time.monotonic(), the same clock for all processes of a machine."""

    rank: int
    what: str  # "raised ValueError: …", "was killed by SIGKILL", …
    text: str = ""  # traceback, or where it hangs
    when: float = 0.0
    exception: bytes | None = None
    consequence: bool = False  # perhaps of another rank's failure: torch.distributed raised it, or it names that rank


def run(rank, control, out, err, stacks, payload, record, listener=None):
    """Run as a rank. `control`, `out`, … are file descriptors.

    A rank that has returned or failed waits until the caller closes its control socket. So its end breaks no
    connection, and other ranks fail only for their own reasons.
    """
    parent, setup = socket.socket(fileno=control), None
    redirect(out, err)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    try:
        setup, packed = read_payload(payload)
        prepare(rank, setup)
        fn, args = pickle.loads(packed)
        store = meet(rank, setup, listener)  # rank 0's store must exist as long as any rank
        connection = setup.world.connect(rank, store, map_own_record(record, rank))
        report(parent, READY, None)
        value = pickled_result(fn(connection, *args))
        flush()
        report(parent, RETURNED, value)
    except BaseException as error:
        flush()
        report(parent, FAILED, describe(rank, error, setup.world.folders if setup else ()))
    parent.recv(1)  # until the caller closes its end
    flush()
    redirect(*[os.open(os.devnull, os.O_WRONLY)] * 2)  # torch would log that connections are closed
    if setup is not None:
        setup.world.disconnect()


def redirect(out, err):
    """Send to `out` and `err` all that this process writes, from Python, C or a child process, unbuffered."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", write_through=True))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def flush():
    """Flush Python's streams, unless the function has closed or replaced them, and those of C's stdio."""
    for stream in (sys.stdout, sys.stderr):
        if not getattr(stream, "closed", True):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def read_payload(fd):
    """Read (Setup, pickled (fn, args)) from a file whose position all ranks share: so it is mapped, not read."""
    view = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    size, = LENGTH.unpack(view[:LENGTH.size])
    return pickle.loads(view[LENGTH.size:LENGTH.size + size]), view[LENGTH.size + size:]


def prepare(rank, setup):
    """Take over the caller's directory, environment, import path, sources and limit of open files; take this rank's
    share of the cores."""
    os.chdir(setup.directory)
    os.environ.clear()
    os.environ.update(setup.environment)
    sys.path[:] = setup.path
    if setup.open_files != resource.getrlimit(resource.RLIMIT_NOFILE):
        resource.setrlimit(resource.RLIMIT_NOFILE, setup.open_files)
    linecache.cache.update({name: (sum(map(len, lines)), None, lines, name) for name, lines in setup.sources.items()})
    torch.cuda.manual_seed_all(torch.initial_seed())  # when CUDA begins, which draws a seed for each process
    np.random.seed()  # noqa: NPY002  a fork copies the state, so all ranks would draw the same numbers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // setup.world.size))


def meet(rank, setup, listener):
    """Return the store through which ranks find each other.

    Rank 0 keeps it, on a port that the caller has bound already: no other process can take that port, no rank comes
    too early, and no file is left.
    """
    return dist.TCPStore("127.0.0.1", setup.port, setup.world.size, is_master=rank == 0, wait_for_workers=False,
                         master_listen_fd=listener, timeout=datetime.timedelta(days=365))


def report(parent, kind, content):
    """Send a message to the caller: its length, then (kind, content) pickled."""
    message = pickle.dumps((kind, content))
    parent.sendall(LENGTH.pack(len(message)))
    parent.sendall(message)


class UnpicklableResult(TypeError):
    """Raised when the function returns a value that cannot be pickled."""


def pickled_result(value):
    """Pickle `value`. UnpicklableResult if that fails."""
    try:
        return pack_result(value)
    except TypeError as error:
        raise UnpicklableResult(str(error)) from error


def describe(rank, error, folders=()):
    """Return the RankFailure of a rank that raised `error`. `folders`: of code whose errors may come from other
    ranks."""
    when = time.monotonic()
    if isinstance(error, UnpicklableResult):
        return RankFailure(rank, f"returned an unpicklable value: {error}", when=when)
    if isinstance(error, SystemExit):
        what = f"exited with code {error.code!r} (sys.exit) before it returned"
    else:
        what = f"raised {''.join(traceback.format_exception_only(error)).strip()}"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # omit this file: begin with the user's code
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    try:
        exception = pack_result(error)
        pickle.loads(exception)
    except Exception:  # without the exception itself, only its message is sent
        exception = None
    # Ranks may exchange exceptions. Those without one then raise a RankError that names the rank that had one.
    of_another = type(error) is RankError and error.ranks and rank not in error.ranks
    return RankFailure(rank, what, text, when, exception,
                   bool(of_another) or from_distributed(error, folders))


def from_distributed(error, folders):
    """Tell whether `error` or one of its causes is a RuntimeError raised by torch.distributed or code in `folders`."""
    folders = (TORCH_DISTRIBUTED, *folders)
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        raised_there = isinstance(error, RuntimeError) and not isinstance(error, RankError)
        if raised_there and frames and frames[-1].filename.startswith(folders):
            return True
        error = error.__cause__ or error.__context__
    return False
