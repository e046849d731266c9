"""The norm of what several ranks hold."""

import math

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import ENGINES, SGD

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


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_the_norm_of_gradients_in_fp64_is_in_fp64(comm, stage):
    for dtype, expected in ((torch.float64, torch.float64), (torch.float32, torch.float32),
                            (torch.bfloat16, torch.float32)):
        torch.manual_seed(0)
        model, x = nn.Linear(40, 30).to(dtype), torch.randn(2, 40).to(dtype)
        engine = ENGINES[stage](model, comm, SGD)
        plain = nn.Linear(40, 30).to(dtype)
        with engine.gathered():
            plain.load_state_dict(model.state_dict())
        engine.backward(engine.forward(x).square().mean())
        plain(x).square().mean().backward()
        norm, theirs = engine.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert norm.dtype == expected and norm.item() == pytest.approx(theirs.item(), rel={8: 1e-14, 4: 1e-6, 2: 1e-2}[
            dtype.itemsize])
        again = engine.clip_grad_norm_(1.0).item()
        assert again == pytest.approx(0.1, rel={8: 1e-4, 4: 1e-4, 2: 1e-2}[dtype.itemsize])
        if dtype == torch.float64:
            assert again == pytest.approx(0.1 * norm.item() / (norm.item() + 1e-6), rel=1e-14)
