"""How a batch is cut, and what each micro-batch's mean loss weighs."""

import math

import pytest
import torch

from refimpl.pipeline.micro_batches import count_targets, cut, tensors_of, weights_of


def test_the_last_micro_batches_are_shorter():
    x, y = torch.arange(7), torch.arange(7) * 10
    assert [[part.tolist() for part in each] for each in cut((x, y), 3)] == [
        [[0, 1, 2], [0, 10, 20]], [[3, 4], [30, 40]], [[5, 6], [50, 60]]]
    assert cut(x, 3)[1][0].data_ptr() == x[3:].data_ptr()  # a view


def test_a_weight_is_a_share_of_the_targets():
    targets = torch.tensor([[1, 2], [3, -100], [-100, -100]])
    assert weights_of(cut(targets, 3)) == [2 / 3, 1 / 3, 0]
    assert weights_of(cut(targets.float(), 3)) == [1 / 3, 1 / 3, 1 / 3]
    assert weights_of(cut(targets, 3), lambda each: 5) == [1 / 3] * 3
    assert count_targets(torch.zeros(2), targets) == 3


def test_counts_that_cannot_be():
    for count in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"have .{count}, {count}. targets"):
            weights_of(cut(torch.zeros(2), 2), lambda each, count=count: count)


@pytest.mark.parametrize(("given", "error", "message"), [
    ((), ValueError, "shapes none"), ((torch.zeros(2), torch.zeros(3)), ValueError, r"shapes \(2,\), \(3,\)"),
    (torch.tensor(1.0), ValueError, r"shapes \(\)"), (([1],), TypeError, "holds list")])
def test_batches_that_cannot_be_cut(given, error, message):
    with pytest.raises(error, match=message):
        tensors_of(given)
