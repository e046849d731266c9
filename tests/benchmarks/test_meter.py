"""The meter's bench at a tiny size, and that it would show a tracker that is wrong."""

import contextlib

import psutil
import pytest
import torch

from benchmarks import meter
from refimpl import memory
from refimpl.memory import Tracker


def readings(rows, beginning):
    return [row for row in rows if row["what"].startswith(beginning)]


def test_a_run_reads_bytes_times_and_a_dry_run(run):
    settings, rows = run(meter, size=meter.SMALL, models=("gpt2",), rounds=3, programs=["llama", "convnext"])
    assert settings["step"]["hidden"] == 32 and settings["rounds"] == 3
    peaks, nets = readings(rows, "tracker's peak"), readings(rows, "tracker's net")
    assert len(peaks) == 6 and len(nets) == 4
    llama, convnext = peaks[4:]
    assert llama["value"] == llama["peer_value"] and llama["net"] == 0 and llama["notes"] == []
    assert convnext["value"] <= convnext["peer_value"]  # some processors' kernels take no workspace here
    assert "convolution_backward" in convnext["notes"][0]
    assert min(llama["slowdown"], convnext["slowdown"]) > 1
    for row in peaks[:4]:
        assert row["value"] > 10**5 and row["items"]["kernel workspace"] >= 0 and abs(row["items"]["unknown"]) <= 64
        assert row["value"] + sum(row["items"].values()) == row["peer_value"]
        assert row["at"].endswith(("forward", "backward", "step"))
    for row in nets:
        assert row["value"] == row["peer_value"] and row["items"] == {"unknown": 0}
    times = readings(rows, "tracked step")
    assert len(times) == 7
    for row in times:
        assert row["unit"] == "s" and row["ratio"] == row["value"] / row["peer_value"] > 1
        assert row["spread"] >= 0 and row["peer_spread"] >= 0
    seconds, resident = readings(rows, "dry run of gpt2")
    assert 0 < seconds["first_use"] < seconds["value"] < 60
    assert seconds["parameters"] == 124_439_808 and seconds["peak_bytes"] > 8 * 124_439_808
    assert 0 < resident["growth"] < resident["value"] < 2 * 10**9


def test_a_tracker_that_never_frees_is_seen(monkeypatch):
    class NeverFrees(Tracker):
        def _freed(self, reference):
            self._alive.pop(reference.key, None)

    monkeypatch.setattr(meter.memory, "track", NeverFrees)
    peak, net = meter.byte_rows(meter.SMALL, "fp32", 0.0, "cpu")
    assert peak["ratio"] > 1.1 and peak["items"]["unknown"] < 0
    assert net["value"] > 0 and net["items"]["unknown"] == -net["value"]


def test_on_cuda_each_row_names_what_its_peer_counts_more(monkeypatch):
    """The arithmetic of the rows, on an allocator whose numbers are made up; tests/gpu has the real one."""
    step, workspace = meter.TrainingStep(meter.SMALL), 2**23
    step()
    with memory.track(step.model, step.optimizer, step.tokens) as t:
        step()
    start = {"requested_bytes.all.current": t.start.total + 7 + workspace}  # the workspaces are there before the step
    requested = t.peak.total - t.start.total + 100
    reading = memory.Reading("cuda:0", requested, 0, t.start.total + 7 + workspace + requested, 2**20 + 2**24,
                             2**21 + 2**25, driver=2**30)
    monkeypatch.setattr(meter.memory, "measure", lambda device: contextlib.nullcontext(reading))
    monkeypatch.setattr(meter, "release_workspaces", lambda: workspace)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: start)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**26)
    net, asked, blocks, segments, driver = meter.cuda_byte_rows(step, "fp32", "cuda")
    named = {"cuBLAS workspaces": workspace, "older and unknown to the tracker": 7, "inside kernels": 100}
    assert net["items"] == {"unknown": 0}
    assert asked["items"] == named and asked["value"] == blocks["value"] == segments["value"] == t.peak.total
    rounded = {**named, "rounding to 512 B": meter.rounding(t)}
    unsplit = 2**20 + 2**24 - t.peak.total - sum(rounded.values())
    assert blocks["items"] == {**rounded, "ends of blocks too small to split off": unsplit}
    assert segments["items"] == {**blocks["items"], "free in segments": 2**21 + 2**25 - 2**20 - 2**24}
    assert driver["items"] == {"CUDA context, kernels, other processes": 2**30 - 2**26}


def test_rounding_is_of_what_is_alive_at_the_peak():
    older = torch.empty(100, dtype=torch.uint8)
    with memory.track(older) as t:
        gone = torch.empty(300, dtype=torch.uint8)
        del gone
        held = [torch.empty(n, dtype=torch.uint8) for n in (512, 513, 1, 0)]
        peak = t.peak.total
        held.pop(1)
    assert (peak, t.peak.total) == (100 + 1026, 100 + 1026)
    assert meter.rounding(t) == 412 + 0 + 511 + 511
    assert meter.rounding(t, block=1) == 0


def test_peak_resident_memory_is_this_process_s():
    now = psutil.Process().memory_info().rss
    assert 0.9 * now < meter.peak_resident() < psutil.virtual_memory().total


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_are_no_workspaces_to_release():
    assert meter.release_workspaces() == 0
