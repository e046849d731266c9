"""The idea in one screen has the numbers and the bytes of `autocast`, `MixedPrecisionOptimizer` and the scaler."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from one_screen import check_paper
from paper_kit import MODELS, built, gradients, same

from refimpl import memory
from refimpl.mixed_precision import AdaptiveLossScaler, MixedPrecisionOptimizer, autocast
from refimpl.mixed_precision.internals.lists import FP32, FP32_RESULT, LOW, POLICIES
from refimpl.papers import mixed_precision as paper

LOW_DTYPES = [torch.bfloat16, torch.float16]
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def test_the_file_is_one_screen():
    check_paper("mixed_precision", "mixed_precision")


def step(name, around, dtype=None):
    """Run a forward and a backward: (loss and gradients, bytes after the forward, bytes at the peak)."""
    model, *batch = built(name, dtype)
    with memory.track(model, *batch) as t:
        with around:
            loss = model(*batch)
        after = t.now
        loss.backward()
    return [loss, *gradients(model)], after, t.peak


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_numbers_to_the_bit_and_bytes_to_the_byte(name, dtype):
    idea, *nbytes = step(name, paper.Autocast(dtype))
    hardened, *nbytes_there = step(name, autocast(dtype, "cpu"))
    assert same(idea, hardened) and nbytes == nbytes_there
    plain, kept, _ = step(name, nullcontext())  # saves nothing
    assert not same(idea, plain) and kept["activations"] > 1.2 * nbytes[0]["activations"]


def test_a_cast_under_no_grad_takes_no_gradient_from_a_later_use():
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with paper.Autocast(torch.bfloat16):
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_tables_are_a_part_of_the_hardened_ones(device):
    def spelled(function):
        """The name of a function in the tables of `internals/lists`."""
        name = function.__name__
        return {"__matmul__": "matmul", "cross_entropy": "cross_entropy_loss"}.get(name, name)
    wanted = POLICIES[device] | {"cross_entropy_loss": FP32}  # a composite on CUDA: its log_softmax and nll_loss are
    policies = {}
    for name, policy in wanted.items():
        policies.setdefault(name.partition(".")[0], set()).add(policy)
    policies.setdefault("einsum", {LOW})  # on a CPU its products are in the table
    assert all(policies[spelled(f)] == {LOW} for f in paper.LOW)
    assert all(policies[spelled(f)] <= {FP32, FP32_RESULT} for f in paper.FP32[device])


def masters_of(optimizer):
    if isinstance(optimizer, paper.Masters):
        return optimizer.masters
    return [optimizer.state[p]["master"] for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("name", MODELS)
def test_masters_to_the_bit_and_bytes_to_the_byte(name):
    def trained(name, make, steps=3):
        """Run steps of AdamW: (weights and masters, bytes at the peak of all steps but the first)."""
        model, *batch = built(name)
        optimizer = make(model)
        def one_step():
            model(*batch).backward()
            optimizer.step()
            model.zero_grad()
        one_step()
        with memory.track(model, *masters_of(optimizer), *batch) as t:
            for _ in range(steps - 1):
                one_step()
        assert all(p.dtype is torch.bfloat16 for p in model.parameters())
        return [*model.parameters(), *masters_of(optimizer)], t.peak.total
    idea, peak = trained(name, lambda model: paper.Masters(model, ADAMW, torch.bfloat16))
    hardened, peak_there = trained(name, lambda model: MixedPrecisionOptimizer(ADAMW(model.parameters())))
    assert same(idea, hardened) and peak == peak_there


def test_masters_keep_the_updates_that_bf16_rounds_away():
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(weight.weight)
    masters = paper.Masters(weight, partial(torch.optim.SGD, lr=1e-4), torch.bfloat16)
    rounding = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        weight(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        masters.step()
        rounding -= 1e-4
    assert rounding == 1 and abs(masters.masters[0].item() - 0.99) < 1e-5 and weight.weight < 1


@pytest.mark.parametrize("name", MODELS)
def test_scaled_steps_are_the_hardened_ones_to_the_bit(name):
    """Scales from one that overflows to one that has grown again."""
    (model, *batch), (other, *_) = built(name), built(name)
    masters, scaler = paper.Masters(model, ADAMW, torch.float16), paper.LossScaler(2.0**20, interval=2)
    optimizer = MixedPrecisionOptimizer(ADAMW(other.parameters()), torch.float16)
    hardened, scales = AdaptiveLossScaler(2.0**20, growth_interval=2), []
    for _ in range(14):
        (model(*batch).float() * scaler.scale).backward()
        scaler.step(masters)
        hardened.scale(other(*batch)).backward()
        hardened.step(optimizer)
        hardened.update()
        optimizer.zero_grad()
        assert scaler.scale == hardened.get_scale() and same(model.parameters(), other.parameters())
        assert same(masters.masters, masters_of(optimizer))
        scales.append(scaler.scale)
    assert {b / a for a, b in zip(scales, scales[1:], strict=False)} == {0.5, 1.0, 2.0}
