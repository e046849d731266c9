"""The bench of a disk and of tiers, at small sizes."""

import pytest

from benchmarks import offload_disk
from benchmarks.offload_disk import all_rows, disk_rows, planned_rows, tier_rows
from benchmarks.offload_fits import Taken


def test_a_disk_beside_the_calls_alone(tmp_path):
    rows = list(disk_rows(tmp_path, count=2, nbytes=2**18, buffer_bytes=2**16, rounds=2))
    assert [row["what"] for row in rows] == ["disk, write", "disk, write, memory anew", "disk, read",
                                             "disk, read, memory anew"]
    assert all(row["value"] > 0 and row["peer_value"] > 0 and row["paired"] > 0 for row in rows)
    assert [row.get("held") for row in rows] == [0.9, None] * 2 and {row["peer"] for row in rows} == {"the calls alone"}
    assert list(tmp_path.iterdir()) == []


def test_tiers_beside_beladys_rule_lru_and_the_simulator(tmp_path):
    *counted, stalled = tier_rows(tmp_path, count=10, device=4, host=3, nbytes=2**16, real=(4, 2))
    assert [row["peer"] for row in counted] == ["Belady offline", "LRU"] * 2
    for belady, lru in zip(counted[::2], counted[1::2], strict=True):
        assert belady["ratio"] <= belady["held"] and lru["ratio"] < 0.9
    assert stalled["value"] > 0 and stalled["ratio"] == pytest.approx(1, rel=0.5)  # a short run, on a busy machine
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_a_published_model_says_what_each_tier_holds(monkeypatch):
    monkeypatch.setattr(offload_disk.fitting, "taken", lambda name, way: Taken(23 * 2**30, 0, 0, 0))
    monkeypatch.setattr(offload_disk.fitting, "HOSTS", (2**29, 2**40))
    rows = {row["peer"]: row for row in planned_rows(["gpt2-xl"])}
    little, much = (rows[f"computation alone, 24 GB and {gigabytes} GB of host memory"] for gigabytes in ("0", "1024"))
    assert little["disk"] > 15 and much["disk"] == 0 == much["from_disk"]  # 16 bytes a parameter, and the device's
    assert little["value"] > much["value"] > much["peer_value"]
    assert rows["computation alone, 80 GB and 1024 GB of host memory"]["ratio"] == pytest.approx(1, rel=0.01)


def test_all_rows_are_those_of_the_disk_and_of_tiers(monkeypatch):
    for name in ("disk_rows", "tier_rows", "planned_rows"):
        monkeypatch.setattr(offload_disk, name, lambda *_, name=name, **__: [name])
    assert list(all_rows()) == ["disk_rows", "tier_rows", "planned_rows"] and list(all_rows("cuda")) == ["disk_rows"]
