"""Low-precision gradients summed in fp32: how wrong each way is, and which bytes are there when."""

import pytest
import torch
from torch import nn

from refimpl import memory
from refimpl.accumulation import accumulate
from refimpl.accumulation.gradient_sums import GradientSums

MICRO_BATCHES = 256


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
def test_sums_in_fp32_are_rounded_once_and_sums_in_grad_every_time(dtype, unit):
    """The relative error of the gradient from 256 micro-batches, beside the sum in fp64."""
    x, errors = torch.rand(MICRO_BATCHES, 64).to(dtype), {}
    exact = x.double().mean(0)  # the gradient of the mean of w·x is the mean of x: nothing else is rounded
    for summed_in in (torch.float32, None):
        model = nn.Linear(64, 1, bias=False).to(dtype)
        accumulate(model, x, micro_batch=1, loss_fn=lambda model, part: model(part).mean(), dtype=summed_in)
        assert model.weight.grad.dtype is dtype
        errors[summed_in] = ((model.weight.grad[0].double() - exact).norm() / exact.norm()).item()
    assert errors[torch.float32] <= 2.1 * unit  # each micro-batch's own gradient is rounded, and the sum
    assert errors[None] > 5 * errors[torch.float32]


def summed(x, micro_batch=1, start=None, **options):
    """The gradient in bf16 of a weight whose loss is the sum of w·x; of which `start` was there before."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    model.weight.grad = None if start is None else torch.full_like(model.weight, start)
    accumulate(model, x.bfloat16()[:, None], micro_batch=micro_batch, reduction="sum",
               loss_fn=lambda model, part: model(part).sum(), **options)
    return model.weight.grad.item()


def test_small_addends_vanish_in_bf16():
    """256 + 1 is 256 in bf16, however often 1 is added; in fp32 none is lost."""
    x = torch.tensor([256.0] + [1.0] * 256)
    assert summed(x, dtype=torch.float32) == 512 and summed(x, dtype=None) == 256


def test_only_narrow_gradients_are_summed_beside():
    narrow, wide, kept = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    for parameter in kept.parameters():
        parameter.grad_dtype = torch.float32
    parameters = [*narrow.parameters(), *wide.parameters(), *kept.parameters()]
    assert GradientSums(parameters, torch.float32).parameters == [*narrow.parameters()]
    assert GradientSums(parameters, torch.float64).parameters == parameters
    assert GradientSums(parameters, None).parameters == []


def test_gradients_that_stay_in_fp32():
    model, x = nn.Linear(64, 1, bias=False).bfloat16(), torch.rand(MICRO_BATCHES, 64).bfloat16()
    model.weight.grad_dtype = torch.float32
    accumulate(model, x, micro_batch=1, loss_fn=lambda model, part: model(part).mean())
    assert model.weight.grad.dtype is torch.float32 and (model.weight.grad[0] - x.float().mean(0)).norm() <= 1e-6


def test_gradients_that_were_there_are_part_of_the_sum():
    assert summed(torch.ones(256), 128, start=256.0) == 512


def test_gradients_that_were_there_are_added_to_in_fp32_from_the_first_micro_batch():
    """1024 + 4 is 1024 in bf16: had autograd added the first micro-batch's gradient, it would be lost."""
    assert summed(torch.full((2,), 4.0), start=1024.0) == 1032


def test_one_low_precision_gradient_at_a_time():
    """While sums move to `.grad`: the sums not written yet, those that are, and the one at hand in both types."""
    layers, n = 4, 64 * 64
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(layers)]).bfloat16()
    with memory.track(model) as t:
        accumulate(model, torch.ones(4, 64).bfloat16(), micro_batch=2, loss_fn=lambda m, x: m(x).float().mean())
    gradients = t.timeline.nbytes[:, t.timeline.categories.index("gradients")]
    mark = max(i for i, op in enumerate(t.timeline.ops) if op.phase == "backward")
    assert gradients.max() == gradients[mark + 1 :].max() == (4 * layers + 2) * n
    assert t.now["gradients"] == gradients[mark:].min() == 2 * layers * n


def test_hooks_leave_when_one_cannot_be_set():
    good, bad = nn.Parameter(torch.ones(2).bfloat16()), torch.ones(2).bfloat16()  # a hook needs a leaf with gradient
    with pytest.raises(RuntimeError), GradientSums([good, bad], torch.float32):
        pass
    assert not good._post_accumulate_grad_hooks


def test_sparse_gradients():
    for dtype in (torch.float32, torch.bfloat16):
        model, tokens = nn.Embedding(10, 4, sparse=True).to(dtype), torch.tensor([1, 2, 1, 9])
        accumulate(model, tokens, micro_batch=1, loss_fn=lambda m, x: m(x).float().sum(), reduction="sum")
        expected = torch.zeros(10, 4)
        expected[1], expected[2], expected[9] = 2, 1, 1
        assert model.weight.grad.is_sparse and torch.equal(model.weight.grad.to_dense().float(), expected)
