"""The fast path is taken where it suits, only after it has proved itself."""

import math
import warnings

import pytest
import torch

from refimpl.attention import fast_path, flash_attention, hopper, reference_attention
from refimpl.attention.triton_forward import forward_kernel

pytestmark = [
    pytest.mark.skipif(type(forward_kernel).__name__ != "InterpretedFunction", reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.fixture
def suited(monkeypatch):
    """As on a Hopper GPU; how often its kernel has run, and what becomes of its output."""
    calls, real = [], hopper.forward

    def forward(*args, change=lambda out: out, **options):
        calls.append(options)
        out, lse2 = real(*args, **options)
        return forward.change(out), lse2

    forward.change = lambda out: out
    monkeypatch.setattr(hopper, "suits", lambda *tensors: True)
    monkeypatch.setattr(hopper, "forward", forward)
    fast_path.proved.cache_clear()
    yield calls, forward
    fast_path.proved.cache_clear()


def test_it_is_taken_once_it_has_proved_itself(suited, kit):
    calls, _ = suited
    q, k, v, gradient = kit.inputs(1, 2, 1, 40, 40, 16)
    found = kit.gradients(flash_attention, q, k, v, gradient, causal=True)
    assert len(calls) == 3 and calls[-1] == {"scale": 0.25, "causal": True, "window": None}  # two to prove, and ours
    for a, b in zip(found, kit.gradients(reference_attention, q, k, v, gradient, causal=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    flash_attention(q, k, v, causal=True)
    assert len(calls) == 4
    flash_attention(q, k, v, causal=True, window=3)
    assert len(calls) == 7  # a kind of its own


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"cu_seqlens": [0, 10, 40]}], ids=str)
def test_dropout_and_packed_sequences_go_the_other_way(options, suited, kit):
    q, k, v, _ = kit.inputs(1, 2, 1, 40, 40, 16)
    flash_attention(q, k, v, **options)
    assert suited[0] == []


@pytest.mark.parametrize("fault", [lambda out: out + 0.1, lambda out: out * math.nan, lambda out: out.roll(1, 2)])
def test_one_that_is_wrong_is_never_used_and_said_once(fault, suited, kit):
    calls, forward = suited
    forward.change = fault
    q, k, v, _ = kit.inputs(1, 2, 1, 40, 40, 16)
    with pytest.warns(RuntimeWarning, match="fast path is not used: with Triton .* is off by .* head_dim=16"):
        out = flash_attention(q, k, v)
    torch.testing.assert_close(out, reference_attention(q, k, v), rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attention(q, k, v)
    assert len(calls) == 2
