"""The bench of attention at tiny sizes: bytes, slopes and seconds; and what it does on a GPU, rehearsed on the CPU."""

import itertools
import json
import sys
import time
import types

import pytest
import torch

from benchmarks import __main__, attention, trials
from benchmarks.attention import kernels, speed
from benchmarks.attention.kernels import BACKENDS, DETERMINISTIC, FORWARDS, OURS, PEERS, Problem, Shape
from benchmarks.attention.speed import AIMS, TARGETS
from refimpl.attention import reference_attention, triton_forward
from refimpl.attention.figure import plot_roofline

rehearsed = pytest.mark.skipif(type(triton_forward.forward_kernel).__name__ != "InterpretedFunction",
                               reason="needs Triton's interpreter")
SHAPE = Shape(tokens=128, width=128, head_dim=64, length=64, causal=True)


# --- on the CPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran():
    settings, rows = attention.run("cpu", lengths=(64, 256, 512), rounds=2)
    return settings, list(rows)


def test_peaks_are_those_of_the_closed_forms_and_tell_slopes_of_one_and_two(ran):
    settings, rows = ran
    assert settings["lengths"] == [64, 256, 512] and settings["dtype"] == "float32"
    peaks = {(row["name"], row["length"]): row for row in rows if row["what"].startswith("peak")}
    assert len(peaks) == 5 * 3
    for name in attention.STAGES[:3]:
        assert peaks[name, 512]["ratio"] == pytest.approx(1, abs=0.01)
    slopes = {row["name"]: row for row in rows if row["what"].startswith("slope")}
    for name in attention.STAGES[:3]:
        assert slopes[name]["value"] == pytest.approx(slopes[name]["peer_value"], abs=0.01)
    squares, lines = ("reference_attention", attention.DENSE), ("tiled_attention", attention.FUSED)
    assert min(slopes[name]["value"] for name in squares) > 1.8 > 1.1 > max(slopes[name]["value"] for name in lines)


def test_seconds_of_each_stage_beside_the_dense_and_the_fused(ran):
    times = [row for row in ran[1] if row["what"].startswith("step")]
    assert {(row["name"], row["peer"], row["length"]) for row in times} == set(itertools.product(
        attention.STAGES[:3], (attention.DENSE, attention.FUSED), (64, 256, 512)))
    assert all(row["value"] > 0 and row["unit"] == "s" for row in times)
    assert __main__.table(ran[1]).count("\n") == len(ran[1])


def test_a_stage_that_saves_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(attention.attention, "tiled_attention", attention.attention.reference_attention)
    rows = list(attention.all_byte_rows((256, 512), torch.float32, "cpu"))
    assert next(row for row in rows if row["name"] == "tiled_attention")["ratio"] > 1.5
    slopes = {row["name"]: row["value"] for row in rows if row["what"].startswith("slope")}
    assert slopes["tiled_attention"] > 1.8


def test_a_backend_that_is_not_there_has_a_row(monkeypatch):
    monkeypatch.setattr(attention, "candidates", lambda *_: {"none": lambda *x, causal: kernels.pinned(
        "CUDNN_ATTENTION", *x, causal=causal)})
    (row,) = attention.byte_rows(64, torch.float32, "cpu")
    assert row["value"] is None and row["note"].startswith("RuntimeError: ")
    (slope,) = attention.slope_rows([row, row | {"length": 128}], (64, 128))
    assert slope["value"] is None


# --- variants --------------------------------------------------------------------------------------------------------


def test_a_row_of_bytes_and_one_of_seconds_for_each():
    rows = list(attention.variant_rows("cpu", torch.float32, rounds=2, length=256))
    names = ["softcap", "ALiBi", "documents", "prefix LM", "sinks", "v of 128, q and k of 192"]
    assert [row["variant"] for row in rows] == [name for name in names for _ in range(2)]
    for peak, step in zip(rows[::2], rows[1::2], strict=True):
        assert peak["unit"] == "bytes" and 0.99 < peak["ratio"] < 1.25, peak  # a few tiles of 128 × 128, of 8 heads
        assert step["unit"] == "s" and step["value"] > 0 < step["peer_value"] and step["rounds"] == 2


def test_one_that_keeps_a_matrix_is_seen(monkeypatch):
    monkeypatch.setattr(attention.attention, "tiled_attention", reference_attention)
    rows = attention.variant_rows("cpu", torch.float32, rounds=2, length=512)
    assert min(row["ratio"] for row in rows if row["unit"] == "bytes") > 1.5


# --- on a GPU, rehearsed ---------------------------------------------------------------------------------------------


def speeds(**more):
    """The rows of one tiny shape, in fp16."""
    return list(speed.speed_rows("cpu", [SHAPE], 2, dtype=torch.float16, **more))


def fine(q, k, v, *, scale, causal, window):
    return triton_forward.forward(q, k, v, Problem.of(q, k, scale, causal, None, 0.0, None, None, None, 0, 0))


def has_module(monkeypatch, name, forward):
    """Let Hopper's forwards have this one, too; without a function it suits nothing."""
    module = types.SimpleNamespace(suits=lambda *_: forward is not None, forward=forward)
    monkeypatch.setitem(sys.modules, f"refimpl.attention.{name}", module)


@rehearsed
def test_a_row_for_each_of_ours_beside_each_backend():
    rows = speeds()
    assert {(row["direction"], row["name"], row["peer"]) for row in rows} == {
        *itertools.product(["forward"], ["triton_forward", *FORWARDS], BACKENDS),
        *itertools.product(["backward"], ["triton_backward"], [DETERMINISTIC, *BACKENDS])}
    fused = next(row for row in rows if row["peer"] == "FLASH_ATTENTION" and row["name"] == "triton_forward")
    pairs = 2 * 2 * 64 * 65 // 2
    assert fused["flops"] == 4 * 64 * pairs and fused["value"] == pytest.approx(
        fused["flops"] / fused["seconds"] / 1e12)
    assert fused["floor_bytes"] == 4 * 2 * 2 * 2 * 64 * 64 + 4 * 2 * 2 * 64
    assert fused["intensity"] == fused["flops"] / fused["floor_bytes"]
    assert (fused["kind"], fused["factor"], fused["verdict"]) == ("target", 1.1, "short")
    assert fused["ratio"] == fused["value"] / fused["peer_value"] < 1.1 and "target 1.1: short" in fused["note"]
    absent = next(row for row in rows if row["peer"] == "CUDNN_ATTENTION" and row["direction"] == "backward")
    assert absent["value"] > 0 and absent["peer_value"] is absent["ratio"] is None
    assert absent["verdict"] == "not measured" and absent["note"].startswith("CUDNN_ATTENTION: RuntimeError: ")
    assert __main__.table(rows).count("\n") == len(rows)


@rehearsed
def test_a_kernel_that_is_wrong_raises_or_is_not_there_is_named_and_not_timed(monkeypatch):
    def wrong(*given, **how):
        out, lse2 = fine(*given, **how)
        return out.index_fill(2, torch.tensor([5]), 0), lse2

    def raising(*_, **__):
        raise ValueError("out of registers\nand more")

    functions = {"wrong": wrong, "raises": raising, "fine": fine, "elsewhere": None}
    for name, function in functions.items():
        has_module(monkeypatch, name, function)
    names = (*functions, "broken")
    monkeypatch.setattr(kernels, "FORWARDS", {name: (name, {}) for name in names})
    monkeypatch.setattr(speed, "OURS", ("triton_forward", *names))
    rows = {row["name"]: row for row in speeds() if row["direction"] == "forward" and row["peer"] == BACKENDS[0]}
    assert rows["fine"]["value"] > 0 and rows["triton_forward"]["value"] > 0
    for name, words in {"wrong": "wrong: its output is off by ", "raises": "raises: ValueError: out of registers;",
                        "elsewhere": "does not suit", "broken": "broken: ModuleNotFoundError: "}.items():
        assert rows[name]["value"] is None and words in rows[name]["note"], name


@rehearsed
def test_a_module_is_tried_in_a_process_of_its_own(monkeypatch):
    chosen = [SHAPE._replace(length=N) for N in (32, 64, 128)]
    _, _, module, name, given = kernels.command("hopper", chosen)
    assert (module, name) == ("benchmarks.attention", "hopper")
    assert [Shape(*each) for each in json.loads(given)] == [chosen[0], chosen[2]]
    assert kernels.trials("cpu", chosen) == {}
    commands = {"hangs": "import time; print(1, flush=True); time.sleep(600)", "dies": "import os; os._exit(11)",
                "good": "print('noise'); print('done, nothing wrong')", "wrong": "print('wrong: its output is off')"}
    monkeypatch.setattr(kernels, "OURS", tuple(commands))
    monkeypatch.setattr(kernels, "command", lambda name, _: [sys.executable, "-c", commands[name]])
    monkeypatch.setattr(kernels, "SECONDS", 5)
    assert kernels.trials("cuda", chosen) == {
        ("wrong", 64): "wrong: its output is off", ("dies", 64): "its trial ended with exit status 11",
        ("hangs", 64): "not done after 5 seconds for all"}
    faults = {("hopper", 64): "hangs", ("triton_backward", 64): "dies", ("triton_forward", 128): "of another head_dim"}
    rows = {row["name"]: row for row in speeds(faults=faults) if row["peer"] == "FLASH_ATTENTION"}
    assert rows["hopper"]["note"].startswith("hopper: hangs") and rows["triton_backward"]["peer_value"] > 0
    assert rows["triton_backward"]["value"] is None and rows["triton_forward"]["value"] > 0


def test_those_expected_to_be_the_fastest_are_tried_first(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "in_order", lambda commands, seconds: asked.extend(commands) or [])
    kernels.trials("cuda", speed.shapes())
    assert asked == [*itertools.product(OURS, [128])] + [*itertools.product(OURS, [64])] and OURS[0] == "hopper"
    assert speed.shapes()[0] == Shape(16384, 2048, 128, 16384, False)


def outcomes(programs, seconds, processes):
    """{which: (status, said)} of programs, in the order in which they ended."""
    commands = {which: [sys.executable, "-S", "-c", program] for which, program in programs.items()}
    return {which: (status, said) for which, status, said, _ in trials.in_order(commands, seconds, processes)}


@pytest.mark.alone
def test_trials_end_when_the_time_for_all_is_up_and_the_rest_is_named():
    sleeping = "import time; print('begun', flush=True); time.sleep(60)"
    start = time.monotonic()
    found = outcomes({"first": "print('a' * 100_000)", "second": sleeping, "third": "print(3)"}, 1.5, 1)
    assert time.monotonic() - start < 5
    assert found == {"first": (0, ["a" * 100_000]), "second": ("not done after 1.5 seconds for all", ["begun"]),
                     "third": ("not tried: the 1.5 seconds for all were used up", [])}
    assert list(outcomes({"a": "import time; time.sleep(0.5)", "b": "1"}, 5, 2)) == ["b", "a"]


def test_a_process_that_survives_its_kill_is_not_waited_for(monkeypatch):
    killed = []
    monkeypatch.setattr(trials.subprocess.Popen, "kill", lambda self: killed.append(self))
    monkeypatch.setattr(trials, "GRACE", 0.1)
    found = outcomes({"stuck": "import time; time.sleep(60)"}, 0.3, 1)
    assert found["stuck"][0] == ("not done after 0.3 seconds for all, and 0.1 seconds after it was killed it is still "
                                 "there")
    (process,) = killed
    process.terminate()
    process.wait(10)


def test_nothing_runs_on_when_nobody_listens_any_more():
    commands = {name: [sys.executable, "-c", "import time; time.sleep(60)"] for name in "ab"}
    running = trials.in_order(commands | {"done": [sys.executable, "-c", "1"]}, 30, 3)
    assert next(running)[0] == "done"
    started = [trial.process for trial in running.gi_frame.f_locals["running"].values()]
    running.close()
    assert len(started) == 2 and all(process.poll() is not None for process in started)


@rehearsed
def test_a_trial_ends_with_the_first_fault(monkeypatch):
    def forward(q, *given, **how):
        out, lse2 = fine(q, *given, **how)
        return out, lse2 + (0.1 if q.shape[2] == 128 else 0)

    has_module(monkeypatch, "made", forward)
    monkeypatch.setattr(kernels, "FORWARDS", {"made": ("made", {})})
    shapes = [SHAPE, SHAPE._replace(length=128)]
    assert kernels.trial("made", shapes[:1], "cpu", torch.float16) == kernels.DONE
    assert kernels.trial("triton_backward", shapes[:1], "cpu", torch.float16) == kernels.DONE
    fault = kernels.trial("made", shapes, "cpu", torch.float16)
    assert fault.startswith("wrong: its logsumexp is off by 0.1")


@rehearsed
def test_all_kernels_may_fail_and_the_backends_are_read(monkeypatch):
    def failing(*_):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(triton_forward, "forward", failing)
    rows = [row for row in speeds() if row["peer"] == BACKENDS[0]]
    assert all(row["value"] is None and row["peer_value"] > 0 for row in rows if row["direction"] == "forward")
    backward = next(row for row in rows if row["direction"] == "backward")
    assert backward["value"] is None and backward["peer_value"] > 0 and "shared memory" in backward["note"]


@rehearsed
def test_a_deterministic_backward_is_asked_for_and_the_modes_are_as_before(monkeypatch):
    def modes():
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    def grad(*given, real=torch.autograd.grad, **options):
        return seen.append(modes()) or real(*given, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    seen, before = [], modes()
    q, k, v, gradient = kernels.tensors(SHAPE, "cpu", torch.float16)
    found = kernels.backward_candidates(*(x.requires_grad_() for x in (q, k, v)), gradient, SHAPE)
    for name in (DETERMINISTIC, "FLASH_ATTENTION"):
        found[name]()
    assert seen == [(True, False), before]
    assert before == modes()


def test_rates_of_the_device_beside_the_makers():
    matrix, copy = speed.rate_rows("cpu", rounds=2, dtype=torch.float32, size=64, buffer_bytes=2**12)
    assert matrix["value"] == pytest.approx(2 * 64**3 / matrix["seconds"] / 1e12) and matrix["peer_value"] is None
    assert copy["value"] == pytest.approx(2 * 2**12 / copy["seconds"] / 1e12)


def test_published_rates_are_found_by_the_drivers_name(monkeypatch):
    for name, rates in {"NVIDIA H100 80GB HBM3": (989.4, 3.35), "NVIDIA H200": (989.4, 4.8)}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert speed.published_rates("cuda")[1] == pytest.approx(rates)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    assert speed.published_rates("cuda") == ("published", (None, None))


def test_what_is_aimed_at():
    assert len(speed.shapes()) == 16 and all(
        shape.dims[0] * shape.dims[2] == 16384 and shape.dims[1] * shape.dims[3] == 2048
        for shape in speed.shapes())
    every = set(itertools.product((64, 128), (False, True)))
    for table in (TARGETS, AIMS):
        assert all(peer in PEERS[direction] for direction, peer in table)
        assert all(set(wanted) in (every, {(128, False), (128, True)}, {(64, False), (64, True)})
                   for wanted in table.values())
    full = Shape(16384, 2048, 128, 2048, False)
    assert speed.verdict("forward", "FLASH_ATTENTION", full, 1.25)["verdict"] == "met"
    assert speed.verdict("forward", "FLASH_ATTENTION", full, 1.24)["verdict"] == "short"
    assert speed.verdict("backward", DETERMINISTIC, full, 1.11)["verdict"] == "met"
    assert speed.verdict("backward", "FLASH_ATTENTION", full, 1.11) == {}  # recorded beside, no target
    assert speed.verdict("backward", "CUDNN_ATTENTION", full, None)["verdict"] == "not measured"
    assert speed.verdict("forward", "EFFICIENT_ATTENTION", full, 9.0) == {}
    B, H, N, D = full.dims
    assert full.work("forward") == (4 * B * H * N * N * D, 4 * 2 * B * H * N * D + 4 * B * H * N)
    assert full.work("backward")[0] == 2.5 * full.work("forward")[0]


def test_on_a_gpu_everything_is_asked_for(monkeypatch):
    """Control flow alone: what is measured there stands in for itself."""
    asked = []
    tiled = attention.attention.tiled_attention
    monkeypatch.setattr(attention, "candidates", lambda device, without: {"tiled_attention": tiled})
    monkeypatch.setattr(attention, "Step", lambda function, length, dtype, device, made=attention.Step: made(
        function, length, torch.float32, "cpu"))
    monkeypatch.setattr(attention.memory, "measure", lambda device, made=attention.memory.measure: made("cpu"))
    monkeypatch.setattr(attention, "KernelTimer", lambda device: asked.append(device) or "timer")
    monkeypatch.setattr(speed, "rate_rows", lambda device, rounds, timer: asked.append((rounds, timer)) or [])
    monkeypatch.setattr(speed, "speed_rows", lambda *given, faults: asked.append((*given, faults)) or [])
    monkeypatch.setattr(kernels, "trials", lambda *given: asked.append(given) or {"a": "b"})
    settings, rows = attention.run("cuda", lengths=(64, 128))
    assert asked == [] and len(list(rows)) == 3
    shapes = speed.shapes()
    assert asked == [("cuda", shapes), "cuda", (15, "timer"), ("cuda", shapes, 15, "timer", {"a": "b"})]
    assert settings["dtype"] == "bfloat16" and "timing" in settings


def test_the_roofline_draws_what_was_recorded_and_nothing_else():
    rates = [{"name": "matrix rate", "value": 700.0}, {"name": "memory rate", "value": 3.0}]
    shapes = [shape for shape in speed.shapes(head_dims=(64, 128)) if shape.length > 4096]
    rows = [made_up(shape, direction, name, peer) for shape in shapes for direction in ("forward", "backward")
            for name in OURS for peer in BACKENDS if (name == "triton_backward") == (direction == "backward")]
    figure = plot_roofline(rates + rows)
    assert [axes.get_title() for axes in figure.axes] == [
        "forward, head_dim 64", "forward, head_dim 128", "backward, head_dim 64", "backward, head_dim 128"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(labels[:4]) == sorted(name for name in OURS if name != "gluon_forward")
    assert labels[4:] == ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"]
    roof, *lines = figure.axes[0].lines
    assert max(roof.get_ydata()) == 700 and roof.get_ydata()[0] == pytest.approx(3.0 * roof.get_xdata()[0])
    assert sum(len(line.get_xdata()) for line in lines) == 4 * 5  # 2 masks × 2 lengths, 3 of ours and 2 peers
    assert figure._repr_png_().startswith(b"\x89PNG")
    for given in (rows, rates, []):
        with pytest.raises(ValueError, match="rates and .* points: expected the rows of bench attention on a GPU"):
            plot_roofline(given)


def made_up(shape, direction, name, peer):
    flops, nbytes = shape.work(direction)
    value = None if name == "gluon_forward" else 400.0 + shape.head_dim + 100 * (name == "hopper")
    peer_value = None if peer == "CUDNN_ATTENTION" else 300.0
    return {**shape._asdict(), "direction": direction, "name": name, "peer": peer, "value": value,
            "peer_value": peer_value, "intensity": flops / nbytes}
