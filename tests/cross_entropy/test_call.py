"""Checks of a call that need no loss."""

import pytest
import torch

from refimpl import memory
from refimpl.cross_entropy.call import check_targets
from refimpl.cross_entropy.chunked import chunked_linear_cross_entropy


def test_targets_are_checked_by_value_where_there_are_values():
    check_targets(torch.tensor([0, 6, -100]), 7, -100)
    with pytest.raises(IndexError, match="targets hold 7: the vocabulary is 0…6, or ignore_index=-100"):
        check_targets(torch.tensor([0, 7]), 7, -100)
    check_targets(torch.tensor([7], device="meta"), 7, -100)
    memory.dry_run(lambda: check_targets(torch.zeros(3, dtype=torch.int64), 7, -100))


def test_a_transform_of_torch_func_is_refused_by_name():
    weight, targets = torch.zeros(7, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="a chunked cross-entropy under torch.func's vmap"):
        torch.func.vmap(lambda hidden: chunked_linear_cross_entropy(hidden, weight, targets))(torch.zeros(2, 3, 4))
