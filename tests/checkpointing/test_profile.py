"""A profile of a real GPT, the schedule made of it, and the peak that it then has: the bytes, but for what is named."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from users_kit import Model

from refimpl import memory
from refimpl.checkpointing import gpt_costs, optimal_schedule, planned, profile_chain
from refimpl.checkpointing.schedule import Program
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=256, context_length=64, layers=5, hidden=64, heads=4, tied=False)
AROUND = 8 * 64 + 4  # positions, and the loss's own gradient


def head(model, targets):
    return Model(lambda self, x, *_: F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten()),
                 norm=model.norm, head=model.head)


@pytest.fixture(scope="module")
def real():
    torch.manual_seed(0)
    model, tokens = GPT(CONFIG), torch.randint(0, 256, (2, 64))
    model(tokens, tokens).backward()
    embedded = model.embedding(tokens) + model.positions(torch.arange(64))
    return model, tokens, profile_chain([*model.blocks, head(model, tokens)], embedded, None)


def test_the_predicted_peak_is_met_at_every_budget(real):
    model, tokens, chain = real
    program = Program(chain)
    assert len(program.curve()) >= 6
    for predicted, _ in program.curve():
        plan = program.schedule(predicted).plan
        assert plan[-1] == 5, "the head is never recomputed: its backward comes first"
        with planned(model, plan[:-1]), memory.track(model, tokens) as t:
            model(tokens, tokens).backward()
        assert abs(t.peak.total - t.start.total - predicted) <= AROUND


def test_the_closed_form_of_a_chain_is_what_a_profile_reads(real):
    predicted, (_, _, measured) = gpt_costs(CONFIG, 2, 64), real
    for name in ("output_bytes", "activation_bytes", "forward_times", "backward_times"):
        assert getattr(predicted, name) == getattr(measured, name), name
    for name in ("forward_peaks", "backward_peaks", "saving_peaks"):
        n = CONFIG.layers + (name != "forward_peaks")  # the head is never run without keeping
        assert getattr(predicted, name)[:n] == pytest.approx(getattr(measured, name)[:n], rel=0.03), name


def test_seconds_are_positive_and_bytes_the_same(real):
    model, tokens, chain = real
    timed = profile_chain([*model.blocks, head(model, tokens)], model.embedding(tokens), None, unit="seconds")
    assert timed.activation_bytes == chain.activation_bytes and min(timed.forward_times) > 0
    assert optimal_schedule(timed.forward_times, timed.activation_bytes, timed.output_bytes, budget=10**9).time > 0


def test_what_cannot_be_profiled():
    with pytest.raises(ValueError, match="a parameter of Linear has no gradient yet: run one backward first"):
        profile_chain([nn.Linear(2, 2)], torch.ones(2))
    with pytest.raises(ValueError, match="unit='s': expected 'flops' or 'seconds'"):
        profile_chain([torch.sin], torch.ones(2), unit="s")
