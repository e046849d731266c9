"""The connections between ranks, known by their sockets, so that they can be closed.

A rank that waits in a collective waits in C++, where no exception of Python's reaches it. But gloo raises at once where
a connection is closed. So a wait for a rank that will never come is ended from this side.
"""

import contextlib
import os
import socket

import torch
import torch.distributed as dist

FOLDER = "/proc/self/fd"

_ours = {}  # file descriptor -> (own end, other end) of a connection to another rank


@contextlib.contextmanager
def noted():
    """Note the connections that are made in this context: those of a process group."""
    before = set(_connections())
    yield
    _ours.update({fd: ends for fd, ends in _connections().items() if fd not in before})


def close_all():
    """Close the connections to all other ranks; what waits for one raises. NCCL has a call for that."""
    here = _connections()
    for fd, ends in _ours.items():
        if here.get(fd) == ends:  # else its number is another file's by now
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
                end.shutdown(socket.SHUT_RDWR)
    for group in list(dist.distributed_c10d._world.pg_map):
        if "nccl" in dist.get_backend_config(group):
            with contextlib.suppress(RuntimeError):  # it has made no connection yet
                group._get_backend(torch.device("cuda")).abort()


def _connections():
    """Return {file descriptor: its two ends} of this process's TCP connections."""
    found = {}
    for name in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
        with contextlib.suppress(OSError):  # it has been closed, or is not connected
            if os.readlink(f"{FOLDER}/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                        found[int(name)] = end.getsockname(), end.getpeername()
    return found
