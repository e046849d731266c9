"""Weights that a backward reads where a unit's output does not say so: after two forwards, by what a unit keeps beside
its output, in hooks. Each trains as data parallelism does. And frozen parameters count the same in an engine's model.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zero_kit import ADAMW, SGD, farthest, fixed, parameters_of

from refimpl import memory
from refimpl.comm import FakeCommunicator, simulate
from refimpl.zero import DataParallel, Zero3
from refimpl.zero.closed_forms import model_state_bytes, step_traffic
from refimpl.zero.internals.backwards import Backwards


class Penalised(nn.Module):
    """Its loss has a penalty over all weights, whose gradient is a comparison's: nothing there becomes NaN."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).tanh()).sum() + sum(p.clamp(min=0).sum() for p in self.parameters())


class KeepsBalance(nn.Module):
    """A block with a balance loss of its own weights, or of another computation, made after its output."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        self.balance = self.a.weight.clamp(min=0).sum() + (self.b(self.a(y)).tanh() ** 2).mean()
        return y


class Balanced(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(KeepsBalance() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.sum() + sum(block.balance for block in self.blocks)


class Hooked(nn.Module):
    """An embedding whose weight a hook reads; or its own forward does."""

    def __init__(self, own):
        super().__init__()
        self.embedding, self.b = nn.Embedding(4, 4), nn.Linear(4, 4)
        read = lambda out: out + self.embedding.weight.clamp(min=0).mean()  # noqa: E731
        if own:
            forward = self.embedding.forward
            self.embedding.forward = lambda ids: read(forward(ids))
        else:
            self.embedding.register_forward_hook(lambda module, args, out: read(out))

    def forward(self, x):
        return self.b(self.embedding(x[:, 0].long().abs() % 4)).sum()


def one(engine, x):
    engine.backward(engine(x))


def two(engine, x, backwards=(0, 1)):
    losses = engine(x), engine(2 * x)
    for i in backwards:
        engine.backward(losses[i])


WAYS = {"one": one, "two": two, "two, the last first": functools.partial(two, backwards=(1, 0))}
MODELS = {"a penalty": Penalised, "a balance": Balanced, "a hook": functools.partial(Hooked, False),
          "a forward of its own": functools.partial(Hooked, True)}


def trained(comm, make, way):
    """{engine: parameters after three steps}."""
    found = {}
    for kind in (DataParallel, Zero3):
        fixed()
        engine = kind(make().double(), comm, SGD)
        x = torch.randn(3, comm.world_size, 3, 4, dtype=torch.float64)
        for step in range(3):
            way(engine, x[step, comm.rank])
            engine.step()
        found[kind] = parameters_of(engine)
    return found


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_data_parallelism_does(name, way, world_size):
    for found in simulate(trained, world_size, MODELS[name], WAYS[way]):
        assert farthest(*found.values()) < 1e-14


def test_a_version_that_begins_a_backward_with_the_output_alone_is_seen(monkeypatch):
    monkeypatch.setattr(Backwards, "begin_early", lambda self, output: None)
    with pytest.raises(Exception):  # noqa: B017  of the second part; the first one's gradients are zeros
        (found,) = simulate(trained, 1, Balanced, one)
        assert farthest(*found.values()) < 1e-14


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 200)
        self.head.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("where", ["real", "dry"])
def test_closed_forms_of_an_engines_own_model_with_frozen_parameters(where):
    def readings():
        comm, tokens = FakeCommunicator(0, 4), torch.zeros(2, 5, dtype=torch.int64)
        engine = Zero3(Frozen(), comm, ADAMW)
        for _ in range(3):
            comm.reset_traffic()
            engine.backward(engine(tokens))
            engine.step()
        return dict(comm.traffic), [dict(step_traffic(model, 4, 3)) for model in (Frozen(), engine.model)], [
            dict(model_state_bytes(model, 4, 3)) for model in (Frozen(), engine.model)]

    sent, traffic, states = readings() if where == "real" else memory.dry_run(readings).result
    assert traffic[0] == traffic[1] and states[0] == states[1] and sent == traffic[0]
