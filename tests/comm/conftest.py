"""What every test of ranks holds to: nothing is left of them."""

import os
import signal
import sys
import tempfile
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which no Ctrl-C reaches: ours shall
    signal.signal(signal.SIGINT, signal.default_int_handler)


def find_processes():
    """Child processes of this one, at any depth; but for the fork server, which stays to be used again, and Python's
    own tracker of resources, which stays once anybody has used multiprocessing."""
    server, tracker = sys.modules["refimpl.comm.forkserver"]._current, resource_tracker._resource_tracker._pid
    kept = {server._process.pid if server is not None else None, tracker}
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in kept]


@pytest.fixture
def processes_left():
    """A function: the processes that are left at the moment."""
    return find_processes


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """Where the caller and its ranks, and nobody else, put temporary files."""
    folder, before = tmp_path_factory.mktemp("temporary"), (tempfile.tempdir, os.environ.get("TMPDIR"))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    yield folder
    tempfile.tempdir = before[0]
    os.environ.pop("TMPDIR") if before[1] is None else os.environ.update(TMPDIR=before[1])


@pytest.fixture(scope="session", autouse=True)
def warm():
    """The fork server runs before the first test counts what there is."""
    from refimpl.comm import launch

    launch(lambda comm: None, 1)


def open_files():
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


@pytest.fixture(autouse=True)
def nothing_is_left(warm, own_temporary_folder, request):
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert find_processes() == []
    assert set(threading.enumerate()) == threads, "a thread is left"
    left = [path.name for path in own_temporary_folder.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor")] == []  # torch._dynamo's cache, at import
    if "notebook" not in request.node.name:  # nbclient keeps its event loop
        assert open_files() <= files, "a file descriptor is left"
