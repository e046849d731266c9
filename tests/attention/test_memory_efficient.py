"""Chunks against the reference, and their peak: least near √S, far below the matrix."""

import functools
import math

import attention_kit as kit
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refimpl import memory
from refimpl.attention import memory_efficient as module
from refimpl.attention import memory_efficient_attention, memory_efficient_attention_bytes, reference_attention
from refimpl.attention.reference import reference_attention_bytes

SMALL = functools.partial(memory_efficient_attention, query_chunk=4, key_chunk=3)
assert_equal = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(T=st.integers(1, 17), S=st.integers(1, 17), D=st.integers(1, 9), heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
       causal=st.booleans(), window=st.none() | st.integers(0, 12), dropout_p=st.sampled_from([0.0, 0.3]),
       chunk=st.tuples(st.integers(1, 9), st.none() | st.integers(1, 9)))
@example(T=9, S=3, D=4, heads=(4, 2), causal=True, window=None, dropout_p=0.3, chunk=(2, 2))
@example(T=9, S=3, D=4, heads=(4, 2), causal=True, window=None, dropout_p=0.0, chunk=(4, 2))
def test_it_is_the_reference(T, S, D, heads, causal, window, dropout_p, chunk):
    inputs = kit.inputs(2, *heads, T, S, D, torch.float64)
    options = {"causal": causal, "window": window, "dropout_p": dropout_p, "seed": 5, "scale": 0.8}
    ours = functools.partial(memory_efficient_attention, query_chunk=chunk[0], key_chunk=chunk[1])
    kit.assert_as_reference(ours, assert_equal, inputs, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [40, 59, 111])
@pytest.mark.parametrize(("T", "S", "options"), kit.SHAPES[1:5], ids=str)
def test_as_exact_as_plain_attention(T, S, D, dtype, options):
    inputs = kit.inputs(1, 2, 1, T, S, D, dtype)
    ours = functools.partial(memory_efficient_attention, query_chunk=32)
    kit.assert_as_exact_as_plain(ours, reference_attention, *inputs, **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 3}], ids=str)
def test_packed_sequences(options, dropout_p):
    packed = {"cu_seqlens": [0, 6, 6, 13, 17], "cu_seqlens_k": [0, 7, 10, 10, 19]}
    options = options | packed | {"dropout_p": dropout_p, "seed": 3}
    kit.assert_as_reference(SMALL, assert_equal, kit.inputs(B=1, T=17, S=19, dtype=torch.float64), **options)


def test_gradcheck_twice():
    q, k, v, _ = kit.inputs(1, 2, 1, 4, 5, 2, torch.float64)
    ours = functools.partial(SMALL, causal=True, dropout_p=0.3, seed=1)
    assert torch.autograd.gradcheck(ours, (q, k, v)) and torch.autograd.gradgradcheck(ours, (q, k, v))


def test_nan_and_minus_infinity_as_in_the_reference():
    for which, value in ((1, math.nan), (2, math.inf)):
        inputs = kit.inputs(1, 2, 1, 8, 8, 4, requires_grad=False)
        inputs[which][0, :, 5, 1] = value
        torch.testing.assert_close(SMALL(*inputs[:3]), reference_attention(*inputs[:3]), equal_nan=True)
    q, k, v, _ = kit.inputs(1, 1, 1, 7, 7, 4, requires_grad=False)
    q[:, :, 4], k[:] = -math.inf, 1.0
    torch.testing.assert_close(SMALL(q, k, v), reference_attention(q, k, v), equal_nan=True)


def test_under_autocast():
    q, k, v, gradient = kit.inputs(T=12, S=12, dtype=torch.bfloat16)
    expected = kit.gradients(SMALL, q, k, v, gradient, causal=True, dropout_p=0.2, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = SMALL(q, k, v, causal=True, dropout_p=0.2, seed=1)
    torch.testing.assert_close((out, *torch.autograd.grad(out, (q, k, v), gradient)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.1}], ids=str)
@pytest.mark.parametrize(("query_chunk", "key_chunk", "G", "T", "S"), [(64, 16, 2, 128, 128), (32, 23, 2, 128, 128), (
    128, 16, 4, 128, 128), (64, 8, 4, 128, 128), (32, None, 1, 64, 200)])
def test_bytes(dtype, options, query_chunk, key_chunk, G, T, S):
    shapes = (2, 4, T, 16), (2, G, S, 16)
    options = options | {"query_chunk": query_chunk, "key_chunk": key_chunk}
    kept, peak = kit.read(memory_efficient_attention, shapes, dtype, seed=1, **options)
    predicted = memory_efficient_attention_bytes(*shapes, dtype, **options)
    exact = dtype == torch.float32 and "dropout_p" not in options
    assert predicted.kept == kept
    assert predicted.peak == pytest.approx(peak, rel=0 if exact else 0.06 if "dropout_p" in options else 0.02)


def test_it_keeps_the_output_alone_and_a_version_without_checkpoints_fails_here(monkeypatch):
    shapes = (1, 2, 64, 8), (1, 1, 64, 8)
    assert kit.read(SMALL, shapes, torch.float32)[0] == memory_efficient_attention_bytes(*shapes).kept == 4 * 1024
    monkeypatch.setattr(module, "_checkpoint", lambda fn, *args: fn(*args))  # the same chunks
    assert kit.read(SMALL, shapes, torch.float32)[0] > 8 * 4 * 1024


def test_the_peak_is_least_near_the_square_root_and_far_below_the_matrix():
    S = 4096
    shapes = (1, 1, S, 64), (1, 1, S, 64)
    peaks = {c: memory_efficient_attention_bytes(*shapes, key_chunk=c).peak for c in (8, 64, 256, 512, 4096)}
    assert peaks[8] > peaks[64] > peaks[256] and peaks[512] < peaks[4096]  # √S = 64; least at √(S · D / 3) = 296
    assert peaks[256] * 10 < reference_attention_bytes(*shapes).peak


def test_a_dry_run_reads_the_same():
    step = functools.partial(kit.read, SMALL, ((1, 4, 12, 8), (1, 2, 12, 8)), torch.float32, causal=True, dropout_p=0.1)
    assert memory.dry_run(step).result == step()
