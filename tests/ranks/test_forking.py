"""What the process that forks ranks has imported, and what it does when a rank, a launch or it itself ends."""

import importlib
import os
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from rank_pool import failure, gone

from refimpl.comm import launch
from refimpl.ranks import forkserver

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
    loaded = launch(lambda comm: [name in sys.modules for name in ("refimpl.zero", "refimpl.bench")], 2)
    assert loaded == [[True, False]] * 2


@WITHOUT_GPU
def test_what_imports_other_libraries_is_left_to_the_ranks(another_server, monkeypatch):
    """The server would fail at this module, which a caller can import only where transformers works."""
    monkeypatch.setitem(sys.modules, "refimpl.zero.hugging_face", types.ModuleType("there is no such file"))
    end_the_server()
    assert launch(lambda comm: comm.rank, 2) == [0, 1]


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
