"""The caller's side of the process that forks ranks: start it, keep it while it is up to date, ask it for ranks.

Starting Python and importing torch takes seconds; forking a process that has done so does not. The caller's own process
cannot be forked (threads, a CUDA context), so a second one is started from nothing, and kept for the launches to come.
(multiprocessing's own fork server would run the caller's `__main__` a second time, and is one for the whole process:
whoever starts it first decides what it has imported.) What that process does is in `forking`.

A launch is one socket, its channel. Each message on it asks for one rank and carries its file descriptors; back come
the rank's pid, and later how it ended. When the channel closes, whatever the reason (done, failed, interrupted, the
caller killed), all its ranks are killed.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from .forking import OPEN, REQUEST

PACKAGE = Path(__file__).resolve().parents[1]
# In a rank glibc keeps what tensors of up to 32 MiB free for the next ones, as CUDA's caching allocator does. Else it
# goes back to the system, and a step pays for its pages again, zeroed, a fault for each 4 KB: a tenth of a small step.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
READ_AT_IMPORT = ("TORCH_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_INTERPRET")  # beginnings of names in the environment
START_SECONDS = 120

_current, _lock = None, threading.Lock()


def open_channel():
    """A socket to a running fork server, for one launch. Starts the server if there is none, or if it is stale."""
    global _current
    with _lock:
        freshness = _freshness()
        while True:
            if _current is not None and not _current.serves(freshness):
                _current.close()
                _current = None
            if _current is None:
                _current = ForkServer(freshness)
            with contextlib.suppress(ConnectionError):  # it has just ended: start another
                return _current.open_channel()
            _current.kill()


def _freshness():
    """What the server has baked in: our code as it is on disk, and what torch and triton read when imported."""
    written = max(path.stat().st_mtime_ns for path in PACKAGE.rglob("*.py"))
    return written, sorted((name, value) for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT))


class ForkServer:
    """The process, as its owner sees it. Raises RuntimeError, with what it wrote, if it does not start."""

    def __init__(self, freshness):
        self._freshness, self._owner = freshness, os.getpid()
        self._socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from refimpl.comm.forking import serve; " \
               f"serve({theirs.fileno()}, {os.getpid()})"
        # Neither numpy's threads nor a CUDA driver that an import has asked for GPUs would survive a fork.
        environment = {**KEEP_FREED, **os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._log = tempfile.TemporaryFile()  # what it writes itself: an error, should it end
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=self._log,
                                             stderr=self._log, pass_fds=[theirs.fileno()], start_new_session=True,
                                             env=environment)
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            self.close()
            raise
        atexit.register(self.close)

    def _wait_until_ready(self):
        self._socket.settimeout(START_SECONDS)
        with contextlib.suppress(TimeoutError):
            if self._socket.recv(1):
                return
        self.kill()
        raise RuntimeError(f"the process that starts ranks did not start (exit status {self._process.returncode}):\n"
                           f"{self.last_words()}")

    def last_words(self):
        """What it wrote."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def serves(self, freshness):
        """Whether it is alive, ours, and up to date."""
        return self._owner == os.getpid() and self._process.poll() is None and self._freshness == freshness

    def open_channel(self):
        """Our end of a new channel. ConnectionError if the server has ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [b"C"], [theirs.fileno()])
            ours.settimeout(START_SECONDS)
            if not ours.recv(len(OPEN)):
                raise ConnectionError("the process that starts ranks has ended")
            ours.settimeout(None)
        except BaseException:
            ours.close()
            raise
        return ours

    def kill(self):
        """End it at once, and its ranks."""
        self._process.kill()
        self._process.wait()

    def close(self):
        """End it; ranks of launches that are still running end first."""
        self._socket.close()
        self._log.close()
        if self._owner != os.getpid():
            return
        atexit.unregister(self.close)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # a launch in another thread: it goes when that has ended
            threading.Thread(target=self._process.wait, daemon=True).start()


def last_words():
    """What the running fork server, or the one that has just ended, wrote."""
    with _lock:
        return _current.last_words() if _current is not None else ""


def fork_rank(channel, rank, fds):
    """Ask for one rank, which gets copies of `fds` (see `worker.run`)."""
    socket.send_fds(channel, [REQUEST.pack(rank)], fds)
