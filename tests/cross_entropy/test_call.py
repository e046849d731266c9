"""Checks of a call that need no loss."""

import pytest
import torch

from refimpl import memory
from refimpl.cross_entropy.call import check_targets


def test_targets_are_checked_by_value_where_there_are_values():
    check_targets(torch.tensor([0, 6, -100]), 7, -100)
    with pytest.raises(IndexError, match="targets hold 7: the vocabulary is 0…6, or ignore_index=-100"):
        check_targets(torch.tensor([0, 7]), 7, -100)
    check_targets(torch.tensor([7], device="meta"), 7, -100)
    memory.dry_run(lambda: check_targets(torch.zeros(3, dtype=torch.int64), 7, -100))
