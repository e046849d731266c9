"""What every test of ranks holds to: no process, thread, file or open file is left. Fixtures for conftest.py."""

import os
import signal
import tempfile
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import hosts_kit
import psutil
import pytest
import rank_pool

from refimpl.comm import launch
from refimpl.ranks import forkserver

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which no Ctrl-C reaches: ours shall
    signal.signal(signal.SIGINT, signal.default_int_handler)

servers = []  # fork servers that other tests use


def find_processes():
    """Child processes of this one, at any depth; but for fork servers, which stay to be used again, the pool's ranks,
    the process that forks ranks into hosts, and Python's own tracker of resources, which stays once anybody has used
    multiprocessing."""
    pids = {server._process.pid for server in (forkserver._current, *servers) if server is not None}
    pids |= {resource_tracker._resource_tracker._pid} | rank_pool.pids() | hosts_kit.pids()
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in pids]


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
    launch(lambda comm: None, 1)


def running_threads():
    return {thread for thread in threading.enumerate() if thread.name != rank_pool.NAME}


def kept():
    """What tests share, and has files open."""
    return rank_pool.pids(), [server._process.pid for server in servers if server is not None]


def open_files():
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


@pytest.fixture(autouse=True)
def nothing_is_left(warm, own_temporary_folder, request):
    threads, files, shared = running_threads(), open_files(), kept()
    yield
    assert find_processes() == []
    assert running_threads() == threads, "a thread is left"
    left = [path.name for path in own_temporary_folder.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor")] == []  # torch._dynamo's cache, at import
    # nbclient keeps its event loop, and a pool that has begun its connections, a server its log
    if "notebook" not in request.node.name and kept() == shared:
        assert open_files() <= files, "a file descriptor is left"
