"""A GPT with each attention in its place learns as with softmax_attention."""

import functools

import pytest
import torch

from refimpl import attention
from refimpl.attention import flash
from refimpl.attention.kernels import operators
from refimpl.model import GPT, GPTConfig, softmax_attention

STAGES = {
    "reference": attention.reference_attention, "memory-efficient": attention.memory_efficient_attention,
    "tiled": attention.tiled_attention, "flash": attention.flash_attention,
    "partial": functools.partial(attention.tiled_attention, query_tile=8, key_tile=8, window=64)}


def trained(attention, dropout=0.0, dtype=torch.float64):
    """The gradients of two steps of training."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, context_length=32, layers=2, hidden=32, heads=4, kv_heads=2, dropout=dropout)
    model = GPT(config, attention, dtype=dtype)
    optimizer, tokens, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randint(0, 64, (2, 20)), []
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_with_the_same_gradients(stage):
    torch.testing.assert_close(trained(STAGES[stage]), trained(softmax_attention))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_the_kernels_too(monkeypatch):
    """In fp32: fp64 is not theirs."""
    called = []
    monkeypatch.setattr(flash, "attention_forward", lambda *args: called.append(args) or operator(*args))
    operator = operators.attention_forward
    for dropout in (0.0, 0.2):
        ours, expected = (trained(STAGES[stage], dropout, torch.float32) for stage in ("flash", "reference"))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item() + 1e-8)
    assert len(called) == 2 * 2 * 2 or not flash.kernels_run_on(torch.device("cpu"))


def test_with_dropout_every_stage_draws_the_same_mask():
    expected = trained(STAGES["reference"], dropout=0.2)
    for stage in ("memory-efficient", "tiled"):
        torch.testing.assert_close(trained(STAGES[stage], dropout=0.2), expected)
    assert not torch.equal(expected[0], trained(STAGES["reference"])[0])
