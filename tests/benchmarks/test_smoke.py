"""The smoke test of the attention kernels, in Triton's interpreter; and that it sees one that is wrong or hangs."""

import sys

import pytest
import torch

from benchmarks import smoke
from benchmarks.attention.kernels import FORWARDS, OURS
from refimpl.attention import triton_forward

rehearsed = pytest.mark.skipif(type(triton_forward.forward_kernel).__name__ != "InterpretedFunction",
                               reason="needs Triton's interpreter")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
TENSORS = {"triton_backward": ["dq", "dk", "dv"]}


def test_each_kernel_has_a_process_and_a_row():
    settings, rows = smoke.run("cpu", seconds=600, head_dims=(64,), names=("triton_forward", "gluon_forward"))
    rows = {row["name"]: row for row in rows}
    assert settings["kernels"] == "interpreted" and settings["dtype"] == "float16"
    right, absent = rows["triton_forward"], rows["gluon_forward"]
    assert right["verdict"] == "right" and 0 < right["value"] == max(right["errors"].values()) < 0.002
    assert absent["value"] is None and "RuntimeError" in absent["verdict"]  # Gluon has no interpreter


@rehearsed
@pytest.mark.parametrize("name", [name for name in OURS if name != "gluon_forward"])
def test_what_a_kernel_is_asked(name, monkeypatch):
    monkeypatch.setattr(smoke, "LENGTH", 150)
    errors = smoke.errors_of("cpu", name, 16)
    assert list(errors) == [f"{mask} {tensor}" for mask in ("full", "causal")
                            for tensor in TENSORS.get(name, ["output", "logsumexp"])]
    assert all(0 < error < 0.002 for error in errors.values())


@rehearsed
def test_a_kernel_that_forgets_a_key_is_seen(monkeypatch):
    monkeypatch.setattr(smoke, "LENGTH", 150)
    real = triton_forward.forward
    monkeypatch.setattr(triton_forward, "forward", lambda q, k, v, problem: real(
        q, torch.cat([k[:, :, :-1], k[:, :, :1]], 2), v, problem))
    assert max(smoke.errors_of("cpu", "triton_forward", 16).values()) > smoke.WITHIN


def test_what_a_process_says_becomes_the_verdict(monkeypatch):
    programs = {"right": "print('noise'); print('{\"full output\": 0.001}')",
                "wrong": "print('{\"full output\": 0.001, \"causal output\": 0.5}')",
                "nan": "print('{\"full output\": NaN}')", "raises": "import sys; sys.exit('ValueError: registers')",
                "dies": "import os; os._exit(11)", "mute": "pass", "hangs": "import time; time.sleep(60)"}
    real = smoke.in_order
    monkeypatch.setattr(smoke, "in_order", lambda commands, seconds: real(
        {which: [sys.executable, "-S", "-c", programs[which[0]]] for which in commands}, seconds, 8))
    rows = {row["name"]: row for row in smoke.run("cuda", seconds=3, head_dims=(64,), names=tuple(programs))[1]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "right": "right", "wrong": "wrong", "nan": "wrong", "raises": "ValueError: registers",
        "dies": "its trial ended with exit status 11", "mute": "its trial ended with exit status 0",
        "hangs": "not done after 3 seconds for all"}
    assert rows["wrong"]["value"] == 0.5 and rows["dies"]["value"] is None


def test_all_kernels_are_asked_those_that_could_hang_last():
    assert set(OURS) == {"triton_forward", "triton_backward", *FORWARDS}
    assert OURS[-2:] == ("gluon_forward", "hopper, specialized")
