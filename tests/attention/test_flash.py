"""The Triton kernels, interpreted on the CPU: values, gradients, masks and bytes. Elsewhere: on a GPU (tests/gpu)."""

import math

import attention_kit as kit
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refimpl.attention import flash, flash_attention, flash_attention_bytes, reference_attention
from refimpl.attention.kernels import configs
from refimpl.attention.kernels.configs import Config
from refimpl.mixed_precision import autocast

pytestmark = kit.in_the_interpreter()
DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def tiles(monkeypatch):
    """tiles(block_m, block_n): other ones than the interpreter's own."""
    return lambda m, n: monkeypatch.setattr(configs, "INTERPRETED", Config(m, n, 4, 1))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(T=st.integers(1, 36), S=st.integers(1, 36), D=st.integers(1, 40),
       heads=st.sampled_from([(1, 1), (4, 2), (2, 1)]), causal=st.booleans(), window=st.none() | st.integers(0, 40),
       dropout_p=st.sampled_from([0.0, 0.3]),
       tile=st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32])), scale=st.sampled_from([None, 0.7]))
@example(T=40, S=20, D=16, heads=(4, 2), causal=True, window=None, dropout_p=0.3, tile=(16, 16), scale=None)
@example(T=20, S=40, D=16, heads=(1, 1), causal=False, window=10**12, dropout_p=0.0, tile=(16, 32), scale=None)
@example(T=50, S=20, D=16, heads=(1, 1), causal=False, window=25, dropout_p=0.0, tile=(16, 16), scale=None)
@example(T=40, S=40, D=16, heads=(1, 1), causal=True, window=17, dropout_p=0.0, tile=(16, 16), scale=None)
def test_it_is_the_reference(T, S, D, heads, causal, window, dropout_p, tile, scale):
    inputs = kit.inputs(1 if T > 20 else 2, *heads, T, S, D)
    options = {"causal": causal, "window": window, "dropout_p": dropout_p, "scale": scale, "seed": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "INTERPRETED", Config(*tile, 4, 1))
        kit.assert_as_reference(flash_attention, kit.assert_close, inputs, **options)


# Each shape with each D once, and each of these with each dtype.
@pytest.mark.parametrize(("T", "S", "options", "D", "dtype"), [
    (*shape, D, DTYPES[(i + j // 2) % 2])
    for i, D in enumerate([16, 40, 59, 96, 111, 256]) for j, shape in enumerate(kit.SHAPES[:4])], ids=str)
def test_as_exact_as_plain_attention(T, S, D, dtype, options):
    given = kit.inputs(4 if T == 1 else 1, 2, 1, T, S, D, dtype)
    kit.assert_as_exact_as_plain(flash_attention, reference_attention, *given, **options)


def test_large_scores_do_not_overflow():
    given = kit.inputs(T=40, S=40, D=16)
    given[0].data.mul_(100)
    kit.assert_as_exact_as_plain(flash_attention, reference_attention, *given, causal=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}, {"causal": True, "window": 9}], ids=str)
def test_packed_sequences_forward_and_backward(options, dropout_p, tiles):
    tiles(16, 16)
    packed = {"cu_seqlens": [0, 26, 26, 43, 67], "cu_seqlens_k": torch.tensor([0, 39, 50, 50, 71], dtype=torch.int32)}
    options = options | packed | {"dropout_p": dropout_p, "seed": 3}
    kit.assert_as_reference(flash_attention, kit.assert_close, kit.inputs(B=1, T=67, S=71, D=16), **options)


def test_any_strides_of_inputs_and_of_the_gradient():
    kit.assert_any_strides(flash_attention, kit.assert_close, *kit.inputs(T=20, S=20, D=16))


def test_gradients_lie_in_memory_as_the_inputs_do_and_heads_are_joined_without_a_copy():
    q, k, v, gradient = (x.detach().permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in kit.inputs())
    out, *grads = kit.gradients(flash_attention, *(x.requires_grad_() for x in (q, k, v)), gradient)
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)] and out.transpose(1, 2).is_contiguous()


def test_every_element_is_written(tiles):
    """Memory that is handed out full of NaN."""
    tiles(16, 32)
    inputs = kit.inputs(1, 2, 1, 50, 21, 19)
    expected = kit.gradients(reference_attention, *inputs, causal=True)
    with kit.memory_full_of_nan():
        assert torch.empty(2).isnan().all()
        kit.assert_close(kit.gradients(flash_attention, *inputs, causal=True), expected)
        packed = {"cu_seqlens": [0, 3, 50], "cu_seqlens_k": [0, 21, 21]}  # queries without keys, keys without queries
        assert all(x.isfinite().all() for x in kit.gradients(flash_attention, *inputs, **packed))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 20, "dropout_p": 0.4}], ids=str)
def test_the_logsumexp_is_natural_and_differentiable(options):
    q, k, v, gradient = kit.inputs(1, 2, 1, 33, 40, 16)
    weights, ours, expected = torch.randn(1, 2, 33), [], []
    for found, attention in ((ours, flash_attention), (expected, reference_attention)):
        out, lse = attention(q, k, v, return_logsumexp=True, seed=7, **options)
        found += [out, lse, *torch.autograd.grad((out * gradient).sum() + (lse * weights).sum(), (q, k, v))]
        lse = attention(q, k, v, return_logsumexp=True, seed=7, **options)[1]
        found += torch.autograd.grad((lse * weights).sum(), (q, k))  # no gradient comes to the output
    kit.assert_close(ours, expected)


def test_a_row_that_sees_nothing_whatever_gradient_comes_back():
    kit.assert_rows_that_see_nothing(flash_attention, *kit.inputs(T=9, S=4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_inf_reach_the_rows_that_see_them_and_no_tile_beside(which, value, tiles):
    tiles(16, 16)
    given = kit.inputs(1, 2, 1, 48, 48, 4, requires_grad=False)[:3]
    kit.assert_not_finite_as_reference(flash_attention, given, which, value, at=40, before=32)


@pytest.mark.parametrize("before", [True, False])
def test_keys_outside_the_window_are_not_visited(before, tiles):
    tiles(16, 16)
    q, k, v, gradient = kit.inputs(1, 1, 1, 64, 64, 16, requires_grad=False)
    v[:, :, slice(0, 16) if before else slice(48, 64)] = math.nan
    out = flash_attention(q, k, v, window=3, causal=before)
    assert out[:, :, slice(32, 64) if before else slice(0, 32)].isfinite().all()
    q, k, v = (x.requires_grad_() for x in (q, k, v.nan_to_num()))
    gradient[:, :, slice(0, 16) if before else slice(48, 64)] = math.nan  # nor queries, for the gradient of keys
    for d in torch.autograd.grad(flash_attention(q, k, v, window=3), (k, v), gradient):
        assert d[:, :, slice(32, 64) if before else slice(0, 32)].isfinite().all()


def test_a_row_whose_every_score_is_minus_infinity_is_nan_as_in_the_reference():
    kit.assert_nan_of_minus_infinity(flash_attention)


def test_tiles_full_of_minus_infinity_before_finite_scores(tiles):
    tiles(16, 16)
    q, k, v, gradient = kit.inputs(1, 1, 1, 20, 48, 4)
    q.data[..., 0], k.data[:, :, :32, 0] = 1.0, -math.inf
    kit.assert_close(kit.gradients(flash_attention, q, k, v, gradient)[:1], [reference_attention(q, k, v)])


def test_dropout_follows_torchs_generator_and_backward_draws_the_same_mask():
    kit.assert_dropout_follows_the_generator(flash_attention, kit.assert_close, *kit.inputs(T=30, S=30, D=16)[:3])


def test_without_memory():
    q, k, v, _ = kit.inputs(dtype=torch.bfloat16)
    found = kit.gradients(flash_attention, *(x.to("meta") for x in (q, k, v, q)), dropout_p=0.1, causal=True)
    assert [x.shape for x in found] == [q.shape, q.shape, k.shape, v.shape]


def test_where_no_kernel_runs_tiles_in_pytorch_do_the_same(monkeypatch):
    monkeypatch.setattr(flash, "attention_forward", None)
    options = {"causal": True, "window": 5, "dropout_p": 0.2, "seed": 4, "scale": 0.3, "cu_seqlens": [0, 8, 20]}
    for dtype, interpret in ((torch.float64, "1"), (torch.bfloat16, "0"), (torch.float32, None)):
        q, k, v = (x[:1] for x in kit.inputs(T=20, S=20, D=16, dtype=dtype)[:3])
        if interpret is None:
            monkeypatch.delenv("TRITON_INTERPRET")
        else:
            monkeypatch.setenv("TRITON_INTERPRET", interpret)
        torch.testing.assert_close(*(f(q, k, v, return_logsumexp=True, **options)
                                     for f in (flash_attention, reference_attention)))


def test_saved_rows_may_come_back_in_any_strides():
    """Hooks on saved tensors, such as offloading, may lay them out anew."""
    q, k, v, gradient = kit.inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT):
        out = flash_attention(q, k, v)
    found = torch.autograd.grad(out, (q, k, v), gradient)
    torch.testing.assert_close(found, kit.gradients(flash_attention, q, k, v, gradient)[1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu", torch.bfloat16), autocast])
def test_under_autocast(region):
    given = kit.inputs(T=20, S=20, dtype=torch.float16)
    expected = kit.gradients(flash_attention, *given, causal=True)
    with region():
        ours = kit.gradients(flash_attention, *given, causal=True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 20}], ids=str)
def test_bytes_are_exact(dtype, dropout_p, options, tiles):
    tiles(128, 128)  # fewer steps to interpret; bytes do not depend on it
    for T, S, G in [(96, 96, 2), (131, 96, 1), (1, 127, 1)]:
        shapes = (1, 2, T, 16), (1, G, S, 16)
        read = kit.read(flash_attention, shapes, dtype, seed=1, dropout_p=dropout_p, **options)
        assert flash_attention_bytes(*shapes, dtype, dropout_p=dropout_p, **options) == read, (T, S)


def test_the_slope_is_one_and_the_dense_version_fails_here(tiles):
    tiles(128, 128)  # fewer steps to interpret
    assert kit.slope(flash_attention) == pytest.approx(1, abs=0.01)
    assert not kit.slope(reference_attention) == pytest.approx(1, abs=0.01)  # right values, nothing saved


def test_the_same_bytes_for_any_strides_and_in_a_dry_run():
    shapes = (2, 4, 64, 16), (2, 2, 64, 16)
    kit.assert_same_bytes_strided_and_dry(flash_attention, shapes, flash_attention_bytes(*shapes).peak, causal=True)


def test_a_dtype_without_kernels_has_no_bytes():
    with pytest.raises(ValueError, match="torch.float64: expected float16, bfloat16 or float32"):
        flash_attention_bytes((1, 1, 8, 8), (1, 1, 8, 8), torch.float64)
