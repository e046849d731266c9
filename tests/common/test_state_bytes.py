"""Bytes per parameter: the closed form equals the tracker with 0 bytes of difference, recipe by recipe."""

import pytest
import torch
from training_step import OPTIMIZERS

from refimpl import memory
from refimpl.common.state_bytes import PRECISIONS, STATES
from refimpl.memory import bytes_per_parameter, model_state_bytes
from refimpl.model import GPT

from ..conftest import SMALL


def train_step(optimizer, precision, forget_master=False):
    """One step of the recipe, written out; the tracker, with every gradient still there. `forget_master`: a recipe that
    saves what it should not, as it has no master weights."""
    model = GPT(SMALL, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    tokens, weights = torch.randint(0, 256, (2, 16)), list(model.parameters())
    with memory.track(model, tokens) as t:
        masters = weights
        if PRECISIONS[precision].master and not forget_master:
            masters = [w.detach().float().requires_grad_() for w in weights]
        steppers = [OPTIMIZERS[optimizer]([m]) for m in masters]
        model(tokens, tokens).backward()
        for weight, master, stepper in zip(weights, masters, steppers, strict=True):
            if master is not weight:
                master.grad = weight.grad.float()
                if PRECISIONS[precision].gradient == 4:
                    weight.grad = None
            stepper.step()
            if master is not weight:
                with torch.no_grad():
                    weight.copy_(master)
                if PRECISIONS[precision].gradient == 2:
                    master.grad = None
    return t, sum(w.numel() for w in weights), len(weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_closed_form_is_the_tracker_to_the_byte(optimizer, precision):
    t, count, tensors = train_step(optimizer, precision)
    states = memory.Ledger({name: t.now[name] for name in ("parameters", "gradients", "optimizer state")})
    assert states == model_state_bytes(count, optimizer, precision, tensors)


@pytest.mark.parametrize("precision", ["bf16 + fp32 master", "bf16 + fp32 master and gradients"])
def test_a_recipe_without_its_master_weights_is_noticed(precision):
    t, count, tensors = train_step("adamw", precision, forget_master=True)
    assert t.now["optimizer state"] != model_state_bytes(count, "adamw", precision, tensors)["optimizer state"]


def test_bytes_per_parameter():
    assert set(STATES) == set(OPTIMIZERS)
    assert {p: [bytes_per_parameter(o, p) for o in STATES] for p in PRECISIONS} == {
        "fp32": [8, 12, 16, 16], "bf16": [4, 6, 8, 8], "bf16 + fp32 master": [8, 12, 16, 16],
        "bf16 + fp32 master and gradients": [10, 14, 18, 18]}


def test_bad_recipes_are_named():
    with pytest.raises(ValueError, match="optimizer='lion': expected one of sgd, momentum, adam, adamw"):
        model_state_bytes(1, "lion")
    with pytest.raises(ValueError, match="precision='fp8': expected one of fp32"):
        model_state_bytes(1, precision="fp8")
    for wrong in (-1, 1.5, float("nan"), float("inf"), True, "7B", None):
        with pytest.raises(ValueError, match=f"parameters={wrong!r}: expected a count, 0 or more"):
            model_state_bytes(wrong)
        with pytest.raises(ValueError, match=f"tensors={wrong!r}: expected a count, 0 or more"):
            model_state_bytes(1, tensors=wrong)
    assert model_state_bytes(7e9).total == 112 * 10**9 and model_state_bytes(0) == {}
