"""One executor for all schedules: the gradients of the unsplit model. A launch of `p` ranks runs all cases of `p`."""

import pytest
import torch
from pipeline_kit import distances
from rank_pool import on_ranks

from refimpl.pipeline.named_schedules import BUILDERS

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}
# By ranks: one micro-batch, fewer than ranks, as many, twice as many and more. The dtype is that of all messages alike.
COUNTS = {torch.float64: {1: (1, 3), 2: (1, 3, 4), 4: (1, 3, 4, 8, 16)}, torch.float32: {1: (3,), 2: (4,), 4: (8,)}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1, 2, 4])
@on_ranks("p")
def test_the_gradients_of_the_unsplit_model(comm, p, dtype):
    for name in BUILDERS:
        for m in COUNTS[dtype][p]:
            assert distances(comm, name, m, dtype) <= DTYPES[dtype], (name, m)
