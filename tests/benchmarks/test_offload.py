"""The bench of offload at a tiny size, and that it would show an update that is slow or overlaps nothing."""

import pytest
import torch

from benchmarks import offload, offload_disk, offload_fits
from benchmarks.offload_fits import Taken
from refimpl.model import GPTConfig
from refimpl.offload import CPUAdam
from refimpl.offload.closed_forms import cpu_adam_bytes, cpu_adam_traffic, host_store_traffic
from refimpl.zero.closed_forms import gathers
from refimpl.zero.units import default_units, unit_buckets

TINY = Taken(device=20 * 2**30, host=70 * 2**30, to_host=32 * 10**9, to_device=64 * 10**9)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(offload_disk, "all_rows", lambda device: ())  # tests of its own
    monkeypatch.setattr(offload, "COPIED", 2**10)
    monkeypatch.setattr(offload, "TILE_SECONDS", 0.004)
    monkeypatch.setattr(offload, "COPY_SECONDS", 0.003)


def test_a_run_reads_rates_copies_overlap_and_what_fits(quick, monkeypatch):
    monkeypatch.setattr(offload_fits, "taken", lambda name, way: TINY)
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
    fits = rows[13:13 + 2 * len(offload_fits.WAYS) * 4]
    assert {row["peer"]: row["too_large"] for row in fits[:4]} == {
        "24 GB and 64 GB of host memory": "host", "24 GB and 512 GB of host memory": "",
        "80 GB and 64 GB of host memory": "host", "80 GB and 512 GB of host memory": ""}
    assert fits[0]["link_seconds"] == 2.0  # 64 GB over 32 GB/s


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
    found = offload_fits.taken("llama2-7b", "CPUAdam, parameters in HostStore", 64)
    with torch.device("meta"):
        model = offload_fits.GPT(GPTConfig.named("llama2-7b"), dtype=torch.bfloat16)
    buckets = unit_buckets(list(model.named_parameters()), default_units(model), 1, 0)
    shards = sum(bucket.shard_numel * 2 for bucket in buckets)
    assert found.host == cpu_adam_bytes(buckets, 3, sub_group_size=offload_fits.SUB_GROUP_SIZE)["host"] + shards
    copied, gathered = cpu_adam_traffic(buckets, 3), gathers(model, buckets)
    parameters = host_store_traffic([], 3, gathers=gathered)["to device"] + shards
    assert found.to_host == copied["to host"] + shards
    assert found.to_device == copied["to device"] + parameters
    assert found.device < 0.05 * 16 * GPTConfig.named("llama2-7b").parameter_count()
