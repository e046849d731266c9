"""The four engines on GPUs: each rank's own CUDA statistics beside the closed form, to the byte."""

import pytest
import torch
from zero_bodies import check_readings, check_stages, readings

from refimpl.comm import launch


@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_that_share_one_gpu(world_size):
    """Through gloo and the host's memory: NCCL refuses two ranks on one GPU."""
    found = {stage: launch(readings, world_size, stage, device="cuda:0") for stage in range(4)}
    for stage, answers in found.items():
        assert {read["device"] for read in answers} == {"cuda"}
        check_readings(stage, answers)
    check_stages(found)


def test_nccl_with_one_gpu_for_each_rank():
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs: this machine has {gpus}")
    world_size = 4 if gpus >= 4 else 2
    found = {stage: launch(readings, world_size, stage, device="cuda") for stage in range(4)}
    for stage, answers in found.items():
        check_readings(stage, answers)
    check_stages(found)
