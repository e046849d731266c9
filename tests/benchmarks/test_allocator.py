"""The bench of the allocator: a block within six times torch.empty, its cost as log n; what programs leave unused."""

import pytest

from benchmarks import allocator, traces
from refimpl.allocator import replay
from refimpl.allocator.free_list import PlannedPool

SMALL = "ZeRO-3, gathers and releases"


@pytest.fixture(scope="module")
def trace():
    return traces.trace_of(SMALL)


@pytest.mark.alone
@pytest.mark.parametrize("policy", allocator.POLICIES)
def test_a_block_costs_at_most_six_times_torch_empty_and_grows_as_log_n(policy):
    def paired(count):
        return allocator.block_row(count, policy, 7)["paired"]

    few = min(paired(100) for _ in range(3))  # noise only adds
    assert any(paired(10_000) <= allocator.BLOCK_BOUND for _ in range(3))
    assert any(paired(50_000) <= 2.4 * few for _ in range(3)), "log 50,000 is 2.35 times log 100"


def test_a_run_has_rows_of_all(monkeypatch, run):
    monkeypatch.setitem(traces.PROGRAMS, "one", lambda: traces.train([(1, 64)]))
    settings, rows = run(allocator, live=(100,), programs=("one",), events=1000, rounds=2)
    names = list(allocator.allocators())
    assert settings["events"] == 1000
    assert [row["what"] for row in rows] == [
        "block, 100 live, first_fit", "block, 100 live, best_fit", "replay of 1,000 events",
        *(f"reserved, one, {name}" for name in names), *(f"capacity, one, {name}" for name in names)]
    assert all(row["ratio"] >= 1 for row in rows if row["what"].startswith(("reserved", "capacity")))


def test_the_least_capacity_is_the_least(trace):
    for name, make in allocator.allocators().items():
        least = allocator.least_capacity(trace, make)
        assert replay(trace, make(least)).failure is None, name
        below = replay(trace, make(int(least * 0.99))) if least * 0.99 > trace.peak else None
        assert below is None or below.failure is not None, name


def test_settings_differ_on_the_programs(trace):
    """A table in which all columns are equal would say nothing."""
    peaks = {name: replay(trace, make(allocator.PLENTY)).peak for name, make in allocator.allocators().items()}
    assert len(set(peaks.values())) > 4 and min(peaks.values()) >= trace.peak
    varying = traces.trace_of("sequences of varying length")
    default, expandable = (replay(varying, allocator.allocators()[name](allocator.PLENTY)).peak
                           for name in ("PyTorch's default", "expandable_segments:True"))
    assert expandable < 0.8 * default
    assert replay(trace, PlannedPool(allocator.PLENTY)).internal.max() < 0.01 * trace.peak


def test_programs_ask_for_what_they_say():
    varying = traces.trace_of("sequences of varying length")
    sizes = {int(varying.blocks["nbytes"][i]) for i in range(len(varying.blocks))
             if varying.category_of(i) == "activations"}
    assert len(sizes) > 20
    grows = traces.trace_of("generation, caches that grow")
    cats = [int(grows.blocks["nbytes"][i]) for i in range(len(grows.blocks)) if "cat" in grows.name_of(i)]
    assert len(cats) > 5000 and len(set(cats)) > 500
