"""What the process that forks ranks has imported, and what it does when a rank, a launch or it itself ends."""

import importlib
import os
import signal
import sys
import time
import types

import psutil
import pytest
import torch

from refimpl.comm import RankError, launch
from refimpl.ranks import forkserver


@pytest.mark.alone
def test_an_optimizer_in_a_rank_costs_no_import():
    def fn(comm):
        start = time.perf_counter()
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
        return time.perf_counter() - start

    assert min(launch(fn, 2)) < 0.1  # it is 1.4 s where torch._dynamo has to be imported first


@pytest.mark.skipif(torch.cuda.is_available(), reason="what an import does to a driver, a fork inherits")
def test_what_the_caller_has_imported_no_rank_imports_again(another_server):
    importlib.import_module("refimpl.zero")
    if forkserver._current is not None:
        forkserver._current.close()
        forkserver._current = None

    def fn(comm):
        return "refimpl.zero" in sys.modules, "refimpl.bench" in sys.modules

    assert launch(fn, 2) == [(True, False)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="what an import does to a driver, a fork inherits")
def test_what_imports_other_libraries_is_left_to_the_ranks(another_server, monkeypatch):
    """The server would fail at this module, which a caller can import only where transformers works."""
    monkeypatch.setitem(sys.modules, "refimpl.zero.hugging_face", types.ModuleType("there is no such file"))
    if forkserver._current is not None:
        forkserver._current.close()
        forkserver._current = None
    assert launch(lambda comm: comm.rank, 2) == [0, 1]


def ended(pid, seconds=60):
    """Whether a process ends in time. Whoever adopts it may not ask how it ended: until then it is a zombie."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_what_a_rank_started_ends_with_it(tmp_path):
    """Also when the rank is killed. Workers of a data loader, say."""
    def fn(comm, killed):
        import subprocess

        pid = subprocess.Popen(["sleep", "100"]).pid
        (tmp_path / f"{killed} {comm.rank}").write_text(str(pid))
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return pid

    assert all(ended(pid) for pid in launch(fn, 2, False))
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        launch(fn, 1, True)
    assert ended(int((tmp_path / "True 0").read_text()))
