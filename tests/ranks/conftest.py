"""Nothing is left of any test's ranks; and a fork server that a test may break."""

import nothing_left
import pytest
from nothing_left import nothing_is_left, own_temporary_folder, processes_left, warm

from refimpl.ranks import forkserver

__all__ = ["another_server", "nothing_is_left", "own_temporary_folder", "processes_left", "spare", "warm"]


@pytest.fixture(scope="session")
def spare():
    """The last server that a test has left of those of its own, for the next test."""
    kept = [None]
    yield kept
    if kept[0] is not None:
        kept[0].close()


@pytest.fixture
def another_server(warm, spare, monkeypatch):
    """A fork server that this test may break. It starts in half the time, and leaves malloc as the system has it."""
    nothing_left.servers[:] = [forkserver._current]
    monkeypatch.setattr(forkserver, "PRELOADED", ("torch",))
    monkeypatch.setattr(forkserver, "KEEP_FREED", {"MALLOC_MMAP_THRESHOLD_": "131072"})
    monkeypatch.setattr(forkserver, "_current", spare[0])
    yield
    spare[0] = forkserver._current
    nothing_left.servers.append(spare[0])
