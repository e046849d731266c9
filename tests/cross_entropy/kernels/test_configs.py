"""The table of tiles."""

import pytest
import torch

from refimpl.cross_entropy.kernels.configs import INTERPRETED, KERNELS, TABLE, config_for, look_up


@pytest.mark.parametrize("key", TABLE, ids=str)
def test_each_entry_has_powers_of_two_and_both_backwards_share_their_tiles(key):
    forward, hidden, weight = row = TABLE[key]
    assert len(row) == len(KERNELS) and hidden[:2] == weight[:2]
    assert all(n & (n - 1) == 0 and n >= 16 for config in row for n in config[:3])


def test_every_chip_and_dtype_has_an_entry():
    assert look_up("hidden", "datacenter", 4) == TABLE["any", 4][1]
    assert look_up("hidden", "any", 2, capped=True)[:2] == look_up("weight", "any", 2, capped=True)[:2] == (64, 32)
    assert look_up("weight", "datacenter", 2) == TABLE["datacenter", 2][2]
    assert config_for("forward", "cpu", torch.float32) == INTERPRETED
    if not torch.cuda.is_available():
        assert config_for("forward", "cuda", torch.bfloat16) == TABLE["datacenter", 2][0]
