"""Linformer against its equation: values, gradients in fp64, bytes without an n × n matrix, and why none is causal."""

import functools
import gc
import itertools
import math

import attention_kit as kit
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.attention import flash_attention, flash_attention_bytes, tiled_attention, tiled_attention_bytes
from refimpl.attention.linformer_projection import (
    linformer_attention,
    linformer_bytes,
    linformer_flops,
    linformer_parameters,
)
from refimpl.attention.reference import AttentionBytes, reference_attention

SHARE = ("none", "heads", "kv")
# (B, H, G, T, S, D, V, k, n)
SHAPES = [(2, 4, 2, 96, 96, 16, 16, 8, 96), (3, 2, 1, 1, 300, 8, 8, 16, 320), (2, 4, 2, 40, 200, 16, 32, 64, 212),
          (1, 1, 1, 64, 300, 8, 8, 128, 300), (2, 2, 2, 300, 300, 8, 8, 4, 320), (2, 4, 4, 8, 200, 16, 64, 8, 200)]
tiled = functools.partial(linformer_attention, attention=tiled_attention)
by_reference = functools.partial(linformer_attention, attention=reference_attention)
in_interpreter, of_the_interpreter = kit.in_the_interpreter()


def projections(share, G, k, n, dtype=torch.float64):
    """E and F, (G, k, n) or (k, n); F is None if it is E."""
    shape = (G, k, n) if share == "none" else (k, n)
    e, f = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).div(k**0.5).to(dtype)
            .requires_grad_() for i in range(2))
    return e, None if share == "kv" else f


def equation(q, k, v, e, f, scale=None, there=None):
    """Equation 7, head by head: softmax(q (E k)ᵀ / √d) (F v)."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b, h in itertools.product(*map(range, q.shape[:2])):
        g = h * k.shape[1] // q.shape[1]
        seen = torch.arange(k.shape[2]) if there is None else there[b].nonzero()[:, 0]
        e_g, f_g = ((x if x.ndim == 2 else x[g])[:, seen] for x in (e, e if f is None else f))
        scores = q[b, h] @ (e_g @ k[b, g, seen]).T * (q.shape[-1] ** -0.5 if scale is None else scale)
        out = out.index_put((torch.tensor(b), torch.tensor(h)), scores.softmax(-1) @ (f_g @ v[b, g, seen]))
    return out


def both(found, wanted, given, gradient):
    given = [x for x in given if x is not None]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, given, gradient) for x in (found, wanted)))


@pytest.mark.parametrize("attention", [tiled_attention, flash_attention, reference_attention])
@pytest.mark.parametrize("share", SHARE)
@pytest.mark.parametrize(("n", "scale", "padded"), [(9, None, False), (12, 0.7, True)])
def test_it_is_the_equation(share, attention, n, scale, padded):
    q, k, v, gradient = kit.inputs(2, 4, 2, 7, 9, 8, torch.float64, V=5)
    e, f = projections(share, 2, 3, n)
    there = torch.arange(9) < torch.tensor([[9], [5]]) if padded else None
    found = linformer_attention(q, k, v, e, f, scale=scale, padding=there, attention=attention)
    both(found, equation(q, k, v, e, f, scale, there), (q, k, v, e, f), gradient)


@in_interpreter
@of_the_interpreter
def test_the_kernels_compute_the_equation():
    q, k, v, gradient = (x.detach().requires_grad_() for x in kit.inputs(2, 2, 1, 20, 30, 8))
    e, f = projections("heads", 1, 6, 30, torch.float32)
    both(linformer_attention(q, k, v, e, f), equation(q, k, v, e, f), (q, k, v, e, f), gradient)


@pytest.mark.parametrize("share", SHARE)
def test_gradients_by_fp64(share):
    q, k, v, _ = kit.inputs(2, 2, 2, 3, 4, 2, torch.float64)
    e, f = projections(share, 2, 3, 5)
    given, there = [x for x in (q, k, v, e, f) if x is not None], torch.tensor([[True] * 4, [True, True, False, True]])
    assert torch.autograd.gradcheck(functools.partial(tiled, padding=there), given)
    assert torch.autograd.gradgradcheck(functools.partial(by_reference, padding=there), given)


def test_a_short_sequence_takes_the_first_columns_and_a_padded_one_is_the_short_one():
    q, k, v, _ = kit.inputs(1, 2, 2, 9, 9, 4, torch.float64, requires_grad=False)
    e, f = projections("heads", 2, 3, 9)
    short = tiled(q, k[:, :, :6], v[:, :, :6], e, f)
    torch.testing.assert_close(short, tiled(q, k[:, :, :6], v[:, :, :6], e[:, :6].contiguous(), f[:, :6].contiguous()))
    for x in (k, v):
        x[:, :, 6:] = torch.nan
    torch.testing.assert_close(tiled(q, k, v, e, f, padding=torch.arange(9)[None] < 6), short)


def test_an_identity_is_attention():
    q, k, v, _ = kit.inputs(1, 2, 2, 9, 9, 4, torch.float64)
    torch.testing.assert_close(tiled(q, k, v, torch.eye(9)), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_projections_of_another_dtype_are_cast_and_get_their_own_gradients(dtype):
    q, k, v, gradient = kit.inputs(4, 2, 2, 20, 20, 8, dtype)
    e, f = projections("heads", 2, 6, 20, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(tiled(q, k, v, e, f), (e, k), gradient)
    wide = torch.autograd.grad(equation(*(x.float() for x in (q, k, v)), e, f), (e, k), gradient.float())
    assert [x.dtype for x in found] == [torch.float32, dtype]
    kit.assert_close((x.float() for x in found), wide, 0.05)


# --- causality -------------------------------------------------------------------------------------------------------


def masked_rows(q, k, v):
    """A causal mask over the k rows: what one might think is causal."""
    return tiled_attention(q, k, v, causal=True)


@pytest.mark.parametrize("attention", [tiled_attention, masked_rows])
def test_a_projection_sees_the_future_whatever_is_masked_in_its_rows(attention):
    """The reason for the refusal: a later token changes what earlier queries get, though row i is hidden from them."""
    q, k, v, _ = kit.inputs(1, 1, 1, 8, 8, 4, torch.float64)
    e, f = projections("heads", 1, 8, 8)
    out = linformer_attention(q, k, v, e, f, attention=attention)
    dk, dv = torch.autograd.grad(out[:, :, 0].sum(), (k, v))
    assert (dv[:, :, 1:].abs().amax(-1) > 0).all()
    later = v.detach().clone()
    later[:, :, -1] += 1
    assert not torch.allclose(linformer_attention(q, k, later, e, f, attention=attention)[:, :, 0], out[:, :, 0])
    causal = torch.autograd.grad(tiled_attention(q, k, v, causal=True)[:, :, 0].sum(), v)[0]
    assert not causal[:, :, 1:].any()


Q, K = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 8, 4)
E = torch.randn(3, 8)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: linformer_attention(Q, K, K, E, causal=True),
     "causal=True for Linformer: .* sum over the whole sequence, so a query would see later tokens, and no mask"),
    (lambda: linformer_attention(Q, K, K, E[:, :7]), r"a sequence of 8 tokens and e of shape \(3, 7\), for at most 7"),
    (lambda: linformer_attention(Q, K, K, E, E[:, :7]), r"a sequence of 8 tokens and f of shape \(3, 7\)"),
    (lambda: linformer_attention(Q, K, K, E, E[:2]), r"f of shape \(2, 8\): .* with the k of e, \(3, 8\)"),
    (lambda: linformer_attention(Q, K, K, E.expand(3, 3, 8)), r"e of shape \(3, 3, 8\): .*\(2, k, n\) for 2 key"),
    (lambda: linformer_attention(Q, K, K, E[0]), r"e of shape \(8,\): expected"),
    (lambda: linformer_attention(Q, K, K, E, padding=torch.ones(1, 8)), "padding of torch.float32 and shape"),
    (lambda: linformer_attention(Q, K, K, E, padding=torch.ones(1, 6, dtype=torch.bool)), r"of shape \(1, 8\), True"),
    (lambda: linformer_attention(Q[0], K, K, E), "q of shape .*: expected .batch, heads, sequence, head_dim"),
    (lambda: linformer_bytes((1, 2, 6, 4), (1, 2, 8, 4), 3, share="layers"), "share='layers': expected one of 'none'")])
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# --- bytes, FLOPs ----------------------------------------------------------------------------------------------------


def read(shape, share, dtype, attention, function=linformer_attention, **options):
    """AttentionBytes above q, k, v, E, F and the output's gradient, by the tracker."""
    B, H, G, T, S, D, V, k, n = shape
    q, keys, v, gradient = kit.inputs(B, H, G, T, S, D, dtype, V=V)
    e, f = projections(share, G, k, n, dtype)
    with memory.track(q, keys, v, gradient, e, *([] if f is None else [f])) as t:
        out = function(q, keys, v, e, f, attention=attention, **options)
        kept = t.now.total - t.start.total
        out.backward(gradient)
    return AttentionBytes(kept, t.peak.total - t.start.total)


def predicted(shape, share, dtype, attention_bytes):
    B, H, G, T, S, D, V, k, n = shape
    return linformer_bytes((B, H, T, D), (B, G, S, D), k, dtype, seq_len=n, share=share, v_dim=V,
                           attention_bytes=attention_bytes)


@pytest.mark.parametrize("share", SHARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_are_exact_in_pytorch(dtype, share):
    for shape in SHAPES:
        found = read(shape, share, dtype, tiled_attention)
        assert found == predicted(shape, share, dtype, tiled_attention_bytes), shape


@in_interpreter
@pytest.mark.parametrize("share", SHARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_exact_with_kernels(dtype, share):
    """In a dry run, where the operators allocate and no kernel runs."""
    for shape in SHAPES:
        dry = memory.dry_run(read, shape, share, dtype, flash_attention).result
        assert dry == predicted(shape, share, dtype, flash_attention_bytes), shape


@in_interpreter
@of_the_interpreter
@pytest.mark.parametrize("share", SHARE)
def test_bytes_are_exact_when_kernels_are_interpreted(share):
    def collecting(q, k, v):
        """The interpreter's frames are a cycle, which holds what a kernel was given until it is collected."""
        k.register_hook(lambda gradient: gc.collect() and None)
        return flash_attention(q, k, v)

    given = (2, 4, 2, 20, 100, 16, 32, 16, 112), share, torch.float32
    assert read(*given, collecting) == predicted(*given, flash_attention_bytes)


def materialising(q, k, v, e, f, attention):
    """A mutant: the same numbers by (q kᵀ) Eᵀ and (weights F) v, both (T, S)."""
    e, f = (x[..., :k.shape[2]] for x in (e, e if f is None else f))
    scores = q @ k.mT @ e.mT * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ f @ v


def test_one_that_materialises_n_by_n_fails_here():
    shape = (1, 2, 2, 512, 512, 16, 16, 8, 512)
    q, k, v, _ = kit.inputs(1, 2, 2, 30, 30, 16, torch.float64)
    e, f = projections("heads", 2, 8, 30)
    torch.testing.assert_close(materialising(q, k, v, e, f, None), tiled(q, k, v, e, f))
    ours, mutant = (read(shape, "heads", torch.float32, tiled_attention, function)
                    for function in (linformer_attention, materialising))
    assert ours == predicted(shape, "heads", torch.float32, tiled_attention_bytes)
    assert mutant.kept > 10 * ours.kept and mutant.peak > 4 * 2 * 512**2 > 2 * ours.peak


def test_padding_keeps_nothing_more():
    there = torch.arange(96)[None] < torch.tensor([[96], [50]])
    kept = read(SHAPES[0], "heads", torch.float32, tiled_attention, padding=there).kept
    assert kept == predicted(SHAPES[0], "heads", torch.float32, tiled_attention_bytes).kept


@pytest.mark.parametrize("share", SHARE)
def test_a_dry_run_of_a_million_tokens_is_the_closed_form(share):
    n = 2**20
    shape = (1, 8, 8, n, n, 64, 64, 256, n)
    dry = memory.dry_run(read, shape, share, torch.bfloat16, tiled_attention).result
    assert dry == predicted(shape, share, torch.bfloat16, tiled_attention_bytes)
    assert 100 * dry.peak < 2 * n * n  # one matrix in bf16


def test_bytes_grow_with_the_sequence_and_not_its_square():
    def form(n):
        return linformer_bytes((1, 8, n, 64), (1, 8, n, 64), 256, torch.bfloat16)
    assert form(2**21).peak / form(2**20).peak == pytest.approx(2, rel=1e-2)
    assert linformer_bytes((1, 8, 2**20, 64), (1, 8, 2**20, 64), 512, torch.bfloat16).kept < 1.001 * form(2**20).kept


def counted(step):
    in_place = {torch.ops.aten.baddbmm_: lambda into, a, b, **_: 2 * math.prod(a) * b[-1]}  # the counter knows none
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        step()
    return counter.get_total_flops()


def test_flops_are_pytorchs_count():
    q, k, v, gradient = kit.inputs(2, 4, 4, 20, 30, 8, V=16)
    e, f = projections("none", 4, 6, 30, torch.float32)
    out, flops = [], linformer_flops(q.shape, k.shape, 6, v_dim=16)
    assert counted(lambda: out.append(by_reference(q, k, v, e, f))) == flops.forward
    assert counted(lambda: out[0].backward(gradient)) == flops.backward
    assert flops.backward_recomputing - flops.backward == 2 * 8 * flops.pairs and flops.pairs == 2 * 4 * 20 * 6


def test_matrices_of_the_paper():
    """Section 4: in 12 layers of 12 heads headwise, key-value and layerwise sharing give 24, 12 and 1 matrices."""
    matrix = 512 * 128
    assert 12 * linformer_parameters(512, 12, 128, "heads") == 24 * matrix
    assert 12 * linformer_parameters(512, 12, 128, "kv") == 12 * matrix
    assert linformer_parameters(512, 12, 128, "kv") == matrix
    assert 12 * linformer_parameters(512, 12, 128, "none") == 288 * matrix
