"""The fixture and the marker `memory_budget` of pytest. Torch is imported when a test uses one.

    pytest_plugins = ["refimpl.pytest_plugin"]      # in the conftest.py at the root of your tests

It is no entry point: of a package that has one, pytest rewrites the asserts of all modules, which ranks cannot import.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

BUDGETS = pytest.StashKey["_Budgets"]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "memory_budget(limit, per='step'): at most so many bytes in a step or the test")


@pytest.fixture
def memory_budget(request: pytest.FixtureRequest) -> Iterator[Callable]:
    """Begin a budget: `memory_budget("70 GiB", per="step")`. It ends with the test, or as a context where that does."""
    budgets = request.node.stash[BUDGETS] = _Budgets()
    yield budgets.begin
    budgets.end(request.node)  # no test ran, if a later fixture failed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End here what a test began, so that too much is its failure and not its teardown's error."""
    __tracebackhide__ = True
    marker, budgets = item.get_closest_marker("memory_budget"), item.stash.setdefault(BUDGETS, _Budgets())
    try:
        if marker:
            budgets.begin(*marker.args, **marker.kwargs)
        result = yield
    finally:
        over = budgets.end(item)
    if over is not None:
        raise over
    return result


class _Budgets(ExitStack):
    """The budgets of a test, one after another. It may read the allocator's peaks behind them, until it ends."""
    begun = ()

    def begin(self, limit, per="step"):
        from .guard.budget import Budget, Peaks

        self.peaks = self.peaks if self.begun else self.enter_context(Peaks())
        self.begun = *self.begun, Budget(limit, per).begin(self.peaks)
        return self.begun[-1]

    def end(self, item):
        with self:
            overs, begun, self.begun = [budget.end() for budget in self.begun], self.begun, ()
        if begun:
            others = [each for each in item.user_properties if each[0] != "memory_peak"]  # of an earlier run
            item.user_properties[:] = [*others, ("memory_peak", max(budget.peak for budget in begun))]
        return next(filter(None, overs), None)
