"""The bench of offload at a tiny size, and that it would show an update that is slow or overlaps nothing."""

import pytest
import torch

from benchmarks import offload
from benchmarks.offload import disk, fits
from benchmarks.offload.fits import Taken
from refimpl.model import GPTConfig
from refimpl.offload import CPUAdam
from refimpl.offload.closed_forms import cpu_adam_bytes, cpu_adam_traffic, host_store_traffic
from refimpl.zero.closed_forms import gathers
from refimpl.zero.units import default_units, unit_buckets

TINY = Taken(device=20 * 2**30, host=70 * 2**30, to_host=32 * 10**9, to_device=64 * 10**9)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(disk, "all_rows", lambda device: ())  # tests of its own
    monkeypatch.setattr(offload, "COPIED", 2**10)
    monkeypatch.setattr(offload, "TILE_SECONDS", 0.004)
    monkeypatch.setattr(offload, "COPY_SECONDS", 0.003)


def test_a_run_reads_rates_copies_overlap_and_what_fits(quick, monkeypatch):
    monkeypatch.setattr(fits, "taken", lambda name, way: TINY)
    settings, rows = offload.run("cpu", elements=2**12, rounds=2)
    rows = [row for row in rows if not row["what"].startswith("disk")]
    assert settings["elements"] == 2**12
    updates = [row for row in rows if row["what"].startswith("update, ")]
    assert [row["peer"] for row in updates] == 2 * ["fused", "fused", "fused and a cast", "copy_", "add_"]
    assert [row["held"] for row in updates if "held" in row] == [0.95, 0.7, 0.95, 0.95]
    assert all(row["value"] > 0 and row["paired"] > 0 for row in updates)
    assert [row["what"] for row in rows[10:12]] == ["copy to host, page-locked memory",
                                                    "copy to device, page-locked memory"]
    assert rows[12]["peer"] == "arithmetic" and rows[12]["ratio"] > 0.99
    fitting = rows[13:13 + 2 * len(fits.WAYS) * 4]
    assert {row["peer"]: row["too_large"] for row in fitting[:4]} == {
        "24 GB and 64 GB of host memory": "host", "24 GB and 512 GB of host memory": "",
        "80 GB and 64 GB of host memory": "host", "80 GB and 512 GB of host memory": ""}
    assert fitting[0]["link_seconds"] == 2.0  # 64 GB over 32 GB/s


class OneBuffer(CPUAdam):
    """The mutant: each tile's weights are there before the next is computed."""

    def __call__(self, *args, **options):
        update = super().__call__(*args, **options)
        send = update.link.send

        def sent(*args):
            copy = send(*args)
            copy.finish()
            return copy

        update.link.send = sent
        return update


def test_an_update_that_overlaps_nothing_is_seen(quick, monkeypatch):
    good = offload.overlap_row("cpu")["ratio"]
    monkeypatch.setattr(offload, "CPUAdam", OneBuffer)
    assert offload.overlap_row("cpu")["ratio"] > good + 0.3


@pytest.mark.alone
def test_a_kernel_that_computes_twice_is_seen(monkeypatch):
    def rate(kernel):
        monkeypatch.setattr(offload, "kernels", lambda: {"torch": kernel})
        return next(iter(offload.rate_rows(2**20, 5)))["paired"]

    class Twice(offload.TorchKernel):
        def update(self, *args):
            super().update(*args)
            super().update(*args)

    assert rate(Twice()) < 0.75 * rate(offload.TorchKernel())


def test_a_dry_run_of_7_billion_parameters_takes_what_the_closed_forms_say():
    """Stage 3: parameters in a HostStore, their update by CPUAdam; the whole step in fake memory."""
    found = fits.taken("llama2-7b", "CPUAdam, parameters in HostStore", 64)
    with torch.device("meta"):
        model = fits.GPT(GPTConfig.named("llama2-7b"), dtype=torch.bfloat16)
    buckets = unit_buckets(list(model.named_parameters()), default_units(model), 1, 0)
    shards = sum(bucket.shard_numel * 2 for bucket in buckets)
    assert found.host == cpu_adam_bytes(buckets, 3, sub_group_size=fits.SUB_GROUP_SIZE)["host"] + shards
    copied, gathered = cpu_adam_traffic(buckets, 3), gathers(model, buckets)
    parameters = host_store_traffic([], 3, gathers=gathered)["to device"] + shards
    assert found.to_host == copied["to host"] + shards
    assert found.to_device == copied["to device"] + parameters
    assert found.device < 0.05 * 16 * GPTConfig.named("llama2-7b").parameter_count()


# --- a disk and tiers ------------------------------------------------------------------------------------------------


def test_a_disk_beside_the_calls_alone(tmp_path):
    rows = list(disk.disk_rows(tmp_path, count=2, nbytes=2**18, buffer_bytes=2**16, rounds=2))
    assert [row["what"] for row in rows] == ["disk, write", "disk, write, memory anew", "disk, read",
                                             "disk, read, memory anew"]
    assert all(row["value"] > 0 and row["peer_value"] > 0 and row["paired"] > 0 for row in rows)
    assert [row.get("held") for row in rows] == [0.9, None] * 2 and {row["peer"] for row in rows} == {"the calls alone"}
    assert list(tmp_path.iterdir()) == []


def test_tiers_beside_beladys_rule_lru_and_the_simulator(tmp_path):
    *counted, stalled = disk.tier_rows(tmp_path, count=10, device=4, host=3, nbytes=2**16, real=(4, 2))
    assert [row["peer"] for row in counted] == ["Belady offline", "LRU"] * 2
    for belady, lru in zip(counted[::2], counted[1::2], strict=True):
        assert belady["ratio"] <= belady["held"] and lru["ratio"] < 0.9
    assert stalled["value"] > 0 and stalled["ratio"] == pytest.approx(1, rel=0.5)  # a short run, on a busy machine
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_a_published_model_says_what_each_tier_holds(monkeypatch):
    monkeypatch.setattr(fits, "taken", lambda name, way: Taken(23 * 2**30, 0, 0, 0))
    monkeypatch.setattr(fits, "HOSTS", (2**29, 2**40))
    rows = {row["peer"]: row for row in disk.planned_rows(["gpt2-xl"])}
    little, much = (rows[f"computation alone, 24 GB and {gigabytes} GB of host memory"] for gigabytes in ("0", "1024"))
    assert little["disk"] > 15 and much["disk"] == 0 == much["from_disk"]  # 16 bytes a parameter, and the device's
    assert little["value"] > much["value"] > much["peer_value"]
    assert rows["computation alone, 80 GB and 1024 GB of host memory"]["ratio"] == pytest.approx(1, rel=0.01)


def test_all_rows_are_those_of_the_disk_and_of_tiers(monkeypatch):
    for name in ("disk_rows", "tier_rows", "planned_rows"):
        monkeypatch.setattr(disk, name, lambda *_, name=name, **__: [name])
    assert list(disk.all_rows()) == ["disk_rows", "tier_rows", "planned_rows"]
    assert list(disk.all_rows("cuda")) == ["disk_rows"]
