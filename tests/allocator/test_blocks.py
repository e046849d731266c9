"""Blocks and the lists of a pool."""

import sys

import pytest

from refimpl.allocator.blocks import Block, Pool


@pytest.mark.parametrize("mapped", [True, False])
def test_a_block_that_is_taken_out_is_let_go(mapped):
    pool = Pool(small=False)
    block = Block(0, 512, 0, pool, mapped=mapped)
    holders = sys.getrefcount(block)
    pool.add(block)
    assert sys.getrefcount(block) > holders
    pool.remove(block)
    assert sys.getrefcount(block) == holders
