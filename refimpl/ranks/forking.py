"""The server's side: a process that has imported torch once, and forks ranks from then on, in milliseconds each.

It computes nothing. It waits for requests on its channels (see `forkserver`, which starts it), forks a rank for each,
reports how ranks end, and kills the ranks of a channel that closes. A rank's child processes are killed with it. When
its owner has ended, it kills all ranks and ends: a process that the owner has forked may hold the channels open.
"""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import sys

from torch.multiprocessing import _prctl_pr_set_pdeathsig as die_with_parent

from .worker import run

EVENT = struct.Struct("iii")  # rank, pid, waitpid's status, or STARTED
REQUEST = struct.Struct("i")  # rank
STARTED = -1
OPEN = b"O"  # the server's first message on a channel
FDS = 8  # the most file descriptors in a request
OWNER_EVERY = 1  # seconds between two looks whether the owner is there


def serve(fd, modules, owner):
    """Import `modules`, then fork ranks until the owner, a pid, is gone. `fd`: the socket on which channels arrive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in modules:
        importlib.import_module(name)
        if os.getppid() != owner:
            return
    gc.collect()
    gc.freeze()  # else a collection in a rank would write to, and so copy, the pages of all imported objects
    Server(socket.socket(fileno=fd), owner).run()


class Server:
    """Forks ranks on request, reports how they end, and kills the ranks of a channel that closes."""

    def __init__(self, requests, owner):
        self._requests, self._owner = requests, owner
        self._ranks = {}  # pid -> (channel, rank)
        self._closed = set()  # channels whose launch is over, until their last rank has ended
        self._selector = selectors.DefaultSelector()
        self._woken, waker = socket.socketpair()
        self._waker = waker
        for end in (self._woken, waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno())
        self._selector.register(requests, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        self._channels = set()

    def run(self):
        self._requests.sendall(b"R")
        while self._requests.fileno() != -1 or self._channels:
            for key, _ in self._selector.select(OWNER_EVERY):
                key.data(key.fileobj)
            if os.getppid() != self._owner:
                return self._kill_all()

    def _accept(self, requests):
        message, fds, *_ = socket.recv_fds(requests, 1, 1)
        if not message:  # the owner has ended, or closed its socket
            self._selector.unregister(requests)
            requests.close()
            return None
        channel = socket.socket(fileno=fds[0])
        try:
            channel.sendall(OPEN)
        except ConnectionError:  # the caller has closed its end
            channel.close()
            return None
        self._channels.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, self._request)
        return None

    def _request(self, channel):
        try:
            message, fds, *_ = socket.recv_fds(channel, REQUEST.size, FDS)
        except ConnectionError:
            message, fds = b"", ()
        if not message:
            return self._over(channel)
        rank, = REQUEST.unpack(message)
        pid = os.fork()
        if pid == 0:
            self._become_rank(rank, fds)
        for fd in fds:
            os.close(fd)
        self._ranks[pid] = channel, rank
        self._tell(channel, rank, pid, STARTED)

    def _become_rank(self, rank, fds):
        """Close the server's sockets and run as a rank. It is called in the child, and never returns."""
        status = 1
        try:
            os.setsid()  # its own process group: processes that the rank starts are killed with it
            die_with_parent(signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            for end in (self._woken, self._waker, *self._channels, self._requests):
                end.close()
            run(rank, *fds)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _reap(self, woken):
        with contextlib.suppress(BlockingIOError):
            while woken.recv(4096):
                pass
        ended = []
        with contextlib.suppress(ChildProcessError):  # there is no child
            while (event := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                ended += [event] if event[0] in self._ranks else []
        for pid, _ in ended:
            _kill(os.killpg, pid)  # processes that it started and that still run
        for pid, status in ended:
            channel, rank = self._ranks.pop(pid)
            self._tell(channel, rank, pid, status)
            if channel in self._closed:
                self._over(channel)

    def _over(self, channel):
        """End a launch: kill its ranks. When all have ended, close the channel, which tells the caller."""
        if channel not in self._closed:
            self._closed.add(channel)
            self._selector.unregister(channel)
        left = [pid for pid, (theirs, _) in self._ranks.items() if theirs is channel]
        for pid in left:
            _kill(os.kill, pid)
        if not left:
            self._closed.discard(channel)
            self._channels.discard(channel)
            channel.close()

    def _kill_all(self):
        for pid in self._ranks:
            _kill(os.kill, pid)
            _kill(os.killpg, pid)  # with the processes that it started

    @staticmethod
    def _tell(channel, *event):
        with contextlib.suppress(ConnectionError):  # the caller has ended; its ranks are killed next
            channel.sendall(EVENT.pack(*event))


def _kill(how, pid):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)
