"""What the process that forks ranks has imported, and what it does when a rank, a launch or it itself ends."""

import time

import psutil
import pytest
import torch

from refimpl.comm import forkserver, launch


@pytest.mark.alone
def test_an_optimizer_in_a_rank_costs_no_import():
    def fn(comm):
        start = time.perf_counter()
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
        return time.perf_counter() - start

    assert min(launch(fn, 2)) < 0.1  # it is 1.4 s where torch._dynamo has to be imported first


@pytest.mark.parametrize("session", [False, True])
def test_what_a_rank_started_ends_with_it(session):
    def fn(comm):
        import subprocess

        return subprocess.Popen(["sleep", "100"], start_new_session=session).pid

    assert not any(psutil.pid_exists(pid) for pid in launch(fn, 2))


def test_a_server_that_ends_by_an_error_is_quoted():
    launch(lambda comm: None, 1)
    channel = forkserver.open_channel()
    with channel:
        channel.send(b"?")  # no request is as short
        deadline = time.monotonic() + 5
        while forkserver._current._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert forkserver._current._process.poll() == 1
    assert "struct.error" in forkserver.last_words()
