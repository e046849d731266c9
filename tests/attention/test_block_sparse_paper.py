"""The paper in code is the hardened version, block for block."""

import torch
from one_screen import check_paper
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.attention import block_sparse_attention, longformer_mask
from refimpl.papers import block_sparse as paper


def test_the_same_blocks_outputs_and_gradients():
    torch.manual_seed(0)
    T, N = 300, paper.N
    q, k, v = (torch.randn(2, 3, T, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    blocks = paper.lists(paper.longformer(70, 3), T)
    mask = longformer_mask(T, 70, 3, causal=True, block=N)
    assert [[C for C, _ in sorted(blocks[R], key=lambda each: each[0])] for R in sorted(blocks)] == [
        list(each) for each in mask.listed]
    found, wanted = paper.BlockSparse.apply(q, k, v, blocks), block_sparse_attention(q, k, v, mask)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(found)
    for x, y in zip(*(torch.autograd.grad(out, (q, k, v), gradient) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y)


def test_flops_and_bytes_are_linear_and_those_of_a_masked_product_are_not():
    def read(T, function):
        q, k, v = (torch.randn(1, 2, T, 16, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as counter, memory.track(q, k, v) as tracked:
            function(q, k, v).sum().backward()
        return counter.get_total_flops(), tracked.peak.total

    def sparse(q, k, v):
        return paper.BlockSparse.apply(q, k, v, paper.lists(paper.longformer(64, 0), q.shape[2]))

    def masked(q, k, v):  # the mutant: right values, all pairs
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
        scores = (q @ k.mT / 4).masked_fill(~paper.longformer(64, 0)(i, j), -torch.inf)
        return scores.softmax(-1) @ v

    for at, most in ((0, 2.1), (1, 2.1)):
        few, many = (read(T, sparse)[at] for T in (512, 1024))
        assert many < most * few
        few, many = (read(T, masked)[at] for T in (512, 1024))
        assert many > 1.5 * most * few


def test_one_screen():
    check_paper("attention", "block_sparse")
