"""The sum of the weight's gradient: its numbers, its bytes, what it hands on; a cast beside the sum is seen."""

import itertools

import pytest
import torch
from head_kit import errors, exact, head, sum_bound

from refimpl import memory
from refimpl.cross_entropy import chunked_linear_cross_entropy
from refimpl.cross_entropy.weight_gradient import WeightSum

HALVES = (torch.bfloat16, torch.float16)


class Whole(WeightSum):
    """A version that saves nothing: the sum in fp32 and its cast are there at once."""

    def __init__(self, weight, dtype):
        self.dtype, self.result, self.parts = dtype, None, [torch.zeros_like(weight, dtype=dtype)]


def summed(kind, V, C, dtype, rows, chunks=3):
    """(gradient, the same from a sum in fp32 of its own, bytes at the peak above what was given)"""
    g = torch.Generator().manual_seed(V)
    weight, scale = torch.randn(V, C, generator=g).to(dtype), torch.tensor(0.3)
    given = [(torch.randn(rows, V, generator=g), torch.randn(rows, C, generator=g).to(dtype)) for _ in range(chunks)]
    with memory.track(weight, scale, *itertools.chain(*given)) as t:
        total = kind(weight, torch.float32)
        for z, h in given:
            total.add(z, z, h)
        found = total.handed_on(scale, dtype, rows)
        assert t.now.total - t.start.total == found.untyped_storage().nbytes() == V * C * 2
    expected = sum(z.T.double() @ h.double() for z, h in given) * scale
    return found, expected, t.peak.total - t.start.total


@pytest.mark.parametrize(("dtype", "V", "rows"), [*itertools.product(HALVES, [1, 2, 7, 256, 301], [1, 5, 64, 400])])
def test_rows_are_rounded_into_their_own_storage(dtype, V, rows):
    found, expected, peak = summed(WeightSum, V, 24, dtype, rows)
    assert found.dtype == dtype and found.is_contiguous() and found.shape == expected.shape
    assert max(errors([found], [expected])) < torch.finfo(dtype).eps
    assert peak == V * 24 * 4 + V % 2 * 24 * 2 + rows * 24 * 4  # h of a chunk, cast on a CPU


def test_a_cast_beside_the_sum_is_seen():
    V, C = 301, 24
    (_, same, peak), (_, expected, whole) = (summed(kind, V, C, torch.bfloat16, 5) for kind in (WeightSum, Whole))
    assert torch.equal(same, expected) and whole >= V * C * 6 > 1.4 * peak


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("own", [False, True], ids=["fp32", "its own"])
def test_a_tied_weight_adds_up_over_micro_batches(dtype, own):
    """Head and embedding are one weight; `.grad` is the sum of two backwards, in memory of its own size."""
    _, weight, _, _ = head(1, 16, 101, dtype)
    wide = weight.detach().double().requires_grad_()
    for seed in (1, 2):
        tokens, targets = torch.randint(101, (2, 40), generator=torch.Generator().manual_seed(seed))
        chunked_linear_cross_entropy(weight[tokens], weight, targets, chunk_size=8,
                                     weight_gradient=dtype if own else None).backward()
        torch.nn.functional.cross_entropy(wide[tokens] @ wide.T, targets).backward()
        assert weight.grad.untyped_storage().nbytes() == weight.nbytes
    assert errors([weight.grad], [wide.grad])[0] < 4 * torch.finfo(dtype).eps


# --- sums in the weight's own dtype -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "chunk_size", "options"), [*itertools.product(
    HALVES, [8, 32, 256], [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"reduction": "sum"}, {"ignore_index": 60}])])
def test_the_error_is_within_its_bound_and_no_larger_than_that_of_a_plain_sum(dtype, chunk_size, options):
    hidden, weight, targets, _ = head(256, 48, 203, dtype)
    targets = targets.masked_fill(targets == -100, options.get("ignore_index", -100))
    expected = exact(hidden, weight, targets, **options)[2]
    found, wide = (torch.autograd.grad(chunked_linear_cross_entropy(
        hidden, weight, targets, chunk_size=chunk_size, weight_gradient=each, **options), weight)[0]
        for each in (dtype, None))
    plainly = torch.zeros_like(weight)
    n = 1 if options.get("reduction") == "sum" else (targets != options.get("ignore_index", -100)).sum()
    for rows in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        part = chunked_linear_cross_entropy(rows[0], weight, rows[1], **options | {"reduction": "sum"})
        plainly = plainly + torch.autograd.grad(part, weight)[0]
    off, of_wide, of_plain = (x.double() - expected for x in (found, wide, plainly / n))
    assert ((off - of_wide).abs() <= sum_bound(hidden, weight, targets, 256 // chunk_size, **options)).all()
    if chunk_size < 256:  # else there is no sum
        assert off.norm() <= 1.02 * of_plain.norm() and of_wide.norm() < 0.9 * off.norm()


@pytest.mark.parametrize(("dtype", "asked", "autocast"), [
    (torch.bfloat16, torch.float16, False), (torch.float32, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, True), (torch.float64, torch.float32, False), (torch.bfloat16, "bf16", False)])
def test_sums_in_another_dtype_are_refused(dtype, asked, autocast):
    hidden, weight, targets, _ = head(6, 8, 31, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(ValueError, match="weight_gradient="):
        chunked_linear_cross_entropy(hidden, weight, targets, weight_gradient=asked)
