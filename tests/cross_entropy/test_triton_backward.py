"""The backward kernels, interpreted: what is skipped is what is small, and the error stays within its bound."""

import torch
from head_kit import head
from interpreting import interpreted

from refimpl.cross_entropy.kernels.configs import INTERPRETED

M, V_TILE = INTERPRETED.block_m, INTERPRETED.block_v
SKIP = 2.0**-12
ROUNDING = 1e-3  # of exp(z − lse) in fp32, where z is near 100


def sharp(N=96, C=32, V=640):
    """A head that knows nearly every target, and all targets among few words: most tiles are negligible."""
    hidden, weight, targets, _ = head(N, C, V, needs=False, ignored=0)
    hidden, targets = hidden * 0.1, targets % 100
    hidden = (hidden + weight[targets] * 6).contiguous()
    targets[0] = (targets[0] + 1) % 100  # and one it gets wrong
    return hidden, weight, targets


def gradient_of(hidden, weight, targets):
    g = torch.softmax(hidden.double() @ weight.double().T, 1)
    g[torch.arange(len(g)), targets] -= 1
    return g


def tiles_of(g):
    return g.abs().view(len(g) // M, M, -1, V_TILE).amax((1, 3))


def test_what_is_left_out_is_what_is_small():
    given = sharp()
    g = gradient_of(*given)
    (dh, dw, used), again = interpreted([("head_bodies:skipping", (*given, SKIP), {})] * 2)
    used = used.bool()
    assert torch.equal(used, tiles_of(g) > SKIP) and 0 < used.sum() < 0.8 * used.numel()
    kept = g * used.repeat_interleave(M, 0).repeat_interleave(V_TILE, 1)
    hidden, weight, _ = given
    torch.testing.assert_close(dh.double(), kept @ weight.double(), rtol=1e-4, atol=ROUNDING)
    torch.testing.assert_close(dw.double(), kept.T @ hidden.double(), rtol=1e-4, atol=ROUNDING)
    assert all(torch.equal(a, b) for a, b in zip((dh, dw), again, strict=False))  # every run: the same bits


def of_its_bound(found, whole, given, skip):
    """The largest error of dh and dW beside a run that skips nothing, as a part of its bound in `triton_backward`."""
    hidden, weight, _ = given
    row, word = ((a - b).double().norm(dim=1) for a, b in zip(found[:2], whole[:2], strict=True))
    row_bound = min(1, len(weight) * skip) * weight.norm(dim=1).max()
    word_bound = skip * hidden.norm(dim=1).sum()
    return max((row / row_bound).max().item(), (word / word_bound).max().item())


def test_the_error_is_within_its_bound_and_that_of_a_larger_skip_is_not():
    given = sharp()
    right, wrong, whole = interpreted([("head_bodies:skipping", (*given, skip), {}) for skip in (SKIP, 1.5, -1.0)])
    assert whole[2].all()
    assert 1e-3 < of_its_bound(right, whole, given, SKIP) <= 1 < of_its_bound(wrong, whole, given, SKIP)


def test_the_weights_kernel_alone_decides_the_same():
    given = sharp()
    (_, dw, _), (_, alone, _) = interpreted([("head_bodies:skipping", (*given, SKIP, with_dh), {})
                                             for with_dh in (True, False)])
    assert torch.equal(dw, alone)
