"""The activation that a forward applies, and forwards that do anything else."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from refimpl.feed_forward import activation_of


class Layers(nn.Module):
    """Layers of a feed-forward, with a forward that is given: a function of the module and x."""
    def __init__(self, compute, act=None):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.act, self.compute = act, compute

    def forward(self, x, unused=None):
        return self.compute(self, x)


PLAIN = [(lambda m, x: m.down(F.relu(m.up(x))), None, "relu"), (lambda m, x: m.down(F.gelu(m.up(x))), None, "gelu"),
         (lambda m, x: m.down(F.gelu(m.up(x), approximate="tanh")), None, "gelu_tanh"),
         (lambda m, x: m.down(m.act(m.up(x))), nn.GELU(), "gelu"),
         (lambda m, x: m.down(m.act(m.up(x))), nn.GELU("tanh"), "gelu_tanh"),
         (lambda m, x: 1.0 * m.down(F.dropout(m.act(m.up(x)), p=0.0)), nn.SiLU(), "silu")]
GATED = [(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), None, "silu"),
         (lambda m, x: m.down(torch.mul(m.up(x), torch.relu(m.gate(x)))), None, "relu"),
         (lambda m, x: m.down(m.act(1 * m.gate(x)) * (m.up(x) * 1.0)), nn.GELU("tanh"), "gelu_tanh")]
OTHER = [lambda m, x: m.down(m.gate(x) * m.up(x)), lambda m, x: m.down(F.silu(m.up(x)) * m.gate(x)),
         lambda m, x: m.down(F.silu(m.gate(x)) * m.gate(x)), lambda m, x: m.down(m.up(x) * m.up(x)),
         lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)) * 2, lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)) + x,
         lambda m, x: m.down(F.silu(2 * m.gate(x)) * m.up(x)), lambda m, x: m.down(F.silu(m.gate(x)) * m.up(2 * x)),
         lambda m, x: m.down(F.silu(m.gate(x).clamp(max=7)) * m.up(x)), lambda m, x: m.down(F.silu(m.gate(x))),
         lambda m, x: m.down(F.dropout(F.silu(m.gate(x)) * m.up(x), p=0.1)), lambda m, x: x]


@pytest.mark.parametrize(("compute", "act", "expected"), PLAIN, ids=range(len(PLAIN)))
def test_the_activation_is_read(compute, act, expected):
    assert activation_of(Layers(compute, act), ("up", "down")) == expected


@pytest.mark.parametrize(("compute", "act", "expected"), GATED, ids=range(len(GATED)))
def test_the_activation_of_a_gate_is_read(compute, act, expected):
    assert activation_of(Layers(compute, act), ("gate", "up", "down")) == expected


@pytest.mark.parametrize("compute", OTHER, ids=range(len(OTHER)))
def test_what_else_a_forward_does_is_named(compute):
    with pytest.raises(TypeError, match=r"Layers computes .*: expected down\(act\(gate\(x\)\) \* up\(x\)\)"):
        activation_of(Layers(compute), ("gate", "up", "down"))


def test_an_activation_that_is_not_known_and_a_forward_that_cannot_be_read():
    for compute, act, words in ((lambda m, x: m.down(m.act(m.up(x))), nn.Tanh(), "activation Tanh"),
                                (lambda m, x: m.down(F.elu(m.up(x))), None, "activation elu"),
                                (lambda m, x: m.down(m.up(x).relu()), None, "activation relu"),
                                (lambda m, x: m.down(F.relu(m.up(x))) if x.sum() else x, None, "cannot be read")):
        with pytest.raises(TypeError, match=words):
            activation_of(Layers(compute, act), ("up", "down"))


def test_reading_computes_nothing():
    layers = Layers(GATED[0][0]).to("meta")
    layers.up.register_forward_hook(lambda *_: pytest.fail("the layer was called"))
    assert activation_of(layers, ("gate", "up", "down")) == "silu"
