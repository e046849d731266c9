"""A rank that is ended by SIGTERM says so first: torchrun ends all ranks of a host where one has failed, and SLURM
those of a job that it stops. Else such a rank would look like one that was killed.

Python runs a handler only when the main thread is in Python, and it may wait in C++. But Python writes the signal's
number to a socket at once, and another thread reads it there.
"""

import ctypes
import os
import select
import signal
import socket
import threading


class Terminated:
    """Waits for SIGTERM in the thread that calls `wait`. Made and closed in the main thread; elsewhere, and where the
    user handles SIGTERM, it does not hear of it."""

    def __init__(self):
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._hears = (threading.current_thread() is threading.main_thread()
                       and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        if self._hears:
            signal.signal(signal.SIGTERM, lambda *_: None)  # who waits ends the process
            self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds):
        """Return whether SIGTERM has come within so many seconds, or until `wake`."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        return bool(ready) and signal.SIGTERM in self._ours.recv(4096)

    def wake(self):
        """End a `wait`."""
        self._theirs.send(b"\0")

    def close(self):
        """Leave SIGTERM as it was. Nobody waits any more."""
        if self._hears:
            signal.set_wakeup_fd(self._before)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._ours.close()
        self._theirs.close()


def end():
    """End this process as SIGTERM does by default."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL; Python's own call is for the main thread
    os.kill(os.getpid(), signal.SIGTERM)
