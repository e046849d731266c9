"""How a batch is cut and its parts are weighed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refimpl.accumulation import count_targets, split
from refimpl.accumulation.micro_batches import cut, weights


@given(st.integers(1, 40), st.integers(1, 50))
def test_parts_are_the_batch_in_order_and_only_the_last_is_smaller(rows, size):
    x = torch.arange(2 * rows).view(rows, 2)
    parts = split((x, {"y": [x + 1, None]}), size)
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1]["y"][0] for part in parts]), x + 1)
    assert all(part[1]["y"][1] is None for part in parts)
    assert [len(part[0]) for part in parts[:-1]] == [size] * (len(parts) - 1) and 1 <= len(parts[-1][0]) <= size
    assert all(part[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)


@pytest.mark.parametrize(("batch", "error", "message"), [
    ((torch.ones(2), "text"), TypeError, "holds str"), ((torch.ones(2), [3]), TypeError, "holds int"),
    ((torch.tensor(1.0),), ValueError, "without dimensions"), ((None,), ValueError, "no tensors"),
    ((torch.ones(0, 3),), ValueError, r"the batch is empty \(\(0, 3\)\): expected at least one row"),
    ((torch.ones(2, 3), torch.ones(3, 2)), ValueError, r"\(2, 3\), \(3, 2\)")])
def test_batches_that_cannot_be_cut(batch, error, message):
    with pytest.raises(error, match=message):
        split(batch, 2)


def test_what_default_counting_counts():
    targets = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert count_targets(targets, targets).item() == 3 and count_targets(targets, ignore_index=3).item() == 5
    assert count_targets(targets, torch.ones(2, 3)) == 6
    for last, what in (({"labels": targets}, "is dict"), (targets > 0, "is a mask"), (None, "is NoneType")):
        with pytest.raises(ValueError, match=f"{what}, not targets: give count="):
            count_targets(targets, last)


def test_weights_are_shares_of_all_ranks_terms():
    parts = [(torch.tensor([1, 2, 3]),), (torch.tensor([-100]),), (torch.tensor([4]),)]
    assert weights(parts, "mean", count_targets, lambda n: n) == [0.75, 0, 0.25]
    assert weights(parts, "mean", count_targets, lambda n: n + 4) == [0.375, 0, 0.125]
    assert weights(parts, "mean", lambda part: 0.5 * len(part), lambda n: n) == [0.6, 0.2, 0.2]
    assert weights(parts, "sum", None, None) == [1, 1, 1]
    with pytest.raises(ValueError, match="every target of the batch is ignored"):
        weights(parts[1:2], "mean", count_targets, lambda n: n)


@pytest.mark.parametrize("said", [float("nan"), float("inf"), -1, None, "3", torch.ones(2)])
def test_counts_are_numbers(said):
    with pytest.raises(ValueError, match="for micro-batch 0: expected one number, 0 or more"):
        weights([(torch.ones(1),)], "mean", lambda part: said, lambda n: n)


def test_parts_may_be_tuples_or_the_one_argument():
    x = torch.ones(2)
    assert cut((), None, [x, (x, x), {"x": x}]) == [(x,), (x, x), ({"x": x},)]
