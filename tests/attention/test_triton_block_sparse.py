"""The block-sparse kernels: in Triton's interpreter as exact as dense attention, for every size of block and tile."""

import functools

import attention_kit as kit
import pytest
import torch
from sparse_masks import check_as_exact_as_dense

from refimpl.attention import Alibi, Documents, PrefixLM, Softcap, alibi_slopes
from refimpl.attention.block_sparse import block_sparse_attention
from refimpl.attention.kernels.configs import Config
from refimpl.attention.masks import BlockMask, bigbird_mask, longformer_mask
from refimpl.attention.triton_block_sparse import fitted

pytestmark = kit.in_the_interpreter()
TRITON = functools.partial(block_sparse_attention, kernel="triton")


@pytest.mark.parametrize("seed", range(6))
def test_as_exact_as_dense_attention(seed):
    check_as_exact_as_dense(TRITON, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(6, 66, 12)], ids=str)
def test_as_exact_as_dense_attention_on_more_masks(seeds):
    for seed in seeds:
        check_as_exact_as_dense(TRITON, seed)


@pytest.mark.parametrize(("score", "heads"), [
    (Softcap(1.5), 1), ([Softcap(2.0), Alibi(alibi_slopes(4))], 4),
    (Documents(torch.arange(200).view(2, 100) // 30), 1), (PrefixLM(torch.tensor([20, 70])), 4),
], ids=["softcap", "softcap and ALiBi", "documents", "prefixes"])
def test_hooks_are_those_of_the_form_in_pytorch(score, heads):
    mask = bigbird_mask(100, 9, 1, 1, 0, heads=heads, block=32)
    given = kit.inputs(2, 4, 2, 100, 100, 16, V=24)
    found, wanted = (kit.gradients(block_sparse_attention, *given, mask=mask, score=score, kernel=kernel)
                     for kernel in ("triton", "tiled"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_the_logsumexp_has_a_gradient_and_rows_that_see_nothing_have_none():
    mask = BlockMask.of(lambda b, h, i, j: (j <= i) & (i > 20), 60, block=32)
    given, found = kit.inputs(1, 2, 1, 60, 60, 16)[:3], []
    for kernel in ("triton", "tiled"):
        out, lse = block_sparse_attention(*given, mask, return_logsumexp=True, kernel=kernel)
        assert not out[:, :, :21].any() and (lse[:, :, :21] == -torch.inf).all()
        found.append((out, lse[:, :, 21:], *torch.autograd.grad(out.sum() + lse[:, :, 21:].sin().sum(), given)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_what_is_handed_out_is_written_before_it_is_read():
    given = kit.inputs(1, 2, 1, 70, 70, 16)
    mask = longformer_mask(70, 10, block=32)
    with kit.memory_full_of_nan(warn_only=True):
        found = kit.gradients(TRITON, *given, mask=mask)
    assert all(x.isfinite().all() for x in found)


def test_two_runs_are_equal_bit_by_bit_for_any_strides():
    q, k, v, gradient = kit.inputs(1, 4, 2, 70, 70, 16)
    mask = longformer_mask(70, 10, block=32)
    first = kit.gradients(TRITON, q, k, v, gradient, mask=mask)
    strided = [x.requires_grad_() for x in kit.transposed(q, k, v)]
    for x, y in zip(first, kit.gradients(TRITON, *strided, gradient, mask=mask), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("block", [32, 64, 128, 256])
def test_a_tile_lies_inside_of_a_block_and_has_whole_words(block):
    for config in (Config(128, 128, 8, 3), Config(32, 16, 8, 2), Config(16, 32, 8, 1)):
        found = fitted(config, block)
        assert block % found.block_m == block % found.block_n == 0 == found.block_n % 32


def test_autograd_fake_tensors_and_the_compiler_have_the_same_operators():
    given = kit.inputs(1, 2, 1, 40, 40, 16)
    mask = longformer_mask(40, 5, block=32)
    compiled = torch.compile(lambda q, k, v: TRITON(q, k, v, mask) * 2, backend="aot_eager", fullgraph=True)
    wanted = kit.gradients(lambda *x: TRITON(*x, mask) * 2, *given)
    for x, y in zip(kit.gradients(compiled, *given), wanted, strict=True):
        torch.testing.assert_close(x, y)
