"""What the process that forks ranks has imported, and what it does when a rank, a launch or it itself ends."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from patience import in_time, patiently, within
from rank_pool import failure, gone

from refimpl.comm import launch
from refimpl.ranks import World, forking, forkserver, run

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what an import does to a driver, a fork inherits")


@pytest.mark.alone
def test_an_optimizer_in_a_rank_costs_no_import():
    def fn(comm):
        start = time.perf_counter()
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
        return time.perf_counter() - start

    assert min(launch(fn, 2)) < 0.1  # it is 1.4 s where torch._dynamo has to be imported first


def end_the_server():
    """The next launch starts another."""
    if forkserver._current is not None:
        forkserver._current.close()
        forkserver._current = None


@WITHOUT_GPU
def test_what_the_caller_has_imported_no_rank_imports_again(another_server):
    importlib.import_module("refimpl.zero")
    end_the_server()
    loaded = launch(lambda comm: [name in sys.modules for name in ("refimpl.zero", "benchmarks")], 2)
    assert loaded == [[True, False]] * 2


@WITHOUT_GPU
def test_other_libraries_are_left_to_the_ranks(another_server):
    """The server would fail where transformers works only after what the caller has done before."""
    names = ("refimpl.known_models.attention_layers", "refimpl.guard.trainer_callback", "transformers")
    for name in names[:2]:
        importlib.import_module(name)
    end_the_server()
    loaded = launch(lambda comm: [name in sys.modules for name in names], 2)
    assert loaded == [[True, False, False]] * 2


def test_what_a_rank_started_ends_with_it(tmp_path):
    """Also when the rank is killed. Workers of a data loader, say."""
    def fn(comm, killed):
        pid = subprocess.Popen(["sleep", "100"]).pid
        (tmp_path / f"{killed} {comm.rank}").write_text(str(pid))
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return pid

    assert gone(launch(fn, 2, False))
    failure("was killed by SIGKILL", fn, 1, True)
    assert gone([int((tmp_path / "True 0").read_text())])


def test_a_rank_ends_with_the_process_that_has_forked_it():
    """Also where the caller has ended before, and kills nobody any more."""
    def fn(rank):
        forked, says = os.pipe()
        forking.run = lambda rank: (os.write(says, b"%d %d" % (rank, os.getpid())), time.sleep(100))
        server = os.fork()
        if not server:
            channel, far = socket.socketpair()
            far.send(forking.REQUEST.pack(3))
            forking.Server(socket.socket(), os.getppid())._request(channel)
            time.sleep(100)
            os._exit(0)
        number, pid = map(int, os.read(forked, 100).split())
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        return number, pid

    (number, pid), = run(fn, World(1))
    try:
        assert number == 3 and gone([pid], 5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@patiently
def test_ranks_of_an_owner_that_has_ended_live_for_a_second_more():
    def fn(rank):
        start, (requests, _owner) = time.monotonic(), socket.socketpair()
        forking.Server(requests, -1).run()  # -1: nobody's
        return time.monotonic() - start

    within(*run(fn, World(1)), 1.9)


def caller(rank, folder, number, forks):
    """Launch two ranks from this one, with a server of its own, which this rank's server does not know. They write who
    they are, and end this process."""
    forkserver.PRELOADED, forkserver._current, forkserver._imported_by_caller = ("torch",), None, set
    pid = os.getpid()

    def fork():
        """Start a process that has all that this one has open, and stays."""
        while not (folder / "0").exists():
            time.sleep(0.01)
        child = os.fork()
        if not child:
            os.setsid()
            time.sleep(100)
            os._exit(0)
        (folder / "forked").write_text(f"{child}")

    def fn(rank):
        (folder / f"{rank}").write_text(f"{os.getpid()} {os.getppid()} {subprocess.Popen(['sleep', '100']).pid}")
        while rank == 1 and not all((folder / name).exists() for name in ("0", "forked")[:1 + forks]):
            time.sleep(0.01)
        time.sleep(0.1)  # what was begun is written
        os.kill(pid, number) if rank == 1 else None
        time.sleep(100)

    threading.Thread(target=fork, daemon=True).start() if forks else None
    run(fn, World(2))


@pytest.mark.parametrize(("number", "forks"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
@patiently
def test_a_caller_that_is_killed_leaves_no_process_also_where_another_has_its_files_open(number, forks, tmp_path):
    with pytest.raises(RuntimeError, match=f"rank 0 was killed by {number.name}"):
        run(caller, World(1), (tmp_path, number, forks))
    pids = {path.name: [int(pid) for pid in path.read_text().split()] for path in tmp_path.iterdir()}
    try:
        with in_time(5):
            assert gone(pids["0"] + pids["1"], 20) and len(set(pids["0"] + pids["1"])) == 5
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
        for pid in pids.get("forked", []):
            os.kill(pid, signal.SIGKILL)
