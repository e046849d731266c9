"""Tiles against the reference: values, gradients, masks, and bytes that grow with the sequence and not its square."""

import functools
import math

import attention_kit as kit
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refimpl import memory
from refimpl.attention import flash_attention, reference_attention, tiled_attention, tiled_attention_bytes
from refimpl.mixed_precision import autocast

SMALL = functools.partial(tiled_attention, query_tile=4, key_tile=3)
assert_equal = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(T=st.integers(1, 23), S=st.integers(1, 23), D=st.integers(1, 9), heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
       causal=st.booleans(), window=st.none() | st.integers(0, 12), dropout_p=st.sampled_from([0.0, 0.3]),
       tile=st.tuples(st.integers(1, 9), st.integers(1, 9)), scale=st.sampled_from([None, 1.7]))
@example(T=9, S=3, D=4, heads=(4, 2), causal=True, window=None, dropout_p=0.3, tile=(2, 2), scale=None)
def test_it_is_the_reference(T, S, D, heads, causal, window, dropout_p, tile, scale):
    inputs = kit.inputs(2, *heads, T, S, D, torch.float64)
    options = {"causal": causal, "window": window, "dropout_p": dropout_p, "scale": scale, "seed": 5}
    tiled = functools.partial(tiled_attention, query_tile=tile[0], key_tile=tile[1])
    kit.assert_as_reference(tiled, assert_equal, inputs, **options)


# Each shape with each D once, and each of these with each dtype.
@pytest.mark.parametrize(("T", "S", "options", "D", "dtype"), [(*shape, D, DTYPES[(i + j) % 3]) for i, D in enumerate(
    [16, 40, 59, 111, 256]) for j, shape in enumerate(kit.SHAPES)], ids=str)
def test_as_exact_as_plain_attention(T, S, D, dtype, options):
    given = kit.inputs(8 if T == 1 else 1, 2, 1, T, S, D, dtype)
    tiled = functools.partial(tiled_attention, query_tile=64, key_tile=48)
    kit.assert_as_exact_as_plain(tiled, reference_attention, *given, **options)


def test_large_scores_do_not_overflow():
    given = kit.inputs(T=12, S=12)
    given[0].data.mul_(200)
    kit.assert_as_exact_as_plain(SMALL, reference_attention, *given, causal=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}, {"causal": True, "window": 3}], ids=str)
def test_packed_sequences_forward_and_backward(options, dropout_p):
    packed = {"cu_seqlens": [0, 6, 6, 13, 17], "cu_seqlens_k": torch.tensor([0, 7, 10, 10, 19], dtype=torch.int32)}
    options = options | packed | {"dropout_p": dropout_p, "seed": 3}
    kit.assert_as_reference(SMALL, assert_equal, kit.inputs(B=1, T=17, S=19, dtype=torch.float64), **options)


def test_packing_gives_what_each_sequence_gives_alone():
    q, k, v, gradient = kit.inputs(B=1, T=11, S=11, dtype=torch.float64)
    packed = kit.gradients(SMALL, q, k, v, gradient, causal=True, cu_seqlens=[0, 4, 11])
    for first, end in ((0, 4), (4, 11)):
        alone = kit.gradients(SMALL, *(x[:, :, first:end] for x in (q, k, v, gradient)), causal=True)
        assert_equal([x[:, :, first:end] for x in packed], alone)


def test_any_strides_of_inputs_and_of_the_gradient():
    kit.assert_any_strides(SMALL, assert_equal, *kit.inputs(T=10, S=10, D=6, dtype=torch.float64))


def test_one_tensor_as_q_k_and_v():
    x = kit.inputs(H=2, T=6, dtype=torch.float64)[0]
    ours, expected = (f(x, x, x, causal=True).square().sum() for f in (SMALL, reference_attention))
    assert_equal(torch.autograd.grad(ours, x)[0], torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 1, "dropout_p": 0.4}], ids=str)
def test_gradcheck_with_the_logsumexp(options):
    q, k, v, _ = kit.inputs(1, 2, 1, 5, 6, 3, torch.float64)
    both = functools.partial(SMALL, return_logsumexp=True, seed=7, **options)
    assert torch.autograd.gradcheck(both, (q, k, v))
    assert_equal(both(q, k, v), reference_attention(q, k, v, return_logsumexp=True, seed=7, **options))
    lse = both(q, k, v)[1], reference_attention(q, k, v, return_logsumexp=True, **options)[1]
    assert_equal(*(torch.autograd.grad(x[:, :, 3:].sum(), q) for x in lse))


def test_a_row_that_sees_nothing_whatever_gradient_comes_back():
    kit.assert_rows_that_see_nothing(SMALL, *kit.inputs(T=9, S=4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_inf_reach_the_rows_that_see_them(which, value):
    given = kit.inputs(1, 2, 1, 8, 8, 4, requires_grad=False)[:3]
    kit.assert_not_finite_as_reference(SMALL, given, which, value, at=5, before=3)


def test_a_row_whose_every_score_is_minus_infinity_is_nan_as_in_the_reference():
    kit.assert_nan_of_minus_infinity(SMALL)


@pytest.mark.parametrize("attention", [tiled_attention, flash_attention])
def test_the_backward_of_the_backward_is_refused(attention):
    q, k, v, gradient = kit.inputs()
    dq, = torch.autograd.grad(attention(q, k, v), q, gradient.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match=f"{attention.__name__}'s backward is not diff.* itself: use reference"):
        dq.sum().backward()


@pytest.mark.parametrize("attention", [tiled_attention, flash_attention])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_no_second_derivative_is_silently_left_out(which, dropout_p, attention):
    """∂(Σ out)/∂x depends on q, k and v, though its dO is a constant: a term of the loss would be missing."""
    given = kit.inputs(1, 2, 2, 8, 8, 4, torch.float64)[:3]
    out = attention(*given, dropout_p=dropout_p, seed=1)
    g, = torch.autograd.grad(out.sum(), given[which], create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable itself"):
        (out.pow(2).sum() + 100 * g.pow(2).sum()).backward()


@pytest.mark.parametrize("of", [0, 1], ids=["output", "logsumexp"])
def test_a_first_derivative_with_create_graph_is_as_without(of):
    q, k, v, _ = kit.inputs()
    found = [torch.autograd.grad(tiled_attention(q, k, v, return_logsumexp=True)[of].sum(), (q, k, v),
                                 create_graph=create_graph, materialize_grads=True) for create_graph in (False, True)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu", torch.bfloat16), autocast])
def test_under_autocast(region):
    given, tolerance = kit.inputs(T=20, S=20, dtype=torch.bfloat16), 0.05 if region is autocast else 0
    expected = kit.gradients(SMALL, *given, causal=True)
    with region():
        ours = kit.gradients(SMALL, *given, causal=True)  # its own backward, exact in here too
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert {x.dtype for x in ours} == {torch.bfloat16}


def test_dropout_follows_torchs_generator_and_backward_draws_the_same_mask():
    kit.assert_dropout_follows_the_generator(SMALL, assert_equal, *kit.inputs(T=9, S=9, dtype=torch.float64)[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 20}], ids=str)
def test_bytes_are_exact(dtype, dropout_p, options):
    for T, S, G, query_tile, key_tile in [(96, 96, 4, 32, 32), (131, 96, 2, 64, 16), (1, 127, 1, 16, 64),
                                          (30, 90, 1, 8, 10), (9, 4, 2, 128, 128)]:
        shapes, sizes = ((2, 4, T, 16), (2, G, S, 16)), {"query_tile": query_tile, "key_tile": key_tile}
        read = kit.read(tiled_attention, shapes, dtype, seed=1, dropout_p=dropout_p, **options, **sizes)
        predicted = tiled_attention_bytes(*shapes, dtype, dropout_p=dropout_p, **options, **sizes)
        assert predicted == read, (T, S)


def test_the_slope_is_one_and_the_dense_version_fails_here():
    assert kit.slope(functools.partial(tiled_attention, query_tile=32, key_tile=32)) == pytest.approx(1, abs=0.1)
    assert not kit.slope(reference_attention) == pytest.approx(1, abs=0.1)  # right values, nothing saved
    ours, dense = (kit.read(f, ((1, 2, 512, 16), (1, 1, 512, 16)), torch.float32)[0]
                   for f in (tiled_attention, reference_attention))
    assert ours * 20 < dense


def test_the_same_bytes_for_any_strides_and_in_a_dry_run():
    shapes, options = ((2, 4, 96, 16), (2, 2, 96, 16)), {"causal": True, "query_tile": 32, "key_tile": 32}
    predicted = tiled_attention_bytes(*shapes, **options).peak
    kit.assert_same_bytes_strided_and_dry(tiled_attention, shapes, predicted, **options)


def test_packed_sequences_in_a_dry_run():
    shapes = (1, 4, 12, 8), (1, 2, 12, 8)
    assert memory.dry_run(kit.read, SMALL, shapes, torch.float32, cu_seqlens=[0, 5, 12]).peak.total > 0
