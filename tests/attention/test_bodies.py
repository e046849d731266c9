"""What tests/gpu asks of a GPU, here asked of the interpreter at tiny sizes; and that each body can fail."""

import inspect
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import attention_bodies as bodies
import attention_kit as kit
import in_processes
import pytest
import torch

from refimpl.attention import flash_attention

pytestmark = kit.in_the_interpreter()
FP16, FP32 = torch.float16, torch.float32
SMALL, PACKED = (1, 2, 1, 20, 33, 16), {"cu_seqlens": [0, 9, 9, 20], "cu_seqlens_k": [0, 13, 20, 33]}
TINY = [
    ("as_exact_as_plain", FP16, {"shape": (1, 4, 2, 33, 20, 40), "causal": True, "dropout_p": 0.3, "seed": 7}),
    *(("as_exact_as_plain", FP32, {"shape": SMALL, "layout": layout, "window": 9})
      for layout in ("contiguous", "transposed", "columns apart", "shifted", "every other")),
    ("as_exact_as_plain", FP16, {"shape": SMALL, **PACKED, "causal": True, "dropout_p": 0.3, "seed": 8}),
    ("long_as_exact_as_plain", FP16, {"shape": (1, 2, 1, 80, 80, 16), "rows": 30, "causal": True}),
    ("long_as_exact_as_plain", FP16, {"shape": (1, 2, 1, 40, 40, 16), "rows": 30, "causal": False}),
    ("one_key_each", FP16, {"T": 60, "S": 90, "D": 16}), ("equal_weights", FP16, {"T": 20, "n": 6, "D": 16}),
    ("one_key_each", FP32, {"T": 90, "S": 90, "D": 32, "causal": True}),
    ("same_bits", FP16, {"shape": SMALL, "repeats": 2, "causal": True}),
    ("every_element_is_written", FP16, {"shape": (2, 4, 2, 33, 20, 19), "window": 30}),
    ("fully_masked_rows", FP16, {}), ("not_finite", FP16, {}), ("beyond_32_bits", FP16, {"rows": 300, "heads": 2}),
    ("on_another_device", FP16, {"other": "cpu"}), ("operators_pass_opcheck", FP16, {}),
    ("compiled_in_one_graph", FP16, {"backend": "aot_eager", "causal": True}),
    ("bytes_are_exact", FP16, {"shape": (1, 4, 2, 70, 90, 16), "dropout_p": 0.1}),
    ("learns", FP32, {"steps": 2, "length": 20}), ("sanitized", FP16, {"tool": []})]
TASKS = """import os, time, pytest
def fine(): pass
def skips(): pytest.skip('not here')
def fails(what): assert what == 1, f'not {what}'
def dies(): os._exit(3)
def hangs(): time.sleep(600)
"""


@pytest.mark.parametrize(("body", "dtype", "arguments"), TINY, ids=str)
def test_a_body_passes_here(body, dtype, arguments):
    getattr(bodies, body)("cpu", dtype, **arguments)


def test_a_forward_for_one_chip(monkeypatch):
    def forward(*tensors, specialize=None, **options):
        assert specialize
        return bodies.by_pointers(*tensors, **options)

    def ask():
        bodies.beside_the_definition("cpu", FP16, "made", shape=(1, 2, 1, 33, 20, 16), repeats=2, layout="transposed",
                                     causal=True, specialize=True)

    made = SimpleNamespace(suits=lambda *_: True, forward=forward)
    monkeypatch.setitem(sys.modules, "refimpl.attention.made", made)
    ask()
    made.forward = lambda *x, **y: (forward(*x, **y)[0] * 1.01, forward(*x, **y)[1])
    with pytest.raises(AssertionError):
        ask()
    made.suits = lambda *_: False
    with pytest.raises(AssertionError):
        ask()


def test_a_forward_for_another_chip_is_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(pytest.skip.Exception, match=r"for compute capability 9.0, this one has \(10, 0\)"):
        bodies.beside_the_definition("cuda", FP16, "made", shape=(1, 2, 1, 33, 20, 16), repeats=2)


def nudged(q, k, v, **options):
    """The mutant: one element of the output is off by a hundredth of the largest."""
    found = flash_attention(q, k, v, **options)
    out = found[0] if isinstance(found, tuple) else found
    off = torch.zeros_like(out)
    off[0, -1, -1, 3] = 0.01 * out.abs().max()
    return (out + off, found[1]) if isinstance(found, tuple) else out + off


@pytest.mark.parametrize(("body", "dtype", "arguments"), [
    case for case in TINY if case[0] in ("as_exact_as_plain", "long_as_exact_as_plain", "equal_weights")][::3], ids=str)
def test_a_body_sees_one_wrong_element(body, dtype, arguments, monkeypatch):
    monkeypatch.setattr(bodies, "flash_attention", nudged)
    with pytest.raises(AssertionError):
        getattr(bodies, body)("cpu", dtype, **arguments)


def test_what_is_asked_of_a_gpu_fits_the_bodies():
    """Names and arguments, of all tasks; each body is rehearsed above."""
    tasks = runpy.run_path(str(Path(__file__).parents[1] / "gpu" / "test_attention.py"))["TASKS"].values()
    rehearsed = {body for body, *_ in TINY} | {"beside_the_definition"}
    for path, arguments in tasks:
        name = path.removeprefix("attention_bodies:")
        bound = inspect.signature(getattr(bodies, name)).bind(**arguments).arguments
        assert name in rehearsed and bound["device"] == "cuda"
        taken = inspect.signature(flash_attention).parameters
        assert set(bound.get("options", {})) <= set(taken) and set(bound.get("own", {})) <= {"specialize"}
    assert {path.removeprefix("attention_bodies:") for path, _ in tasks} == rehearsed


def test_outcomes_come_back_from_several_processes(monkeypatch, tmp_path):
    (tmp_path / "tasks_for_workers.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    def run(seconds, **tasks):
        return in_processes.outcomes({name: (f"tasks_for_workers:{function}", arguments)
                                      for name, (function, arguments) in tasks.items()}, 1, seconds)

    found = run(120, a=("fine", {}), b=("skips", {}), c=("fails", {"what": 2}), d=("fails", {"what": 1}),
                e=("nothing", {}), f=("dies", {}), g=("fine", {}))
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "a": "passed", "b": "skipped", "c": "failed", "d": "passed", "e": "failed", "f": "failed", "g": "failed"}
    assert found["b"][1] == "not here" and "AssertionError: not 2" in found["c"][1] and "nothing" in found["e"][1]
    assert "a process died" in found["f"][1]
    start = time.monotonic()
    assert run(0.5, a=("hangs", {})) == {"a": ("failed", "not done after 0.5 seconds in all")}
    assert time.monotonic() - start < 60


def test_after_an_error_of_cuda_a_process_runs_nothing_more(monkeypatch):
    def breaks():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(in_processes, "broken_by", None)
    monkeypatch.setitem(sys.modules, "tasks_here", SimpleNamespace(breaks=breaks, fine=lambda: None))
    assert in_processes.attempt("a", "tasks_here:fine", {}) == ("passed", "")
    assert "illegal memory" in in_processes.attempt("b", "tasks_here:breaks", {})[1]
    assert in_processes.attempt("c", "tasks_here:fine", {}) == (
        "failed", "not run: in this process b ended with an error of CUDA")
