"""What holds for every test and notebook."""

import contextlib
import copy
import functools
import itertools
import json
import time
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent
COSTS = ROOT / "tests" / "costs.json"  # what each test function took when all ran: written by tools/times.py


def pytest_addoption(parser):
    parser.addoption("--executed", type=Path, metavar="DIR",
                     help="write each notebook that nbval runs to DIR, with the outputs of this run")
    parser.addoption("--tier", choices=("push", "all", "matrix"),
                     help="push, all: a draw of the tests and pages that takes minutes, an hour (tests/kits/tiers.py)")
    parser.addoption("--times", type=Path, metavar="FILE", help="write what each test function and page took to FILE")


def pytest_configure(config):
    """Note what each function and page takes, in the process that sees all reports."""
    if config.getoption("--times") and not among_others(config):
        config.pluginmanager.register(Times(config))


class Times:
    """Adds up what is reported, and writes it as JSON: the tier, the exit status, wall-clock seconds, workers,
    {function: [seconds, cases]}."""

    def __init__(self, config):
        self.config, self.start, self.functions = config, time.time(), defaultdict(lambda: [0.0, 0])

    def pytest_runtest_logreport(self, report):
        page, _, _ = report.nodeid.partition("::")
        name = page if page.endswith(".ipynb") else report.nodeid.partition("[")[0]
        self.functions[name][0] += report.duration
        self.functions[name][1] += report.when == "call"

    def pytest_sessionfinish(self, exitstatus):
        path = self.config.getoption("--times")
        path.parent.mkdir(parents=True, exist_ok=True)
        functions = {name: [round(seconds, 3), cases] for name, (seconds, cases) in sorted(self.functions.items())}
        found = {"tier": self.config.getoption("--tier"), "status": int(exitstatus),
                 "seconds": round(time.time() - self.start, 1),
                 "workers": self.config.getoption("numprocesses", None) or 1, "functions": functions}
        path.write_text(json.dumps(found, indent=0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Start a page's kernel in the environment of a reader without a GPU: tests beside it have switched on Triton's
    interpreter, in which a page would take minutes. A page that wants it asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        if item.path.suffix == ".ipynb" and not torch.cuda.is_available():
            patch.delenv("TRITON_INTERPRET", raising=False)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Notebooks: nbval's run is the execution, written after each cell, so that a page that is cut has what it had."""
    folder = item.config.getoption("--executed")
    if folder and call.when == "call" and getattr(item, "test_outputs", None) is not None:
        write_executed(item, folder)
    return (yield)


def write_executed(item, folder):
    """The notebook of this cell with the outputs that there are by now, and none where there are none yet."""
    import nbformat

    page = item.parent
    if not hasattr(page, "executed"):
        page.executed = copy.deepcopy(page.nb)
        for cell in page.executed.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        folder.mkdir(parents=True, exist_ok=True)
    cell = [cell for cell in page.executed.cells if cell.cell_type == "code"][item.cell_num]
    cell.outputs, cell.execution_count = copy.deepcopy(item.test_outputs), item.cell_num + 1
    for output in cell.outputs:
        if output.output_type == "execute_result":
            output.execution_count = cell.execution_count  # nbval has 0
    being_written = folder / f"{page.path.name}.written"
    nbformat.write(page.executed, being_written)
    being_written.replace(folder / page.path.name)


def pytest_collectstart(collector):
    """Notebooks: progress bars and warnings go to stderr and differ from run to run, so it is not compared."""
    if getattr(collector, "path", None) and collector.path.suffix == ".ipynb":
        collector.skip_compare += ("stderr",)


@pytest.hookimpl(trylast=True)  # marked by then: tests/conftest.py knows the parts
def pytest_collection_modifyitems(config, items):
    """Keep those of the tier. Read what is held against the clock again if it misses: a neighbour's load doubles it.
    Slow code misses again.

    Several workers run it first: among others, it and they would wait for each other's end one by one.
    """
    if config.getoption("--tier") in ("push", "all"):
        keep_those_drawn(config, items)
    if among_others(config):
        items.sort(key=lambda item: item.get_closest_marker("alone") is None)
    if config.pluginmanager.hasplugin("rerunfailures") and not config.option.usepdb:
        for item in items:
            if alone := item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.flaky(reruns=2, **alone.kwargs))


def keep_those_drawn(config, items):
    """Deselect what is not drawn. Each worker draws the same."""
    import tiers

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["refimpl"][config.getoption("--tier")]
    in_worker = getattr(config, "workerinput", {})
    workers = in_worker.get("workercount") or config.getoption("numprocesses", None) or 1
    kept = tiers.drawn(items, json.loads(COSTS.read_text()), settings, tiers.commits(ROOT), workers)
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config, log):
    """Give workers a file at a time, as `--dist loadfile` does, but its tests under `alone` apart from its others."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class InRuns(LoadFileScheduling):
        @functools.cached_property
        def runs(self):
            """{test: (number, file)} of runs of tests that follow each other in one file."""
            runs = itertools.groupby(self.collection, super()._split_scope)
            return {test: (number, file) for number, (file, tests) in enumerate(runs) for test in tests}

        def _split_scope(self, nodeid):
            return self.runs[nodeid]

    return InRuns(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Where several workers run tests (`pytest -n 2`), one under pytest.mark.alone runs while no other does."""
    alone = item.get_closest_marker("alone")
    with turn(item.config.rootpath, alone) if among_others(item.config) else contextlib.nullcontext():
        return (yield)


def among_others(config):
    """Tell whether this process is one of several workers."""
    return hasattr(config, "workerinput")


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
