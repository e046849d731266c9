"""Tiles against the reference: values, gradients, masks, and bytes that grow with the sequence and not its square."""

import functools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refimpl import memory
from refimpl.attention import flash_attention, reference_attention, tiled_attention, tiled_attention_bytes
from refimpl.mixed_precision import autocast

SMALL = functools.partial(tiled_attention, query_tile=4, key_tile=3)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# --- values and gradients --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(T=st.integers(1, 23), S=st.integers(1, 23), D=st.integers(1, 9), heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
       causal=st.booleans(), window=st.none() | st.integers(0, 12), dropout_p=st.sampled_from([0.0, 0.3]),
       tile=st.tuples(st.integers(1, 9), st.integers(1, 9)), scale=st.sampled_from([None, 1.7]))
@example(T=9, S=3, D=4, heads=(4, 2), causal=True, window=None, dropout_p=0.3, tile=(2, 2), scale=None)
def test_it_is_the_reference(T, S, D, heads, causal, window, dropout_p, tile, scale, kit):
    inputs = kit.inputs(2, *heads, T, S, D, torch.float64)
    options = {"causal": causal, "window": window, "dropout_p": dropout_p, "scale": scale, "seed": 5}
    tiled = functools.partial(tiled_attention, query_tile=tile[0], key_tile=tile[1])
    for a, b in zip(*(kit.gradients(f, *inputs, **options) for f in (tiled, reference_attention)), strict=True):
        assert_equal(a, b)


SHAPES = [(1, 2, {}), (70, 70, {"causal": True}), (33, 130, {"causal": True, "window": 20}),
          (130, 33, {"causal": True}), (65, 97, {"window": 9}), (1, 200, {"causal": True})]


# Each shape with each D once, and each of these with each dtype.
@pytest.mark.parametrize(("T", "S", "options", "D", "dtype"), [
    (*shape, D, DTYPES[(i + j) % 3]) for i, D in enumerate([16, 40, 59, 111, 256]) for j, shape in enumerate(SHAPES)],
    ids=str)
def test_as_exact_as_plain_attention(T, S, D, dtype, options, kit):
    given = kit.inputs(8 if T == 1 else 1, 2, 1, T, S, D, dtype)
    tiled = functools.partial(tiled_attention, query_tile=64, key_tile=48)
    kit.assert_as_exact_as_plain(tiled, reference_attention, *given, **options)


def test_large_scores_do_not_overflow(kit):
    q, k, v, gradient = kit.inputs(T=12, S=12)
    with torch.no_grad():
        q.mul_(200)
    kit.assert_as_exact_as_plain(SMALL, reference_attention, q, k, v, gradient, causal=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}, {"causal": True, "window": 3}], ids=str)
def test_packed_sequences_forward_and_backward(options, dropout_p, kit):
    given = kit.inputs(B=1, T=17, S=19, dtype=torch.float64)
    packed = {"cu_seqlens": [0, 6, 6, 13, 17], "cu_seqlens_k": torch.tensor([0, 7, 10, 10, 19], dtype=torch.int32)}
    options = options | packed | {"dropout_p": dropout_p, "seed": 3}
    for a, b in zip(*(kit.gradients(f, *given, **options) for f in (SMALL, reference_attention)), strict=True):
        assert_equal(a, b)


def test_packing_gives_what_each_sequence_gives_alone(kit):
    q, k, v, gradient = kit.inputs(B=1, T=11, S=11, dtype=torch.float64)
    packed = kit.gradients(SMALL, q, k, v, gradient, causal=True, cu_seqlens=[0, 4, 11])
    for first, end in ((0, 4), (4, 11)):
        alone = kit.gradients(SMALL, *(x[:, :, first:end] for x in (q, k, v, gradient)), causal=True)
        for a, b in zip(packed, alone, strict=True):
            assert_equal(a[:, :, first:end], b)


def test_any_strides_of_inputs_and_of_the_gradient(kit):
    q, k, v, gradient = kit.inputs(T=10, S=10, D=6, dtype=torch.float64)
    expected = kit.gradients(SMALL, q, k, v, gradient, causal=True)
    strided = [x.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_() for x in (q, k, v)]
    for change in (lambda x: x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1), lambda x: x.repeat(1, 2, 2, 2)
                   [:, ::2, :10, :6].copy_(x)):
        given = change(gradient)
        assert not given.is_contiguous()
        for a, b in zip(kit.gradients(SMALL, *strided, given, causal=True), expected, strict=True):
            assert_equal(a, b)
    out = SMALL(q, k, v)
    assert_equal(torch.autograd.grad(out.sum(), q)[0], torch.autograd.grad(SMALL(q, k, v), q, torch.ones_like(out))[0])


def test_one_tensor_as_q_k_and_v(kit):
    x = kit.inputs(H=2, T=6, dtype=torch.float64)[0]
    ours, expected = (f(x, x, x, causal=True).square().sum() for f in (SMALL, reference_attention))
    assert_equal(torch.autograd.grad(ours, x)[0], torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 1, "dropout_p": 0.4}], ids=str)
def test_gradcheck_with_the_logsumexp(options, kit):
    q, k, v, _ = kit.inputs(1, 2, 1, 5, 6, 3, torch.float64)
    both = functools.partial(SMALL, return_logsumexp=True, seed=7, **options)
    assert torch.autograd.gradcheck(both, (q, k, v))
    for a, b in zip(both(q, k, v), reference_attention(q, k, v, return_logsumexp=True, seed=7, **options), strict=True):
        assert_equal(a, b)
    one, = torch.autograd.grad(both(q, k, v)[1][:, :, 3:].sum(), q)
    other, = torch.autograd.grad(reference_attention(q, k, v, return_logsumexp=True, **options)[1][:, :, 3:].sum(), q)
    assert_equal(one, other)


def test_a_row_that_sees_nothing_whatever_gradient_comes_back(kit):
    q, k, v, gradient = kit.inputs(T=9, S=4)
    gradient[:, :, :5] = math.nan
    out, lse = SMALL(q, k, v, causal=True, return_logsumexp=True)
    assert (out[:, :, :5] == 0).all() and (lse[:, :, :5] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), gradient)
    assert (dq[:, :, :5] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_inf_reach_the_rows_that_see_them(which, value, kit):
    given = kit.inputs(1, 2, 1, 8, 8, 4, requires_grad=False)
    given[which][0, :, 5, 1] = value
    ours, reference = SMALL(*given[:3]), reference_attention(*given[:3])
    torch.testing.assert_close(ours, reference, equal_nan=True)
    ours, reference = SMALL(*given[:3], causal=True), reference_attention(*given[:3], causal=True)
    torch.testing.assert_close(ours[:, :, 5:], reference[:, :, 5:], equal_nan=True)
    assert ours[:, :, :3].isfinite().all()  # what lies in tiles left out reaches nobody


def test_a_row_whose_every_score_is_minus_infinity_is_nan_as_in_the_reference(kit):
    q, k, v, gradient = kit.inputs(1, 1, 1, 7, 7, 4)
    with torch.no_grad():
        q[:, :, 4], k[:] = -math.inf, 1.0
    ours, reference = (kit.gradients(f, q, k, v, gradient) for f in (SMALL, reference_attention))
    assert ours[0][0, 0, 4].isnan().all()
    for a, b in zip(ours, reference, strict=True):
        assert torch.equal(a.isnan(), b.isnan())


# --- what surrounds it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [tiled_attention, flash_attention])
def test_the_backward_of_the_backward_is_refused(attention, kit):
    q, k, v, gradient = kit.inputs()
    dq, = torch.autograd.grad(attention(q, k, v), q, gradient.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match=f"{attention.__name__}'s backward is not diff.* itself: use reference"):
        dq.sum().backward()


@pytest.mark.parametrize("attention", [tiled_attention, flash_attention])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_no_second_derivative_is_silently_left_out(which, dropout_p, attention, kit):
    """∂(Σ out)/∂x depends on q, k and v, though its dO is a constant: a term of the loss would be missing."""
    given = kit.inputs(1, 2, 2, 8, 8, 4, torch.float64)[:3]
    out = attention(*given, dropout_p=dropout_p, seed=1)
    g, = torch.autograd.grad(out.sum(), given[which], create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable itself"):
        (out.pow(2).sum() + 100 * g.pow(2).sum()).backward()


@pytest.mark.parametrize("of", [0, 1], ids=["output", "logsumexp"])
def test_a_first_derivative_with_create_graph_is_as_without(of, kit):
    q, k, v, _ = kit.inputs()
    found = [torch.autograd.grad(tiled_attention(q, k, v, return_logsumexp=True)[of].sum(), (q, k, v),
                                 create_graph=create_graph, materialize_grads=True) for create_graph in (False, True)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu", torch.bfloat16), autocast])
def test_under_autocast(region, kit):
    q, k, v, gradient = kit.inputs(T=20, S=20, dtype=torch.bfloat16)
    expected = kit.gradients(SMALL, q, k, v, gradient, causal=True)
    with region():
        ours = kit.gradients(SMALL, q, k, v, gradient, causal=True)  # its own backward, exact in here too
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == torch.bfloat16
        if region is autocast:
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
        else:
            assert torch.equal(a, b)


def test_dropout_follows_torchs_generator_and_backward_draws_the_same_mask(kit):
    q, k, v, _ = kit.inputs(T=9, S=9, dtype=torch.float64)
    torch.manual_seed(2)
    first, second = SMALL(q, k, v, dropout_p=0.5), SMALL(q, k, v, dropout_p=0.5)
    torch.manual_seed(2)
    seed = torch.randint(0, 2**63 - 1, ())
    assert not torch.equal(first, second)
    expected = reference_attention(q, k, v, dropout_p=0.5, seed=seed)
    assert_equal(first, expected)
    torch.rand(5)  # the generator goes on before backward
    assert_equal(torch.autograd.grad(first.sum(), v)[0], torch.autograd.grad(expected.sum(), v)[0])


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 20}], ids=str)
def test_bytes_are_exact(dtype, dropout_p, options, kit):
    for T, S, G, query_tile, key_tile in [(96, 96, 4, 32, 32), (131, 96, 2, 64, 16), (1, 127, 1, 16, 64),
                                          (30, 90, 1, 8, 10), (9, 4, 2, 128, 128)]:
        shapes, sizes = ((2, 4, T, 16), (2, G, S, 16)), {"query_tile": query_tile, "key_tile": key_tile}
        read = kit.read(tiled_attention, shapes, dtype, seed=1, dropout_p=dropout_p, **options, **sizes)
        predicted = tiled_attention_bytes(*shapes, dtype, dropout_p=dropout_p, **options, **sizes)
        assert predicted == read, (T, S)


def keeps_the_matrix(q, k, v, **options):
    """The mutant: right values, nothing saved."""
    return reference_attention(q, k, v, **options)


def test_the_slope_is_one_and_the_dense_version_fails_here(kit):
    assert kit.slope(functools.partial(tiled_attention, query_tile=32, key_tile=32)) == pytest.approx(1, abs=0.1)
    assert not kit.slope(keeps_the_matrix) == pytest.approx(1, abs=0.1)
    kept = [kit.read(f, ((1, 2, 512, 16), (1, 1, 512, 16)), torch.float32)[0] for f in (tiled_attention,
                                                                                        keeps_the_matrix)]
    assert kept[0] * 20 < kept[1]


def test_the_same_bytes_for_any_strides_and_in_a_dry_run(kit):
    shapes, options = ((2, 4, 96, 16), (2, 2, 96, 16)), {"causal": True, "query_tile": 32, "key_tile": 32}

    def step(transposed, dropout_p=0.0):
        q, k, v, gradient = kit.inputs(2, 4, 2, 96, 96, 16)
        if transposed:
            q, k, v, gradient = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, gradient))
        with memory.track(q, k, v, gradient) as t:
            tiled_attention(*(x.requires_grad_() for x in (q, k, v)), dropout_p=dropout_p, **options).backward(gradient)
        return t.peak.total - t.start.total

    predicted = tiled_attention_bytes(*shapes, **options).peak
    assert step(False) == step(True) == predicted
    assert memory.dry_run(step, False).result == predicted
    assert memory.dry_run(step, False, 0.2).result == step(False, 0.2)


def test_packed_sequences_in_a_dry_run(kit):
    def step():
        q, k, v, gradient = kit.inputs(B=1, T=12, S=12)
        SMALL(q, k, v, cu_seqlens=[0, 5, 12]).backward(gradient)

    assert memory.dry_run(step).peak.total > 0
