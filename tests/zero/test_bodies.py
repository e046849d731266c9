"""A rehearsal on a CPU of what tests/gpu/test_zero.py asks of GPUs: each rank's allocator beside the closed form."""

import pytest
import torch
from zero_bodies import check_readings, check_stages, readings

from refimpl.comm import launch


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_each_rank_holds_is_the_closed_form_to_the_byte(world_size):
    found = {stage: launch(readings, world_size, stage, device="cpu") for stage in range(4)}
    for stage, answers in found.items():
        check_readings(stage, answers)
    check_stages(found)


def test_what_is_kept_is_seen():
    def hoarding(comm, stage):
        """The mutant: something of the step stays."""
        kept, build = [], torch.nn.Module.__call__
        torch.nn.Module.__call__ = lambda self, *args, **kwargs: kept.append(build(self, *args, **kwargs)) or kept[-1]
        try:
            return readings(comm, stage)
        finally:
            torch.nn.Module.__call__ = build

    with pytest.raises(AssertionError):
        check_readings(1, launch(hoarding, 1, 1, device="cpu"))
