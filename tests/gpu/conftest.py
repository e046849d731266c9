"""The tests in this folder need a GPU and skip themselves where there is none."""

import gc

import pytest
import torch


def pytest_runtest_logreport(report):
    """Tell a failure when it happens: a run on a GPU may be cut before pytest's own summary."""
    if report.failed:
        print(f"\n{report.nodeid} failed:\n{report.longreprtext}\n", flush=True)


@pytest.fixture(autouse=True, scope="session")
def cuda():
    """The current CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA GPU: torch {torch.__version__} sees none")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def clean(cuda):
    """A test begins with what a fresh process has: no garbage, no cached segments, no cuBLAS workspaces."""
    from benchmarks.meter import release_workspaces

    gc.collect()
    release_workspaces()
    torch.cuda.empty_cache()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seconds():
    """A function: how long the device takes for what a function asks of it."""
    def read(function):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        made = function()
        end.record()
        torch.cuda.synchronize()
        del made  # to free it is no part of the reading
        return begin.elapsed_time(end) / 1000

    return read
