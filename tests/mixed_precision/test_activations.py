"""What autograd keeps under autocast, and the casts of weights: closed form and tracker, to the byte."""

import pytest
import torch

from refimpl import memory
from refimpl.mixed_precision import autocast, autocast_activation_bytes, autocast_activation_terms, weight_cast_bytes
from refimpl.mixed_precision.internals.autocast_regions import AutocastRegion
from refimpl.model import GPT, GPTConfig

LOW = [torch.bfloat16, torch.float16]


def kept(model, tokens, region):
    with memory.track(model, tokens) as t:
        with region:
            loss = model(tokens, tokens)
    assert loss.isfinite()
    return t.now["activations"]


@pytest.mark.parametrize("dtype", LOW)
def test_the_closed_form_is_what_autograd_keeps(gpt, dtype):
    expected = autocast_activation_bytes(gpt[0].config, 2, 32, dtype)
    assert kept(*gpt, autocast(dtype)) == expected == kept(*gpt, torch.autocast("cpu", dtype))


def test_regions_that_keep_more_are_seen(gpt, monkeypatch):
    """The mutants: nothing cast, and casts of the weights that are not found again (the tied one is used once)."""
    assert kept(*gpt, autocast(enabled=False)) != autocast_activation_bytes(gpt[0].config, 2, 32)
    x, linear = torch.randn(4, 32, requires_grad=True), torch.nn.Linear(32, 32, bias=False)
    def twice():
        with memory.track(linear, x) as t, autocast():
            y = linear(linear(x))
        return t.now["activations"], y
    cached = twice()[0]
    monkeypatch.setattr(AutocastRegion, "_cast_once", lambda self, weight, dtype: weight.to(dtype))
    assert twice()[0] == cached + 2 * linear.weight.numel()


@pytest.mark.parametrize("dtype", LOW)
def test_casts_of_weights_are_held_until_the_region_ends(gpt, dtype):
    model, tokens = gpt
    expected = weight_cast_bytes(model.config, dtype)
    with torch.no_grad(), memory.track(model, tokens) as t:
        with autocast(dtype):
            model(tokens, tokens)
            assert t.now.total - t.start.total == expected
            model(tokens, tokens)
            assert t.now.total - t.start.total == expected
        assert t.now.total == t.start.total
    with memory.measure("cpu") as m, torch.no_grad():
        region = autocast(dtype).__enter__()
        model(tokens, tokens)
    held = m.net
    region.__exit__(None, None, None)
    assert held == expected


def test_activations_shrink_towards_half_as_the_sequence_grows():
    """The casts of weights are a fixed cost, the norms' inputs stay: what a batch adds is well below fp32's."""
    config = GPTConfig(vocab_size=256, context_length=128, layers=2, hidden=64, heads=4)
    model, ratios = GPT(config), []
    for batch in (1, 8):
        tokens = torch.randint(0, 256, (batch, 128))
        ratios.append(kept(model, tokens, autocast()) / memory.activation_bytes(config, batch, 128))
    assert 0.5 < ratios[1] < 0.65 < ratios[0]


def test_terms(model):
    terms = autocast_activation_terms(model.config, 2, 32)
    s, b, h, a, f = 32, 2, 32, 4, 128
    block = 4 * (2 * s * b * h + 4 * s * b) + 2 * s * b * (6 * h + 2 * f) + 2 * a * b * s * s + s * s
    assert terms["blocks"] == 2 * block and terms["weight casts"] == 2 * (2 * 12 * h * h + 256 * h)
    cuda = autocast_activation_terms(model.config, 2, 32, device="cuda")
    assert cuda["blocks"] - terms["blocks"] == 2 * 4 * a * b * s * s  # softmax in fp32, and its cast


@pytest.mark.parametrize("closed_form", [weight_cast_bytes, lambda config, dtype: autocast_activation_bytes(
    config, 2, 16, dtype)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, "bf16"])
def test_types_that_autocast_does_not_know(closed_form, dtype):
    with pytest.raises(ValueError, match="dtype=.*: expected torch.bfloat16 or torch.float16"):
        closed_form(GPTConfig(vocab_size=256, context_length=32, layers=2, hidden=32, heads=4), dtype)
