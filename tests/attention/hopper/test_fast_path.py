"""Which forward runs: the one asked for by name; else the fast one, where a GPU has proven it and it agrees."""

import functools
import math
import types
import warnings

import attention_kit as kit
import pytest
import torch
import triton

from benchmarks import record
from benchmarks.attention_candidates import FORWARDS
from refimpl.attention import flash_attention, reference_attention, triton_forward
from refimpl.attention.hopper import fast_path
from refimpl.attention.hopper import forward as hopper

pytestmark = [*kit.in_the_interpreter(),
              # Triton 3.6 interprets an element of an array in a way that NumPy warns of.
              pytest.mark.filterwarnings("ignore::DeprecationWarning:triton")]
VERSION = ".".join(triton.__version__.split(".")[:2])
near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.fixture
def suited(monkeypatch):
    """As on a Hopper GPU; how often its kernel has run, and what becomes of its output."""
    calls, real = [], hopper.forward
    def forward(*args, **options):
        calls.append(options)
        out, lse2 = real(*args, **options)
        return forward.change(out), lse2

    forward.change = lambda out: out
    monkeypatch.setattr(hopper, "suits", lambda *tensors: True)
    monkeypatch.setattr(hopper, "forward", forward)
    monkeypatch.setattr(fast_path, "_faults", {})
    return calls, forward


@pytest.fixture
def proven(suited, monkeypatch):
    """… and as if a GPU had run it right with this Triton."""
    monkeypatch.setattr(fast_path, "PROVEN", {VERSION: "hopper"})
    return suited


@pytest.fixture
def given():
    """q, k, v and a gradient."""
    return kit.inputs(1, 2, 1, 40, 40, 16)


def test_a_kernel_that_no_gpu_has_proven_is_not_taken(suited, monkeypatch, given):
    for others in ({}, {"3.5": "hopper", "99.0": "hopper"}):
        monkeypatch.setattr(fast_path, "PROVEN", others)
        near(flash_attention(*given[:3]), reference_attention(*given[:3]))
    assert suited[0] == []


def unproven(proven, records):
    """Return the (version, kernel) of `proven` of which no smoke test on a GPU says that all calls are right."""
    missing = []
    for version, kernel in proven.items():
        name, = (name for name, found in FORWARDS.items() if found == (fast_path.MODULES[kernel], {}))
        verdicts = {row["verdict"] for slug, found in records.items() if found and slug != "cpu"
                    and found["versions"]["triton"].split(".")[:2] == version.split(".")
                    for row in found["rows"] if row["name"] == name}
        if verdicts != {"right"}:
            missing.append((version, kernel))
    return missing


def test_what_counts_as_proven_is_on_record():
    assert unproven(fast_path.PROVEN, record.measurements("smoke")) == []


@pytest.mark.parametrize(("device", "triton", "name", "verdicts", "missing"), [
    ("nvidia-h200", "3.6.0", "hopper", ["right", "right"], []),
    ("nvidia-h200", "3.6.0", "hopper", ["right", "not done after 20 seconds for all"], [("3.6", "hopper")]),
    ("nvidia-h200", "3.6.0", "hopper, specialized", ["right"], [("3.6", "hopper")]),
    ("nvidia-h200", "3.60.0", "hopper", ["right"], [("3.6", "hopper")]),
    ("cpu", "3.6.0", "hopper", ["right"], [("3.6", "hopper")])])
def test_what_is_no_proof(device, triton, name, verdicts, missing):
    rows = [{"name": name, "verdict": verdict} for verdict in verdicts]
    assert unproven({"3.6": "hopper"}, {device: {"versions": {"triton": triton}, "rows": rows}}) == missing
    assert unproven({"3.6": "hopper"}, {"a GPU": None}) == [("3.6", "hopper")]


def test_it_is_taken_once_it_agrees(proven, given):
    calls, _ = proven
    kit.assert_as_reference(flash_attention, near, given, causal=True)
    assert len(calls) == 3 and calls[-1] == {"scale": 0.25, "causal": True, "window": None}  # two to agree, and ours
    flash_attention(*given[:3], causal=True)
    assert len(calls) == 4
    flash_attention(*given[:3], causal=True, window=3)
    assert len(calls) == 7  # a kind of its own


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"cu_seqlens": [0, 10, 40]}], ids=str)
def test_dropout_and_packed_sequences_go_the_other_way(options, proven, given):
    flash_attention(*given[:3], **options)
    assert proven[0] == []


def raising(out):
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize("fault", [lambda out: out + 0.1, lambda out: out * math.nan, lambda out: out.roll(1, 2),
                                   raising])
def test_one_that_is_wrong_or_raises_is_never_used_and_said_once(fault, proven, given):
    (calls, forward), (q, k, v, _) = proven, given
    forward.change = fault
    words = "raises RuntimeError: out of resource" if fault is raising else "is off by "
    with pytest.warns(RuntimeWarning, match=f"fast path is not used: with Triton .* hopper .*head_dim=16.* {words}"):
        out = flash_attention(q, k, v)
    near(out, reference_attention(q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        flash_attention(q, k, v)
    assert len(calls) == (1 if fault is raising else 2)


def test_one_that_raises_later_is_not_used_again(proven, given):
    (calls, forward), (q, k, v, _) = proven, given
    flash_attention(q, k, v)
    forward.change = raising
    with pytest.warns(RuntimeWarning, match="raises RuntimeError: out of resource: shared memory; the pointer kernel"):
        out = flash_attention(q, k, v)
    near(out, reference_attention(q, k, v))
    forward.change = lambda out: out
    flash_attention(q, k, v)
    assert len(calls) == 4


def test_being_out_of_memory_is_no_fault_of_a_kernel(proven, given):
    def full(out):
        raise torch.OutOfMemoryError("CUDA out of memory")

    forward, change = proven[1], proven[1].change
    for _ in range(2):  # while it is asked whether it agrees, and afterwards
        forward.change = full
        with pytest.raises(torch.OutOfMemoryError):
            flash_attention(*given[:3])
        forward.change = change
        flash_attention(*given[:3])


def test_a_kernel_by_name_is_the_one_that_runs(proven, monkeypatch, given):
    (calls, _), gluon, pointers, real = proven, [], [], triton_forward.forward
    made = types.SimpleNamespace(suits=lambda *_: True, forward=lambda *given, **options: gluon.append(options) or real(
        *given, fast_path.Problem.of(given[0], given[1], options["scale"], *list(options.values())[1:], 0.0,
                                     *[None] * 3, 0, 0)))
    monkeypatch.setattr(fast_path, "module_of", {"hopper": hopper, "gluon": made}.get)
    monkeypatch.setattr(triton_forward, "forward", lambda *given: pointers.append(1) or real(*given))
    for kernel, count in {"hopper": (1, 0, 0), "gluon": (1, 1, 0), "triton": (1, 1, 1)}.items():
        kit.assert_as_reference(functools.partial(flash_attention, kernel=kernel), near, given, causal=True)
        assert (len(calls), len(gluon), len(pointers)) == count


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"cu_seqlens": [0, 10, 40]}], ids=str)
@pytest.mark.parametrize("kernel", ["hopper", "gluon"])
def test_a_call_that_the_named_kernel_cannot_compute_is_refused(kernel, options, given):
    for each in (options, {}):  # these tensors are on a CPU
        with pytest.raises(ValueError, match=f"kernel='{kernel}' with q of shape .1, 2, 40, 16.* kernel='auto' takes"):
            flash_attention(*given[:3], kernel=kernel, **each)
    with pytest.raises(ValueError, match="kernel='triton' for torch.float64 on cpu: .* kernel='auto' takes tiled"):
        flash_attention(*(x.double() for x in given[:3]), kernel="triton")


@pytest.mark.parametrize("kernel", ["cuda", None, 3])
def test_a_kernel_that_nobody_knows_is_refused(kernel):
    with pytest.raises(ValueError, match="expected one of 'auto', 'triton', 'hopper', 'gluon'"):
        flash_attention(*kit.inputs()[:3], kernel=kernel)
