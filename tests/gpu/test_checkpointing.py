"""Recomputation on a CUDA device: its random numbers, its autocast, its peak beside torch's and the closed forms'."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from refimpl import memory
from refimpl.checkpointing import (
    AdaptiveCheckpoint,
    Recomputing,
    checkpoint,
    gpt_peak_bytes,
    kept_bytes,
    planned,
    recompute,
    selective,
)
from refimpl.memory.trace import Trace
from refimpl.memory.tracking.taking import WORKSPACE
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=256, context_length=256, layers=4, hidden=256, heads=4)
DROPOUT = GPTConfig(**{**vars(CONFIG), "dropout": 0.1})


def model_and_tokens(config=CONFIG, dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(config, dtype=dtype, device="cuda"), torch.randint(0, 256, (4, 256), device="cuda")


def gradients(model, tokens, **autocast):
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cuda", **autocast) if autocast else torch.enable_grad():
        loss = model(tokens, tokens)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("autocast", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}])
@pytest.mark.parametrize("attention", ["dense", "fused"])
def test_gradients_are_bit_equal_with_dropout(deterministic, autocast, attention):
    torch.manual_seed(0)
    options = {} if attention == "dense" else {"attention": F.scaled_dot_product_attention}
    model, (_, tokens) = GPT(DROPOUT, device="cuda", **options), model_and_tokens()
    expected = gradients(model, tokens, **autocast)
    for policy in (recompute, partial(selective, part="mlp"), partial(recompute, save=[torch.ops.aten.addmm])):
        with policy(model.blocks):
            assert all(map(torch.equal, gradients(model, tokens, **autocast), expected))


def test_the_generator_goes_on_as_if_nothing_was_drawn_twice():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = checkpoint(F.dropout, x, 0.5)
    state = torch.cuda.get_rng_state()
    y.sum().backward()
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert torch.equal(x.grad != 0, y != 0)


def test_tensors_on_both_devices():
    """Autograd's CUDA thread and the main thread open placeholders of one region."""
    x, y = torch.randn(512, 512, device="cuda", requires_grad=True), torch.randn(512, 512, requires_grad=True)

    def both(x, y):
        return x.sin().sin().sum().cpu() + y.sin().sin().sum()

    expected = torch.autograd.grad(both(x, y), (x, y))
    assert all(map(torch.equal, torch.autograd.grad(checkpoint(both, x, y), (x, y)), expected))


@pytest.mark.bytes
@pytest.mark.parametrize("config", [CONFIG, DROPOUT])
def test_the_allocators_peak_is_not_above_torchs(config):
    peaks = {}
    for name, how in (("ours", checkpoint), ("torch", partial(torch_checkpoint, use_reentrant=False))):
        model, tokens = model_and_tokens(config)
        policy = Recomputing()
        for block in model.blocks:
            policy.add(block, how=how)
        gradients(model, tokens)
        with memory.measure("cuda") as m:
            model(tokens, tokens).backward()
        peaks[name] = m.peak
    assert peaks["ours"] <= peaks["torch"]


@pytest.mark.bytes
@pytest.mark.parametrize(("plan", "part"), [
    (None, None), ([(0,), (1,), (2,), (3,)], None), ([(0, 1), 2, 3], None), (None, "attention core"),
    (None, "attention"), (None, "mlp")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_forms(plan, part, dtype):
    model, tokens = model_and_tokens(dtype=dtype)
    model(tokens, tokens).backward()
    with selective(model.blocks, part) if part else Recomputing(), planned(model, plan):
        with memory.track(model, tokens) as t:
            loss = model(tokens, tokens)
            kept = t.now.total - t.start.total - loss.nbytes
            loss.backward()
    assert kept_bytes(CONFIG, 4, 256, plan, part, dtype, "cuda") == kept
    predicted = gpt_peak_bytes(CONFIG, 4, 256, plan, part, dtype, "cuda")
    assert predicted == pytest.approx(peak_of_tensors(t) - t.start.total, rel=0.01)


def peak_of_tensors(t):
    """The peak without what blocks of threads leave one another for a bias's gradient: it depends on the GPU."""
    parts = {i for i, record in enumerate(t.records) if record.op == "sum" and record.mark == WORKSPACE}
    events = [event for event in t.events if event[1] not in parts]
    return Trace(t.ops, t.records, events, t.first_call, t.device).peak.total


@pytest.mark.bytes
def test_adaptive_reads_the_device():
    model, tokens = model_and_tokens()
    with AdaptiveCheckpoint(0.8).apply(model.blocks) as policy:
        model(tokens, tokens).backward()
    assert policy.recomputed == [False] * 4, "a few MiB of a whole GPU"
    with AdaptiveCheckpoint(0.8, budget=torch.cuda.memory_allocated() + 1).apply(model.blocks) as policy:
        model(tokens, tokens).backward()
    assert all(policy.recomputed[1:])
