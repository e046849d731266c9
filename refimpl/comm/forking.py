"""The server's side: a process that has imported torch once, and forks ranks from then on, in milliseconds each.

It computes nothing and waits for requests on its channels (see `forkserver`, which starts it), forks a rank for each,
tells how ranks end, and kills those of a channel that closes, with all that they had started.
"""

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path

# Optimizers import torch._dynamo when the first one is made, 1.4 s in every rank; here it is paid once.
PRELOADED = ("torch", "torch._dynamo", "refimpl.comm.worker")
EVENT = struct.Struct("iii")  # rank, pid, status as from waitpid; STARTED is no such status
REQUEST = struct.Struct("i")  # rank
STARTED = -1
OPEN = b"O"  # the server's first word on a channel
FDS = 8  # at most, with one request


def serve(fd, owner):
    """What the server's process runs: import, then fork ranks until the owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        __import__(name)
    _adopt_orphans()
    gc.collect()
    gc.freeze()  # what is here stays: a collection in a rank need not touch, and so copy, these pages
    Server(socket.socket(fileno=fd), owner).run()


class Server:
    """Forks on request, tells how ranks end, kills the ranks of a channel that closes."""

    def __init__(self, requests, owner):
        self._requests, self._owner = requests, owner
        self._ranks = {}  # pid -> (channel, rank)
        self._closed = set()  # channels whose launch is over: they go when their last rank has
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
            for key, _ in self._selector.select(timeout=2):
                key.data(key.fileobj)
            if os.getppid() != self._owner:  # a child that it forked may hold its sockets open: do not wait for that
                for channel in list(self._channels):
                    self._over(channel)
                self._stop_accepting()

    def _accept(self, requests):
        message, fds, *_ = socket.recv_fds(requests, 1, 1)
        if not message:
            return self._stop_accepting()
        channel = socket.socket(fileno=fds[0])
        try:
            channel.sendall(OPEN)
        except ConnectionError:  # the caller has given up already
            channel.close()
            return None
        self._channels.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, self._request)
        return None

    def _stop_accepting(self):
        if self._requests.fileno() != -1:
            self._selector.unregister(self._requests)
            self._requests.close()

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
        """In the child: drop what is the server's, and run. Never returns."""
        status = 1
        try:
            os.setsid()  # a group of its own, so that what it starts can be ended with it
            _die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            for end in (self._woken, self._waker, *self._channels, self._requests):
                end.close()
            from .worker import run
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
        with contextlib.suppress(ChildProcessError):  # no child at all
            while (event := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                ended += [event] if event[0] in self._ranks else []
        for pid, _ in ended:
            _kill(os.killpg, pid)
        self._sweep()
        for pid, status in ended:
            channel, rank = self._ranks.pop(pid)
            self._tell(channel, rank, pid, status)
            if channel in self._closed:
                self._over(channel)

    def _sweep(self):
        """Kill what ranks had started and left behind: orphans become our children (see `_adopt_orphans`)."""
        while orphans := [pid for pid in _children() if pid not in self._ranks]:
            for pid in orphans:
                _kill(os.kill, pid)
                os.waitpid(pid, 0)

    def _over(self, channel):
        """The launch is over: kill its ranks; when all are reaped, the closing of the channel says so."""
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

    @staticmethod
    def _tell(channel, *event):
        with contextlib.suppress(ConnectionError):  # the caller is gone: its ranks will be too
            channel.sendall(EVENT.pack(*event))


def _kill(how, pid):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)


def _children():
    """Pids of our children, those that have ended too. Elsewhere than on Linux orphans are not ours: none."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _die_with_parent():
    """Linux: be killed if the server is (prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _adopt_orphans():
    """Linux: what a rank started becomes our child when the rank ends (prctl PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
