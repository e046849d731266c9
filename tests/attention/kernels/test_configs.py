"""The table of tile sizes: an entry for everything that is launched. What the compiler says of each:
tests/benchmarks/compiler."""

import pytest
import torch

from refimpl.attention.kernels.configs import KERNELS, look_up


@pytest.mark.parametrize("chip", ["datacenter", "any"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_head_dim_and_dtype_has_an_entry(kernel, dtype, chip):
    for D in range(1, 257):
        for dropout in (False, True):
            found = look_up(kernel, chip, dtype.itemsize, D, dropout)
            for size in (found.block_m, found.block_n, found.num_warps, 16):
                assert size & (size - 1) == 0 and size <= 128
            assert min(found.block_m, found.block_n) >= 16 and found.num_stages >= 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_there_is_no_dropout_unless_it_is_named(kernel):
    assert look_up(kernel, "any", 2, 64) == look_up(kernel, "any", 2, 64, dropout=False)
    assert look_up(kernel, "any", 2, 64) != look_up(kernel, "any", 2, 64, dropout=True)
