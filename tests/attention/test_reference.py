"""The reference against the definition pair by pair and PyTorch's; its FLOPs and bytes against counters."""

import functools
import itertools
import math

import attention_kit as kit
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.attention import attention_flops, reference_attention, reference_attention_bytes

near = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
MASKS = [{}, {"causal": True}, {"window": 0}, {"window": 2}, {"causal": True, "window": 2}]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (5, 5), (3, 8), (8, 3)])
def test_it_is_the_definition(T, S, options):
    kit.assert_as_reference(kit.pairwise, near, kit.inputs(T=T, S=S, dtype=torch.float64), scale=0.7, **options)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_packed_sequences_do_not_see_each_other(options):
    given = kit.inputs(B=1, T=9, S=11, dtype=torch.float64)
    packed = functools.partial(reference_attention, cu_seqlens=torch.tensor([0, 4, 4, 7, 9], dtype=torch.int32),
                               cu_seqlens_k=[0, 5, 7, 7, 11])
    loops = functools.partial(kit.pairwise, lengths=[4, 0, 3, 2], key_lengths=[5, 2, 0, 4])
    near(*(kit.gradients(f, *given, **options) for f in (packed, loops)))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_pytorchs(causal):
    given, torchs = kit.inputs(T=6, S=6), functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
    torch.testing.assert_close(kit.gradients(reference_attention, *given, causal=causal),
                               kit.gradients(torchs, *given, is_causal=causal))


def test_scores_are_gone_while_the_output_is_computed():
    """Values as wide as there are keys make the output as large as the scores: two such matrices at once, not three."""
    q, k, v, _ = kit.inputs(1, 1, 1, 64, 64, 8, V=64, requires_grad=False)
    with memory.track(q, k, v) as t:
        reference_attention(q, k, v)
    assert t.peak.total - t.start.total == 2 * 64 * 64 * 4


def test_rows_that_see_nothing_are_zero_and_have_no_gradient():
    kit.assert_rows_that_see_nothing(reference_attention, *kit.inputs(T=6, S=4))


def test_the_logsumexp_is_natural_and_differentiable():
    q, k, v, _ = kit.inputs(H=2, T=3, S=3, dtype=torch.float64)
    _, lse = reference_attention(q, k, v, scale=0.5, return_logsumexp=True)
    torch.testing.assert_close(lse, (0.5 * q @ k.mT).logsumexp(-1))
    both = functools.partial(reference_attention, causal=True, return_logsumexp=True)
    assert torch.autograd.gradcheck(both, (q, k, v)) and torch.autograd.gradgradcheck(both, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_reckons_in_fp32_or_wider_and_answers_in_qs_dtype(dtype):
    q, k, v, _ = kit.inputs(dtype=dtype)
    out, lse = reference_attention(q, k, v, return_logsumexp=True)
    wide = torch.promote_types(dtype, torch.float32)
    assert out.dtype == dtype and lse.dtype == wide
    assert torch.equal(out, reference_attention(q.to(wide), k.to(wide), v.to(wide)).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reference_attention(q, k, v), out)


def test_nan_and_inf_go_where_softmax_takes_them():
    q, k, v, _ = kit.inputs(T=4, S=4, requires_grad=False)
    k[:, :, 2, 0] = math.nan
    rows = reference_attention(q, k, v, causal=True).isnan().any(-1)
    assert torch.equal(rows, torch.tensor([False, False, True, True]).expand_as(rows))
    q, k, v, _ = kit.inputs(T=4, S=4, requires_grad=False)
    q[:], k[:] = 1, 1
    k[:, :, 1] = -math.inf
    others = v[:, :, [0, 2, 3]].mean(2)[:, :, None].expand(2, 2, 4, 8)
    torch.testing.assert_close(reference_attention(q, k, v)[:, ::2], others)
    k[:] = -math.inf
    assert reference_attention(q, k, v).isnan().all()  # 0/0: sees keys, all of weight zero


def test_dropout_drops_weights_and_keeps_their_mean():
    q, k, v = torch.zeros(2, 2, 40, 64), torch.zeros(2, 1, 50, 64), torch.eye(50, 64).expand(2, 1, 50, 64)
    weights = reference_attention(q, k, v, dropout_p=0.25, seed=4)[..., :50]  # all were 1/50
    kept = weights != 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 50 / 0.75))
    assert abs(kept.double().mean() - 0.75) < 0.02
    torch.manual_seed(1)
    first, second = (reference_attention(q, k, v, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, reference_attention(q, k, v, dropout_p=0.25)) and not torch.equal(first, second)


def test_gradients_with_dropout_are_right():
    q, k, v, _ = kit.inputs(T=4, S=5, D=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(functools.partial(reference_attention, dropout_p=0.4, seed=9), (q, k, v))


def test_flops_of_the_dense_case_are_those_that_torch_counts():
    q, k, v, gradient = kit.inputs(T=6, S=10)
    flops = attention_flops(q.shape, k.shape)
    with FlopCounterMode(display=False) as counted:
        out = reference_attention(q, k, v)
    assert counted.get_total_flops() == flops.forward
    with FlopCounterMode(display=False) as counted:
        out.backward(gradient)
    assert counted.get_total_flops() == flops.backward
    assert flops.backward_recomputing == 5 * flops.forward // 2


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_flops_count_the_pairs_that_are_seen(options):
    for T, S in itertools.product(range(1, 8), repeat=2):
        ones, eye = torch.ones(1, 1, max(T, S), 8), torch.eye(8)[None, None, :S]
        seen = reference_attention(ones[:, :, :T], ones[:, :, :S], eye, **options) > 0  # out is the weights
        assert attention_flops((3, 4, T, 8), (3, 2, S, 8), **options).pairs == 12 * seen.sum()
    assert attention_flops((1, 2, 7, 8), (1, 1, 7, 8), cu_seqlens=[0, 3, 7], causal=True).pairs == 2 * (6 + 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 5}], ids=str)
def test_bytes_are_exact(dtype, dropout_p, options):
    options = options | {"dropout_p": dropout_p}
    for shapes in (((2, 4, T, 16), (2, G, S, 16)) for T, S, G in [(96, 96, 4), (131, 96, 2), (64, 127, 1)]):
        read = kit.read(reference_attention, shapes, dtype, seed=1, **options)
        assert reference_attention_bytes(*shapes, dtype, **options) == read, shapes


def test_the_slope_is_two():
    assert kit.slope(reference_attention) == pytest.approx(2, abs=0.1)
