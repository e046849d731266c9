"""The four engines on GPUs: each rank's own CUDA statistics beside the closed form, to the byte."""

import pytest
import torch
from zero_bodies import check_readings, check_stages, readings, updated_on_the_host
from zero_kit import farthest, gpt

from refimpl.comm import launch


def check_engines(world_size, device):
    found = {stage: launch(readings, world_size, stage, device=device) for stage in range(4)}
    for stage, answers in found.items():
        check_readings(stage, answers)
    check_stages(found)
    return found


@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_that_share_one_gpu(world_size):
    """Through gloo and the host's memory: NCCL refuses two ranks on one GPU."""
    found = check_engines(world_size, "cuda:0")
    assert {read["device"] for answers in found.values() for read in answers} == {"cuda"}


def test_nccl_with_one_gpu_for_each_rank():
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs: this machine has {gpus}")
    check_engines(4 if gpus >= 4 else 2, "cuda")


@pytest.mark.bytes
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_on_the_host_leaves_no_state_on_the_gpu(stage):
    for found in launch(updated_on_the_host, 2, stage, device="cuda:0"):
        (there, expected), (here, ours) = found[False], found[True]
        assert there["host"] == here["device"] == 0
        share = 4 * gpt().config.parameter_count() // 2
        assert 2 * share <= there["device"] < 2.1 * share and 3 * share <= here["host"] < 3.1 * share  # and masters
        assert farthest(ours, expected) <= 1e-5
