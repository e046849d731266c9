"""What holds for every test and notebook."""

import contextlib

import pytest


def pytest_collectstart(collector):
    """Notebooks: progress bars and warnings go to stderr and differ from run to run, so it is not compared."""
    if getattr(collector, "path", None) and collector.path.suffix == ".ipynb":
        collector.skip_compare += ("stderr",)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Where several workers run tests (`pytest -n 2`), one under pytest.mark.alone runs while no other does."""
    among_others = hasattr(item.config, "workerinput")
    with turn(item.config.rootpath, item.get_closest_marker("alone")) if among_others else contextlib.nullcontext():
        return (yield)


@contextlib.contextmanager
def turn(root, alone):
    """In the room is any number of tests, or one alone. Who waits for an empty room holds the door, so that nobody
    else goes in before. Two files that are there stand for both: a lock is on a file, whatever is in it."""
    import fcntl

    with open(root / "Makefile") as door, open(root / "pyproject.toml") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
