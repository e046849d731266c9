"""One save at a time in a folder: two jobs that share one would remove each other's files.

    directory/saving.lock      held by flock from before the first file until the old state is gone; it names the host,
                               the process and the time

The system lets a lock go when its process ends, however it ends. Some file systems of several machines know no locks of
the others. So the holder also writes to the file every few seconds, and who finds another host's name in it watches it
for some of them: if nothing comes, that job has ended.
"""

import contextlib
import fcntl
import os
import socket
import stat
import threading
import time

NAME = "saving.lock"
BEAT = 5.0  # seconds


@contextlib.contextmanager
def only_save(directory):
    """Hold the lock of a folder, which has to exist, in this context. RuntimeError if another job saves there; OSError
    for what is no file under the lock's name, a link too."""
    path = directory / NAME
    file = _taken(path)
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(file, ended), daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # while it is locked: nobody else can have it by this name
        os.close(file)


def _taken(path):
    """Return the open file, locked; it is the one that has the name."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"{path} is no file: remove it")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _refusal(path, file) from None
            if _elsewhere(file) and _beats(file):  # the lock of another host may not be known here
                raise _refusal(path, file)
            if _is_named(path, file):  # else its holder has removed it since it was opened
                os.ftruncate(file, 0)
                os.pwrite(file, _words(), 0)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was removed by who had it; the next one is another file


def _is_named(path, file):
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)


def _words():
    return f"{socket.gethostname()}\nprocess {os.getpid()}\nsince {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()


def _elsewhere(file):
    """Tell whether another host has written to the file, so that its lock may not be known here."""
    host = os.pread(file, 1000, 0).decode(errors="replace").partition("\n")[0]
    return host not in ("", socket.gethostname())


def _beats(file):
    """Tell whether the file is written to within some beats."""
    before, until = os.fstat(file).st_mtime_ns, time.monotonic() + 3 * BEAT
    while time.monotonic() < until:
        time.sleep(BEAT / 10)
        if os.fstat(file).st_mtime_ns != before:
            return True
    return False


def _beat(file, ended):
    while not ended.wait(BEAT):
        os.utime(file)


def _refusal(path, file):
    who = ", ".join(os.pread(file, 1000, 0).decode(errors="replace").split("\n")[:3]).rstrip(", ") or "no name"
    return RuntimeError(f"another job saves here: {path} is held by {who!r}. Give each job a folder of its own; of one "
                        "job one save at a time")
