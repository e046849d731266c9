"""The bench of static plans: a row of each kind, within bounds, yielded as it is read."""

import pytest
from patience import processor_seconds

from benchmarks import static_plan, traces
from refimpl.common.allocations import Maker


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(static_plan, "SHAPE", static_plan.SHAPE | {"hidden": 64, "vocab_size": 300})
    monkeypatch.setitem(traces.PROGRAMS, "one", lambda: traces.train([(1, 64)]))


def test_a_run_has_rows_of_all(small):
    settings, rows = static_plan.run("cpu", seconds=2.0, programs=("one",), problems=("F", "I"),
                                     models=("our GPT, 4 layers",), rounds=2)
    rows = {row["what"]: row for row in rows}
    assert list(rows) == [
        *(f"{what}, our GPT, 4 layers" for what in ("greedy", "plan", "caching")), "plan of 7,000 tensors",
        "bytes outside of the arena", "step in its arena",
        *(f"MiniMalloc {name}, {how}" for name in "FI" for how in ("greedy", "search")),
        *(f"capacity, one, {how}" for how in ("one pool", "regions", "moves"))]
    assert settings["seconds a problem"] == 2
    for what in ("plan, our GPT, 4 layers", "bytes outside of the arena"):
        assert rows[what]["ratio"] <= rows[what]["bound"], what
    assert rows["caching, our GPT, 4 layers"]["ratio"] > 1.05
    assert processor_seconds(rows["plan of 7,000 tensors"]["value"]) < rows["plan of 7,000 tensors"]["bound"]
    assert rows["MiniMalloc F, search"]["ratio"] == 1 and rows["MiniMalloc F, greedy"]["ratio"] > 1.3
    assert rows["MiniMalloc I, search"]["value"] is None
    assert rows["MiniMalloc I, search"]["note"] == "not found in 2 s"


def test_regions_and_moves_run_where_one_pool_does_not(monkeypatch):
    maker, kept = Maker(), []
    for _ in range(24):
        inner = [maker.alloc(3 << 20) for _ in range(3)]
        kept.append(maker.alloc(1 << 20))
        for block in inner:
            maker.free(block)
    for _ in range(24):
        maker.free(maker.alloc(10 << 20))
    pool, regions, moves = static_plan.capacity_rows("program", maker.trace())
    assert pool["ratio"] > 1.2 > 1.01 > max(regions["ratio"], moves["ratio"]) and moves["moved_bytes"] > 0
