"""The caller's side of the process that forks ranks: start it, keep it while it is up to date, ask it for ranks.

Starting Python and importing torch takes seconds; forking a process that has done so does not. The caller's own process
cannot be forked (threads, a CUDA context), so a second one is started, and kept for the launches to come. `forking` is
what it runs. (multiprocessing's own fork server would run the caller's `__main__` a second time, and there is only one
per process: its first user decides what it imports.)

A launch is one socket, its channel. Each message on it asks for one rank and carries its file descriptors; back come
the rank's pid, and later how it ended. When the channel closes, whatever the reason (done, failed, interrupted, the
caller killed), all its ranks are killed.
"""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from .forking import OPEN, REQUEST

# The first optimizer of a process imports torch._dynamo, which takes 1.4 s. The server does it once for all ranks.
PRELOADED = ("torch", "torch._dynamo", "refimpl.ranks.world")
CALLERS_OWN = {"__main__", "cli", "guard", "pytest_plugin"}  # what ranks do not use; guard has other libraries' classes
PACKAGE = Path(__file__).resolve().parents[1]
# With these settings, glibc keeps freed blocks of up to 32 MiB for the next tensors, as CUDA's caching allocator does.
# By default it returns them to the system. The page faults on new, zeroed memory then take a tenth of a step's time.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
READ_AT_IMPORT = ("TORCH_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_INTERPRET")  # prefixes of environment variables
START_SECONDS = 120

_current, _lock = None, threading.Lock()


def open_channel(module):
    """Connect to the fork server for one launch; return the socket.

    Starts a server if none runs, or if the running one is stale. `module` is one more that it has imported.
    """
    global _current
    with _lock:
        freshness, modules = _freshness(), {*PRELOADED, module}
        while True:
            if _current is not None and not _current.serves(freshness, modules):
                _current.close()
                _current = None
            if _current is None:
                _current = ForkServer(freshness, modules | _imported_by_caller())
            with contextlib.suppress(ConnectionError):  # the server has just ended: start another
                return _current.open_channel()
            _current.kill()


def _imported_by_caller():
    """Return what the caller has imported of this package, which ranks would import too: 0.2 s of a core in each.

    None where there is a GPU: what an import does to a driver, a fork inherits. No module of this package imports
    another library's models at import time: that may need what the caller has done before, and the server has not.
    """
    names = () if torch.cuda.is_available() else list(sys.modules)
    return {name for name in names if name.startswith("refimpl.") and name.split(".")[1] not in CALLERS_OWN}


def _freshness():
    """Return what makes a server stale: the newest source file's time, and variables that torch read at import."""
    written = max(path.stat().st_mtime_ns for path in PACKAGE.rglob("*.py"))
    return written, sorted((name, value) for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT))


class ForkServer:
    """Starts and owns the process that forks ranks. Raises RuntimeError, with its output, if it does not start."""

    def __init__(self, freshness, modules):
        self._freshness, self._modules, self._owner = freshness, modules, os.getpid()
        self._socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from refimpl.ranks.forking import serve; " \
               f"serve({theirs.fileno()}, {sorted(modules)!r}, {os.getpid()})"
        # Neither numpy's threads nor an initialized CUDA driver survive a fork. (An import may ask for GPUs.)
        environment = {**KEEP_FREED, **os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._log = tempfile.TemporaryFile()  # the server's own output, such as its last error
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
        """Return the server's output."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def serves(self, freshness, modules):
        """Tell whether it is alive, owned by this process, up to date, and has imported these modules."""
        alive = self._owner == os.getpid() and self._process.poll() is None
        return alive and self._freshness == freshness and self._modules >= modules

    def open_channel(self):
        """Return our end of a new channel. ConnectionError if the server has ended."""
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
        """Kill the server, and its ranks with it."""
        self._process.kill()
        self._process.wait()

    def close(self):
        """Let the server end. Launches in other threads are completed first."""
        self._socket.close()
        self._log.close()
        if self._owner != os.getpid():
            return
        atexit.unregister(self.close)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # it serves a launch in another thread, and ends after it
            threading.Thread(target=self._process.wait, daemon=True).start()


def last_words():
    """Return the output of the fork server, whether it runs or has just ended."""
    with _lock:
        return _current.last_words() if _current is not None else ""


def how_it_ended():
    """Say how the fork server has ended, in brackets."""
    with _lock:
        process = _current and _current._process
    try:
        status = process.wait(1) if process else None
    except subprocess.TimeoutExpired:
        status = None
    if status is None:
        return ""
    said = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f" ({said}{'; the kernel does that too when memory runs out' * (status == -signal.SIGKILL)})"


def fork_rank(channel, rank, fds):
    """Request one rank. It gets copies of `fds` (see `worker.run`)."""
    socket.send_fds(channel, [REQUEST.pack(rank)], fds)
