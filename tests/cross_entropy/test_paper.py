"""The idea in one screen, held to the hardened version: numbers and bytes; and versions with its two classic faults."""

import inspect

import pytest
import torch
from head_kit import exact, head, read, with_gradients
from one_screen import check_paper

from refimpl.cross_entropy import chunked_cross_entropy_bytes, chunked_linear_cross_entropy
from refimpl.papers import cross_entropy as paper

pytestmark = pytest.mark.core
FAULTS = {
    # Each chunk's gradient and loss divided by the number of its own targets.
    "own count": ("counts_R = (t_R != IGNORED).float()",
                  "counts_R = (t_R != IGNORED).float(); counts_R *= n * R / counts_R.sum().clamp(min=1) / 90"),
    # dW of one chunk in place of the sum.
    "last chunk": ("dW_VC.addmm_(z_RV.T, h_RC.float())", "dW_VC.copy_(z_RV.T @ h_RC.float())")}


def both(chunk_size, dtype=torch.float32, N=90, C=16, V=203):
    hidden, weight, targets, _ = head(N, C, V, dtype)
    targets[:32] = -100  # a chunk without targets, others with different counts
    idea = paper.linear_cross_entropy(hidden, weight, targets, chunk_size)
    hardened = chunked_linear_cross_entropy(hidden, weight, targets, chunk_size=chunk_size)
    return (hidden, weight, targets), with_gradients(idea, hidden, weight), with_gradients(hardened, hidden, weight)


def test_it_is_one_screen():
    check_paper("cross_entropy", "cross_entropy")


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 90, 1000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_numbers_are_the_hardened_ones(chunk_size, dtype, bound):
    _, idea, hardened = both(chunk_size, dtype)
    for a, b in zip(idea, hardened, strict=True):
        assert a.dtype == b.dtype and (a.double() - b.double()).abs().max() <= bound * b.double().abs().max()


def test_bytes_are_the_hardened_ones():
    """But for vectors of R and for n, and the logits' chunk, which is made anew for each chunk."""
    N, C, V, R = 96, 16, 2003, 32
    hidden, weight, targets, _ = head(N, C, V)
    kept, forward, _ = read(lambda: paper.linear_cross_entropy(hidden, weight, targets, R), hidden, weight, targets)
    form = chunked_cross_entropy_bytes(N, V, C, chunk_size=R)
    assert kept - form.saved == 8 - 4  # n; no factor
    assert abs(forward - form.forward) < 64 * R < R * V * 4 / 3


def faulty(before, after):
    text, names = inspect.getsource(paper), {}
    assert before in text
    exec(compile(text.replace(before, after), "a faulty version", "exec"), names)
    return names["linear_cross_entropy"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_another_gradient(fault):
    (hidden, weight, targets), right, _ = both(32)
    wrong = with_gradients(faulty(*FAULTS[fault])(hidden, weight, targets, 32), hidden, weight)
    reference = exact(hidden, weight, targets)[2]
    assert (right[2] - reference).norm() < 1e-5 * reference.norm() < 1e-2 * (wrong[2] - reference).norm()


def test_keeping_the_logits_shows():
    """The logits kept by a .float() that nobody deletes: in fp32 it is no copy, and a list of them is all logits."""
    keeping = faulty("            del z_RV\n", "            ctx.kept = [*getattr(ctx, 'kept', []), z_RV]\n")
    hidden, weight, targets, _ = head(96, 16, 2003)
    kept, _, _ = read(lambda: keeping(hidden, weight, targets, 32), hidden, weight, targets)
    assert kept >= 96 * 2003 * 4
