"""The norm of what several ranks hold."""

import math

import pytest
import torch

from refimpl.zero.internals.norms import clip_, local_power


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
def test_powers_of_parts_make_the_norm_of_the_whole(norm_type):
    parts = [torch.randn(n) for n in (5, 1, 12)]
    powers = [local_power([part], norm_type, "cpu") for part in parts]
    whole = max(powers) if norm_type == math.inf else sum(powers) ** (1 / norm_type)
    assert whole.item() == pytest.approx(torch.cat(parts).norm(norm_type).item(), rel=1e-6)
    assert local_power([], norm_type, "cpu") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_scales_what_is_too_long_and_leaves_what_is_not(dtype):
    gradients = [torch.full((4,), 3.0, dtype=dtype), torch.full((2,), 4.0, dtype=dtype)]
    norm = torch.tensor(10.0)
    clip_(gradients, norm, 20.0)
    assert gradients[0][0] == 3 and gradients[1][0] == 4
    clip_(gradients, norm, 5.0)
    assert gradients[0][0].item() == pytest.approx(1.5) and gradients[1][0].item() == pytest.approx(2)


def test_nan_and_inf_are_in_the_norm():
    assert local_power([torch.tensor([1.0, math.nan])], 2, "cpu").isnan()
    assert local_power([torch.tensor([1.0, math.nan])], math.inf, "cpu").isnan()
    assert local_power([torch.tensor([1.0, math.inf])], 2, "cpu") == math.inf


def test_what_is_large_does_not_overflow_on_its_way_and_a_tiny_norm_divides_nothing_by_zero():
    half = torch.full((10_000,), 3000.0, dtype=torch.float16)  # its norm, 300,000, is more than fp16 holds
    assert math.sqrt(local_power([half], 2, "cpu")) == pytest.approx(300_000, rel=1e-5)
    large = [torch.full((100,), 1e18)] * 10  # the sum of their squares is more than fp32 holds
    assert math.sqrt(local_power(large, 2, "cpu")) == pytest.approx(1e39**0.5, rel=1e-5)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 2e-7)
    ours = parameter.grad.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1e-7)
    clip_([ours], torch.linalg.vector_norm(ours), 1e-7)
    assert torch.equal(ours, parameter.grad)
