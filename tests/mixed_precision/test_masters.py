"""What is done to a weight and its master, piece by piece."""

import math

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.mixed_precision import masters


def test_a_master_is_a_leaf_of_its_own_also_of_an_fp32_parameter():
    weight = nn.Parameter(torch.ones(2))
    master = masters.master_of(weight)
    assert master.is_leaf and master.requires_grad and master.data_ptr() != weight.data_ptr()


def test_narrow_takes_the_gradient_along():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    masters.narrow(weight, torch.bfloat16)
    assert weight.dtype is weight.grad.dtype is torch.bfloat16
    masters.narrow(weight, torch.float16, fp32_gradient=True)
    assert weight.dtype is torch.float16 and weight.grad.dtype is torch.float32
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [3.0, 3.0]


def test_sync_takes_what_differs_by_more_than_rounding():
    master = torch.tensor([1.001, 1.001, 1.001, 0.0, 2.0])
    masters.sync(master, torch.tensor([1.0, 3.0, math.nan, -0.0, 2.0]).bfloat16())
    assert master.tolist()[:2] == [pytest.approx(1.001), 3.0] and master.tolist()[3:] == [0, 2]
    assert math.isnan(master[2])


def test_norm_is_torch_s_and_adds_up_in_fp32():
    gradients = [torch.full((300,), 200.0, dtype=torch.float16), torch.ones(3).bfloat16()]  # 200² overflows fp16
    expected = nn.utils.get_total_norm([gradient.float() for gradient in gradients])
    assert masters.norm(gradients).item() == pytest.approx(expected.item())


def test_gradients_are_widened_and_fp32_ones_are_lent():
    low, high = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    of = {p: masters.master_of(p) for p in (low, high)}
    low.grad, high.grad = torch.full((2,), 2.0).half(), torch.full((2,), 4.0)
    with memory.track(low, high) as t:
        masters.give_gradients([low, high], of, 2.0**-30)  # below everything that fp16 holds
    assert of[low].grad.tolist() == [2.0**-29] * 2 and of[high].grad is not None
    assert of[high].grad.data_ptr() == high.grad.data_ptr() and t.now.total - t.start.total == 4 * 2


def test_parameters_that_cannot_be_kept_low():
    with pytest.raises(ValueError, match=r"parameter 1 of shape \(1,\) is torch.complex64: expected float32"):
        masters.check([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.complex64))])
