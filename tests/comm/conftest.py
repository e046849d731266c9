"""What every test of ranks holds to: nothing is left of them."""

import os
import sys
import tempfile
import threading

import psutil
import pytest


def processes_left():
    """Child processes of this one, at any depth; the fork server, which stays to be used again, is none."""
    server = sys.modules["refimpl.comm.forkserver"]._current
    kept = server._process.pid if server is not None else None
    return [child for child in psutil.Process().children(recursive=True) if child.pid != kept]


def things():
    """What a launch could leave: files, threads, file descriptors."""
    files = {(folder, name) for folder in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(folder)
             for name in os.listdir(folder) if not name.startswith("pytest")}
    return files, set(threading.enumerate()), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0


@pytest.fixture(scope="session", autouse=True)
def warm():
    """The fork server runs before the first test counts what there is."""
    from refimpl.comm import launch

    launch(lambda comm: None, 1)


@pytest.fixture(autouse=True)
def nothing_is_left(warm):
    before = things()
    yield
    assert processes_left() == []
    after = things()
    assert after[1] == before[1], "a thread is left"
    assert after[2] <= before[2], "a file descriptor is left"
    assert {name for name in after[0] - before[0] if "torch" in name[1] or "tmp" in name[1]} == set()
