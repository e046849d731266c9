"""The step that is tracked: what it keeps, and what ranks beside it hold more."""

import pytest

from refimpl.comm import FakeCommunicator
from refimpl.estimate import Options
from refimpl.estimate.tracked_step import train

BUILD = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 24, bias=False)
    def forward(self, x):
        return self.b(self.a(x).tanh()).square().mean()
def build():
    return Net(), torch.randn(4, 8)
class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(
            torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(2))
        self.how = None
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
        self.how = gradient_checkpointing_kwargs
    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.how is None else torch.utils.checkpoint.checkpoint(block, x, **self.how)
        return x.sum()
def with_blocks():
    return Blocks(), torch.randn(32, 16)
"""
OUR_GPT = """
import torch
from refimpl.model import GPT, GPTConfig
def build():
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    return GPT(GPTConfig(vocab_size=8, context_length=16, layers=2, hidden=16, heads=2)), (tokens, tokens)
"""
STATE = 5056  # bytes of the CPU generator's state, which each block keeps beside its input
NUMBERS, BATCH = 8 * 8 + 8 + 8 * 24, 4 * 8  # of the parameters, of the batch


@pytest.fixture
def net(tmp_path):
    (tmp_path / "build.py").write_text(BUILD)
    return f"{tmp_path / 'build.py'}:build"


def test_another_rank_has_more_where_it_counts_the_steps_of_more_pieces(net):
    """Of 264 numbers each rank has 132: one part of b.weight, or its rest, a.bias and a.weight."""
    found = [train(FakeCommunicator(rank, 2), net, Options(zero=1, gpus=2)) for rank in range(2)]
    states = [each.trace.now["optimizer state"] for each in found]
    assert states == [2 * 4 * 132 + 4, 2 * 4 * 132 + 3 * 4]
    assert [each.elsewhere for each in found] == [max(states) - state for state in states] == [8, 0]


def test_nothing_of_the_loss_is_there_in_the_update(net):
    plain = train(None, net, Options(optimizer="sgd")).trace.peak_moment("step").ledger
    assert plain.total == 4 * (2 * NUMBERS + BATCH) and plain["gradients"] == plain["parameters"] == 4 * NUMBERS
    engine = train(FakeCommunicator(0, 2), net, Options(optimizer="sgd", zero=1, gpus=2)).trace.peak_moment("step")
    assert engine.ledger["activations"] == engine.ledger["temporaries"] == 0


def test_a_model_that_can_recompute_is_told_to(net):
    """As those of transformers are: then it keeps the input of a block alone."""
    model, tokens, hidden = net.replace(":build", ":with_blocks"), 32, 16
    kept, recomputed = (train(None, model, Options(recompute=each)).trace.peak_moment("forward").ledger["activations"]
                        for each in (False, True))
    assert kept == 4 * (4 * tokens * hidden) and recomputed == 4 * tokens * hidden + 2 * STATE


def test_our_gpt_recomputes_its_blocks(tmp_path):
    (tmp_path / "gpt.py").write_text(OUR_GPT)
    kept, recomputed = (train(None, f"{tmp_path / 'gpt.py'}:build", Options(optimizer="sgd", recompute=each)).trace
                        .peak_moment("forward").ledger["activations"] for each in (False, True))
    assert recomputed < kept
