"""AdaptiveCheckpoint: all kept where there is room, all recomputed where there is none, and the first in between."""

import pytest
import torch

from refimpl import memory
from refimpl.checkpointing import AdaptiveCheckpoint
from refimpl.checkpointing.adaptive import bytes_in_use, capacity
from refimpl.checkpointing.closed_forms import gpt_costs, gpt_peak_bytes
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=64, context_length=128, layers=6, hidden=32, heads=4)


def alive(t):
    """t.now.total, without sorting every storage into its category."""
    return sum(record.nbytes for record in t.records if record.alive)


def step(budget, threshold=1.0, steps=1):
    """(bytes at the peak above the start, decisions, gradients) of the last of some steps."""
    torch.manual_seed(0)
    model, tokens = GPT(CONFIG), torch.randint(0, 64, (2, 128))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with memory.track(model, tokens) as t:
        assert (start := alive(t)) == t.now.total
        adaptive = AdaptiveCheckpoint(threshold, budget, used=lambda: alive(t) - start)
        with adaptive.apply(model.blocks):
            for _ in range(steps):
                model.zero_grad(set_to_none=False)
                model(tokens, tokens).backward()
    return t.peak.total - t.start.total, adaptive.recomputed, [p.grad for p in model.parameters()]


def test_the_peak_follows_the_budget():
    chain, whole = gpt_costs(CONFIG, 2, 128), gpt_peak_bytes(CONFIG, 2, 128)
    outside = max(chain.backward_peaks[-1], chain.backward_peaks[0] - chain.activation_bytes[0])
    (_, kept, expected), counts = step(10 * whole, steps=2), []
    assert not any(kept)
    for share in (0.9, 0.7, 0.5, 0.4):
        peak, recomputed, gradients = step(share * whole, steps=2)
        assert peak <= share * whole + outside, share
        assert recomputed == sorted(recomputed, reverse=True), "the first blocks are recomputed, the last are kept"
        assert all(map(torch.equal, gradients, expected))
        counts.append(sum(recomputed))
    assert counts == sorted(counts) and counts[0] <= 2 and 3 <= counts[-1] < 6


def test_a_tiny_budget_recomputes_all_that_it_can():
    peak, recomputed, _ = step(1, steps=2)
    assert all(recomputed) and peak < 1.3 * gpt_peak_bytes(CONFIG, 2, 128, [(i,) for i in range(6)])


def test_the_threshold_is_a_share_of_the_budget():
    whole = gpt_peak_bytes(CONFIG, 2, 128)
    assert step(whole, 0.5)[1] == step(whole / 2, 1.0)[1]


def test_it_does_not_learn_from_its_own_peak():
    """The mutant that articles have: memory in use over the peak so far. In the first step it is always near one."""
    model, tokens = GPT(CONFIG), torch.randint(0, 64, (2, 128))
    def decisions(budget, used):
        with memory.track(model, tokens) as t:
            adaptive = AdaptiveCheckpoint(0.8, budget, used=lambda: used(t))
            with adaptive.apply(model.blocks):
                model(tokens, tokens).backward()
        return adaptive.recomputed
    for _ in range(2):
        assert not any(decisions(10**12, lambda t: t.now.total))
        assert any(decisions(1, lambda t: t.now.total / t.peak.total)), "with a terabyte to spare"


def test_in_place_of_a_function():
    adaptive, x = AdaptiveCheckpoint(0.8, budget=100, used=lambda: 90), torch.randn(8, requires_grad=True)
    y = adaptive(lambda x, scale: x.sin() * scale, x, scale=2)
    assert adaptive.recomputed == [True]
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    with torch.no_grad():
        assert adaptive(torch.sin, x).requires_grad is False


def test_capacity_and_use_of_a_cpu():
    assert 0 < bytes_in_use(torch.device("cpu")) < capacity(torch.device("cpu"))
    assert AdaptiveCheckpoint(0.5, device="cpu").limit == capacity(torch.device("cpu")) / 2


@pytest.mark.parametrize(("options", "message"), [
    ({"memory_threshold": 0}, "memory_threshold=0: expected a share above 0, up to 1"),
    ({"memory_threshold": 1.5}, "memory_threshold=1.5"), ({"memory_threshold": float("nan")}, "memory_threshold=nan"),
    ({"budget": 0}, "budget=0: expected a positive number of bytes"), ({"budget": float("nan")}, "budget=nan"),
    ({"budget": float("inf")}, "budget=inf"), ({"budget": -5}, "budget=-5"),
    ({"memory_threshold": None}, "memory_threshold=None"), ({"budget": "1e9"}, "budget='1e9'")])
def test_what_is_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveCheckpoint(**options)


def test_an_option_that_nobody_knows_is_named_beside_the_known():
    with pytest.raises(TypeError, match="AdaptiveCheckpoint has no option 'treshold': expected memory_threshold, "
                                        "budget, used, device, keep$"):
        AdaptiveCheckpoint(treshold=0.8)
