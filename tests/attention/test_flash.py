"""The Triton kernels, interpreted on the CPU: values, gradients, masks and bytes. Elsewhere: on a GPU (tests/gpu)."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refimpl import memory
from refimpl.attention import flash, flash_attention, flash_attention_bytes, reference_attention
from refimpl.attention.kernels import configs
from refimpl.attention.kernels.configs import Config
from refimpl.attention.triton_forward import forward_kernel
from refimpl.mixed_precision import autocast

pytestmark = [
    pytest.mark.skipif(type(forward_kernel).__name__ != "InterpretedFunction", reason="needs Triton's interpreter"),
    # 0/0 in a row whose every score is −∞, and ∞ − ∞: as wanted
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def tiles(monkeypatch):
    """tiles(block_m, block_n): other ones than the interpreter's own."""
    return lambda m, n: monkeypatch.setattr(configs, "INTERPRETED", Config(m, n, 4, 1))


def close(ours, expected, tolerance=1e-5):
    """Within 1e-5 of the largest value, for each of several tensors."""
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * max(b.abs().max(), 1e-3), (a - b).abs().max()


# --- values and gradients --------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(T=st.integers(1, 36), S=st.integers(1, 36), D=st.integers(1, 40),
       heads=st.sampled_from([(1, 1), (4, 2), (2, 1)]), causal=st.booleans(), window=st.none() | st.integers(0, 40),
       dropout_p=st.sampled_from([0.0, 0.3]),
       tile=st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32])), scale=st.sampled_from([None, 0.7]))
@example(T=40, S=20, D=16, heads=(4, 2), causal=True, window=None, dropout_p=0.3, tile=(16, 16), scale=None)
@example(T=20, S=40, D=16, heads=(1, 1), causal=False, window=10**12, dropout_p=0.0, tile=(16, 32), scale=None)
@example(T=50, S=20, D=16, heads=(1, 1), causal=False, window=25, dropout_p=0.0, tile=(16, 16), scale=None)
@example(T=40, S=40, D=16, heads=(1, 1), causal=True, window=17, dropout_p=0.0, tile=(16, 16), scale=None)
def test_it_is_the_reference(T, S, D, heads, causal, window, dropout_p, tile, scale, kit):
    inputs = kit.inputs(1 if T > 20 else 2, *heads, T, S, D)
    options = {"causal": causal, "window": window, "dropout_p": dropout_p, "scale": scale, "seed": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "INTERPRETED", Config(*tile, 4, 1))
        ours = kit.gradients(flash_attention, *inputs, **options)
    close(ours, kit.gradients(reference_attention, *inputs, **options))


SIZES = [16, 40, 59, 96, 111, 256]
SHAPES = [(1, 2, {}), (70, 70, {"causal": True}), (33, 130, {"causal": True, "window": 20}),
          (130, 33, {"causal": True})]


# Each shape with each D once, and each of these with each dtype.
@pytest.mark.parametrize(("T", "S", "options", "D", "dtype"), [
    (*shape, D, DTYPES[(i + j // 2) % 2]) for i, D in enumerate(SIZES) for j, shape in enumerate(SHAPES)], ids=str)
def test_as_exact_as_plain_attention(T, S, D, dtype, options, kit):
    given = kit.inputs(4 if T == 1 else 1, 2, 1, T, S, D, dtype)
    kit.assert_as_exact_as_plain(flash_attention, reference_attention, *given, **options)


def test_large_scores_do_not_overflow(kit):
    q, k, v, gradient = kit.inputs(T=40, S=40, D=16)
    with torch.no_grad():
        q.mul_(100)
    kit.assert_as_exact_as_plain(flash_attention, reference_attention, q, k, v, gradient, causal=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}, {"causal": True, "window": 9}], ids=str)
def test_packed_sequences_forward_and_backward(options, dropout_p, kit, tiles):
    tiles(16, 16)
    given = kit.inputs(B=1, T=67, S=71, D=16)
    packed = {"cu_seqlens": [0, 26, 26, 43, 67], "cu_seqlens_k": torch.tensor([0, 39, 50, 50, 71], dtype=torch.int32)}
    options = options | packed | {"dropout_p": dropout_p, "seed": 3}
    close(*(kit.gradients(f, *given, **options) for f in (flash_attention, reference_attention)))


def test_any_strides_of_inputs_and_of_the_gradient(kit):
    q, k, v, gradient = kit.inputs(T=20, S=20, D=16)
    expected = kit.gradients(flash_attention, q, k, v, gradient, causal=True)
    strided = [x.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_() for x in (q, k, v)]
    turned = gradient.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    cut = gradient.repeat(1, 2, 2, 2)[:, ::2, :20, :16].copy_(gradient)
    for other in (turned, cut):
        assert not other.is_contiguous()
        close(kit.gradients(flash_attention, *strided, other, causal=True), expected)
    out = flash_attention(q, k, v)  # the gradient of a sum has strides of 0
    close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(reference_attention(q, k, v).sum(), q))


def test_gradients_lie_in_memory_as_the_inputs_do_and_heads_are_joined_without_a_copy(kit):
    q, k, v, gradient = (x.detach().permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in kit.inputs())
    out, *grads = kit.gradients(flash_attention, *(x.requires_grad_() for x in (q, k, v)), gradient)
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]
    assert out.transpose(1, 2).is_contiguous()


def test_every_element_is_written(kit, tiles):
    """Memory that is handed out full of NaN."""
    tiles(16, 32)
    inputs = kit.inputs(1, 2, 1, 50, 21, 19)
    expected = kit.gradients(reference_attention, *inputs, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2).isnan().all()
        close(kit.gradients(flash_attention, *inputs, causal=True), expected)
        packed = {"cu_seqlens": [0, 3, 50], "cu_seqlens_k": [0, 21, 21]}  # queries without keys, keys without queries
        assert all(x.isfinite().all() for x in kit.gradients(flash_attention, *inputs, **packed))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 20, "dropout_p": 0.4}], ids=str)
def test_the_logsumexp_is_natural_and_differentiable(options, kit):
    q, k, v, gradient = kit.inputs(1, 2, 1, 33, 40, 16)
    weights, ours, expected = torch.randn(1, 2, 33), [], []
    for found, attention in ((ours, flash_attention), (expected, reference_attention)):
        out, lse = attention(q, k, v, return_logsumexp=True, seed=7, **options)
        found += [out, lse, *torch.autograd.grad((out * gradient).sum() + (lse * weights).sum(), (q, k, v))]
        lse = attention(q, k, v, return_logsumexp=True, seed=7, **options)[1]
        found += torch.autograd.grad((lse * weights).sum(), (q, k))  # no gradient comes to the output
    close(ours, expected)


def test_a_row_that_sees_nothing_whatever_gradient_comes_back(kit):
    q, k, v, gradient = kit.inputs(T=9, S=4)
    gradient[:, :, :5] = math.nan
    out, lse = flash_attention(q, k, v, causal=True, return_logsumexp=True)
    assert (out[:, :, :5] == 0).all() and (lse[:, :, :5] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), gradient)
    assert (dq[:, :, :5] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_inf_reach_the_rows_that_see_them_and_no_tile_beside(which, value, kit, tiles):
    tiles(16, 16)
    given = kit.inputs(1, 2, 1, 48, 48, 4, requires_grad=False)
    given[which][0, :, 40, 1] = value
    ours, reference = flash_attention(*given[:3]), reference_attention(*given[:3])
    torch.testing.assert_close(ours, reference, equal_nan=True)
    ours, reference = flash_attention(*given[:3], causal=True), reference_attention(*given[:3], causal=True)
    torch.testing.assert_close(ours[:, :, 40:], reference[:, :, 40:], equal_nan=True)
    assert ours[:, :, :32].isfinite().all()  # tiles above the diagonal are not visited


@pytest.mark.parametrize("before", [True, False])
def test_keys_outside_the_window_are_not_visited(before, kit, tiles):
    tiles(16, 16)
    q, k, v, gradient = kit.inputs(1, 1, 1, 64, 64, 16, requires_grad=False)
    v[:, :, slice(0, 16) if before else slice(48, 64)] = math.nan
    out = flash_attention(q, k, v, window=3, causal=before)
    assert out[:, :, slice(32, 64) if before else slice(0, 32)].isfinite().all()
    q, k, v = (x.requires_grad_() for x in (q, k, v.nan_to_num()))
    gradient[:, :, slice(0, 16) if before else slice(48, 64)] = math.nan  # nor queries, for the gradient of keys
    for d in torch.autograd.grad(flash_attention(q, k, v, window=3), (k, v), gradient):
        assert d[:, :, slice(32, 64) if before else slice(0, 32)].isfinite().all()


def test_a_row_whose_every_score_is_minus_infinity_is_nan_as_in_the_reference(kit):
    q, k, v, gradient = kit.inputs(1, 1, 1, 7, 7, 4)
    with torch.no_grad():
        q[:, :, 4], k[:] = -math.inf, 1.0
    ours, reference = (kit.gradients(f, q, k, v, gradient) for f in (flash_attention, reference_attention))
    assert ours[0][0, 0, 4].isnan().all()
    for a, b in zip(ours, reference, strict=True):
        assert torch.equal(a.isnan(), b.isnan())


def test_tiles_full_of_minus_infinity_before_finite_scores(kit, tiles):
    tiles(16, 16)
    q, k, v, gradient = kit.inputs(1, 1, 1, 20, 48, 4)
    with torch.no_grad():
        q[..., 0], k[:, :, :32, 0] = 1.0, -math.inf
    close(kit.gradients(flash_attention, q, k, v, gradient)[:1], [reference_attention(q, k, v)])


def test_dropout_follows_torchs_generator_and_backward_draws_the_same_mask(kit):
    q, k, v, _ = kit.inputs(T=30, S=30, D=16)
    torch.manual_seed(2)
    first, second = flash_attention(q, k, v, dropout_p=0.5), flash_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(2)
    seed = torch.randint(0, 2**63 - 1, ())
    assert not torch.equal(first, second)
    expected = reference_attention(q, k, v, dropout_p=0.5, seed=seed)
    close([first], [expected])
    torch.rand(5)  # the generator goes on before backward
    close(torch.autograd.grad(first.sum(), v), torch.autograd.grad(expected.sum(), v))


# --- what surrounds it -----------------------------------------------------------------------------------------------


def test_without_memory(kit):
    q, k, v, _ = kit.inputs(dtype=torch.bfloat16)
    found = kit.gradients(flash_attention, *(x.to("meta") for x in (q, k, v, q)), dropout_p=0.1, causal=True)
    assert [x.shape for x in found] == [q.shape, q.shape, k.shape, v.shape]


def test_where_no_kernel_runs_tiles_in_pytorch_do_the_same(kit, monkeypatch):
    for dtype, interpret in ((torch.float64, "1"), (torch.bfloat16, "0"), (torch.float32, None)):
        given = kit.inputs(T=20, S=20, D=16, dtype=dtype)
        if interpret is None:
            monkeypatch.delenv("TRITON_INTERPRET")
        else:
            monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.setattr(flash, "attention_forward", None)
        options = {"causal": True, "window": 5, "dropout_p": 0.2, "seed": 4, "scale": 0.3, "cu_seqlens": [0, 8, 20]}
        given = [x[:1] for x in given]
        out, lse = flash_attention(*given[:3], return_logsumexp=True, **options)
        expected = reference_attention(*given[:3], return_logsumexp=True, **options)
        torch.testing.assert_close((out, lse), expected)


def test_saved_rows_may_come_back_in_any_strides(kit):
    """Hooks on saved tensors, such as offloading, may lay them out anew."""
    q, k, v, gradient = kit.inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT):
        out = flash_attention(q, k, v)
    found = torch.autograd.grad(out, (q, k, v), gradient)
    torch.testing.assert_close(found, kit.gradients(flash_attention, q, k, v, gradient)[1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu", torch.bfloat16), autocast])
def test_under_autocast(region, kit):
    q, k, v, gradient = kit.inputs(T=20, S=20, dtype=torch.float16)
    expected = kit.gradients(flash_attention, q, k, v, gradient, causal=True)
    with region():
        ours = kit.gradients(flash_attention, q, k, v, gradient, causal=True)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 20}], ids=str)
def test_bytes_are_exact(dtype, dropout_p, options, kit, tiles):
    tiles(128, 128)  # fewer steps to interpret; bytes do not depend on it
    for T, S, G in [(96, 96, 2), (131, 96, 1), (1, 127, 1)]:
        shapes = (1, 2, T, 16), (1, G, S, 16)
        read = kit.read(flash_attention, shapes, dtype, seed=1, dropout_p=dropout_p, **options)
        assert flash_attention_bytes(*shapes, dtype, dropout_p=dropout_p, **options) == read, (T, S)


def keeps_the_matrix(q, k, v, **options):
    """The mutant: right values, nothing saved."""
    return reference_attention(q, k, v, **options)


def test_the_slope_is_one_and_the_dense_version_fails_here(kit, tiles):
    tiles(128, 128)  # fewer steps to interpret
    assert kit.slope(flash_attention) == pytest.approx(1, abs=0.01)
    assert not kit.slope(keeps_the_matrix) == pytest.approx(1, abs=0.01)


def test_the_same_bytes_for_any_strides_and_in_a_dry_run(kit):
    shapes = (2, 4, 64, 16), (2, 2, 64, 16)

    def step(transposed, dropout_p=0.0):
        q, k, v, gradient = kit.inputs(2, 4, 2, 64, 64, 16)
        if transposed:
            q, k, v, gradient = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, gradient))
        with memory.track(q, k, v, gradient) as t:
            out = flash_attention(*(x.requires_grad_() for x in (q, k, v)), dropout_p=dropout_p, causal=True)
            out.backward(gradient)
        return t.peak.total - t.start.total

    predicted = flash_attention_bytes(*shapes).peak
    assert step(False) == step(True) == predicted
    assert memory.dry_run(step, False).result == memory.dry_run(step, True).result == predicted
    assert memory.dry_run(step, False, 0.2).result == step(False, 0.2)


def test_a_dtype_without_kernels_has_no_bytes():
    with pytest.raises(ValueError, match="torch.float64: expected float16, bfloat16 or float32"):
        flash_attention_bytes((1, 1, 8, 8), (1, 1, 8, 8), torch.float64)
