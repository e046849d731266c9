"""Our GPT on real text: mixed precision learns what fp32 learns, and fp16 without a loss scale does not."""

import statistics

import pytest
import torch

from refimpl.data import TextData
from refimpl.mixed_precision import AdaptiveLossScaler, MixedPrecisionOptimizer, autocast
from refimpl.model import GPT, GPTConfig

# Small, since a CPU that has no arithmetic in fp16 takes five times as long in it.
CONFIG = GPTConfig(vocab_size=256, context_length=16, layers=1, hidden=32, heads=4)


def train(region=lambda: autocast(enabled=False), wrap=lambda optimizer: optimizer, scaler=None):
    """Losses of 250 steps, the same data and the same beginning each time."""
    torch.manual_seed(0)
    model, losses, batches = GPT(CONFIG), [], TextData().batches(8, 16, epochs=None)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(250):
        tokens, targets = next(batches)
        optimizer.zero_grad()
        with region():
            loss = model(tokens, targets)
        losses.append(loss.item())
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return losses


def final(losses):
    return statistics.mean(losses[-50:])


@pytest.fixture(scope="module")
def fp32():
    losses = train()
    assert final(losses) < 0.6 * losses[0]  # it learns
    return losses


RECIPES = {
    "bf16 autocast": lambda: {"region": autocast},
    "fp16 autocast": lambda: {"region": lambda: autocast(torch.float16), "scaler": AdaptiveLossScaler()},
    "bf16 weights": lambda: {"wrap": MixedPrecisionOptimizer},
    "fp16 weights": lambda: {"wrap": lambda optimizer: MixedPrecisionOptimizer(optimizer, torch.float16),
                             "scaler": AdaptiveLossScaler()}}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_is_within_one_percent_of_fp32(fp32, recipe):
    settings = RECIPES[recipe]()
    losses = train(**settings)
    assert abs(final(losses) / final(fp32) - 1) < 0.01, (final(losses), final(fp32))
    assert "scaler" not in settings or settings["scaler"].skipped_steps < 20


def test_low_weights_without_masters_are_seen(fp32):
    """The mutant: bf16 weights under a plain AdamW lose small updates."""
    def plain(optimizer):
        for p in optimizer.param_groups[0]["params"]:
            p.data = p.data.bfloat16()
        return optimizer
    assert final(train(wrap=plain)) / final(fp32) - 1 > 0.01
