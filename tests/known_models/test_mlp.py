"""What a forward computes, read from it: forms that are served, and forwards that do anything else."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from refimpl.known_models.mlp import linear, read
from refimpl.mlp.function import NotFeedForward, run


class Layers(nn.Module):
    """Layers of a feed-forward, with a forward that is given: a function of the module and x."""
    def __init__(self, compute, act=None):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.both, self.act, self.compute = None, act, compute

    def forward(self, x, unused=None):
        return self.compute(self, x)


class Alone(Layers):
    """One that is given x and nothing else."""
    def forward(self, x):
        return self.compute(self, x)


def without_gate(compute, act=None, kind=Layers):
    layers = kind(compute, act)
    del layers.gate
    return layers


def halved(product, x):
    a, b = x.chunk(2, dim=-1)
    return product(a, b)


def fused(compute, act=None):
    layers = without_gate(compute, act)
    layers.up = nn.Linear(4, 16)
    return layers


PLAIN = [(lambda m, x: m.down(F.relu(m.up(x))), None, "relu"), (lambda m, x: m.down(F.gelu(m.up(x))), None, "gelu"),
         (lambda m, x: m.down(F.gelu(m.up(x), approximate="tanh")), None, "gelu_tanh"),
         (lambda m, x: m.down(m.act(m.up(x))), nn.GELU(), "gelu"),
         (lambda m, x: m.down(m.up(x).relu()), None, "relu"),
         (lambda m, x: m.down(m.act(m.up(x))), nn.ReLU(inplace=True), "relu"),
         (lambda m, x: m.down(m.act(m.up(x))), nn.GELU("tanh"), "gelu_tanh"),
         (lambda m, x: 1.0 * m.down(F.dropout(m.act(m.up(x)), p=0.0)), nn.SiLU(), "silu")]
GATED = [(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), None, "silu", (1, 0)),
         (lambda m, x: m.down(torch.mul(m.up(x), torch.relu(m.gate(x)))), None, "relu", (0, 1)),
         (lambda m, x: m.down(F.silu(m.up(x)) * m.gate(x)), None, "silu", (1, 0)),
         (lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)) * 3, nn.GELU("tanh"), "gelu_tanh", (1, 0))]
HALVES = [(lambda a, b: F.silu(a) * b, [(0, 8), (0, 0)]), (lambda a, b: a * F.silu(b), [(0, 0), (0, 8)])]
# No kernel of ours is for what is between these layers: their own operations are.
COMPOSED = [lambda m, x: m.down(m.gate(x) * m.up(x)), lambda m, x: m.down(F.silu(2 * m.gate(x)) * m.up(x)),
            lambda m, x: m.down(F.silu(m.gate(x).clamp(max=7)) * m.up(x)),
            lambda m, x: m.down((F.silu(m.gate(x).double()) * m.up(x)).to(torch.float32)) + x]
OTHER = [(lambda m, x: m.down(F.silu(m.gate(x)) * m.gate(x)), "calls 2|called twice|calls 3"),
         (lambda m, x: m.down(F.silu(m.gate(x)) * m.up(2 * x)), "given what the module is"),
         (lambda m, x: m.down(F.silu(m.gate(x).to(x.dtype)) * m.up(x)), "from the others alone"),
         (lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x) + x.mean()), "from the others alone"),
         (lambda m, x: m.down(F.dropout(F.silu(m.gate(x)) * m.up(x), p=0.1)), "dropout.* no function of each number"),
         (lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x).cumsum(1)), "cumsum.* no function of each number"),
         (lambda m, x: (m.down(h := F.silu(m.gate(x)) * m.up(x)), h), "no more than one linear layer"),
         (lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x) * m.mask), "mask.* more than its linear layers have")]


@pytest.mark.parametrize(("compute", "act", "expected"), PLAIN, ids=range(len(PLAIN)))
def test_the_activation_is_read(compute, act, expected):
    for form in read(without_gate(compute, act)).values():
        assert (form.ups, form.down, form.activation, form.parts, form.hidden) == (
            ("up",), "down", expected, ((0, 0),), 8)


@pytest.mark.parametrize(("compute", "act", "expected", "parts"), GATED, ids=range(len(GATED)))
def test_the_activation_of_a_gate_is_read(compute, act, expected, parts):
    form = read(Layers(compute, act))[True]
    assert form.activation == expected and [first for _, first in form.parts] == [0, 0]
    assert {*form.ups} == {"gate", "up"} and [which for which, _ in form.parts] == [*parts]


@pytest.mark.parametrize(("product", "parts"), HALVES, ids=range(len(HALVES)))
def test_a_gate_in_one_weight_with_up_is_read(product, parts):
    form = read(fused(lambda m, x: m.down(halved(product, m.up(x)))))[True]
    assert (form.ups, form.activation, [*form.parts], form.hidden) == (("up",), "silu", parts, 8)


@pytest.mark.parametrize("compute", COMPOSED, ids=range(len(COMPOSED)))
def test_what_is_composed_is_run_as_it_is(compute):
    layers, x = Layers(compute), torch.randn(2, 3, 4)
    form = pickle.loads(pickle.dumps(read(layers)[False]))
    assert form.activation is None
    hidden = run(form.inner, layers, *(layers.get_submodule(name)(x) for name in form.ups))
    y = layers.down(hidden)
    assert torch.equal(y if form.after is None else run(form.after, layers, y, x), layers(x))


@pytest.mark.parametrize(("compute", "words"), OTHER, ids=range(len(OTHER)))
def test_what_else_a_forward_does_is_named(compute, words):
    layers = Layers(compute)
    if "mask" in words:
        layers.register_buffer("mask", torch.ones(8))
    with pytest.raises(TypeError, match=rf"Layers (computes .*({words})|calls)"):
        read(layers)


def test_a_forward_that_cannot_be_read_or_changes_its_module_is_named():
    for compute, words in ((lambda m, x: m.down(F.relu(m.up(x))) if x.sum() else x, "cannot be read"),
                           (lambda m, x: (setattr(m, "last", x), m.down(F.relu(m.up(x))))[1], "sets attributes")):
        with pytest.raises(TypeError, match=words):
            read(without_gate(compute, kind=Alone))


def test_other_layers_are_no_feed_forward_layers():
    heads = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for module in (*heads, nn.Linear(4, 4), nn.Embedding(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
                   without_gate(lambda m, x: m.down(m.up(x).softmax(-1)))):
        with pytest.raises(NotFeedForward):
            read(module)


class Flipped(nn.Linear):
    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], -1)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.0


def test_a_linear_layer_is_known_by_what_it_computes():
    for size in ((4, 8), (4, 4)):
        assert [linear(kind(*size)) for kind in (nn.Linear, Flipped, Scaled)] == [False, None if size[0] != 4 else
                                                                                  linear(Flipped(*size)), None]
    assert linear(Flipped(4, 4)) is True and linear(nn.Embedding(4, 4)) is None and linear(nn.LayerNorm(4)) is None
    with pytest.raises(TypeError, match="up is a .*Scaled, which is more than linear"):
        layers = without_gate(lambda m, x: m.down(F.relu(m.up(x))))
        layers.up = Scaled(4, 8)
        read(layers)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("where", ["up", "act", ""])
@pytest.mark.parametrize("what", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
                                  "forward", "parametrization"])
def test_hooks_and_forwards_of_one_module_are_named(where, what):
    layers = without_gate(lambda m, x: m.down(m.act(m.up(x))), nn.ReLU())
    module = layers.get_submodule(where)
    if what == "forward":
        module.forward = lambda x: x
    elif what == "parametrization":
        if where != "up":
            pytest.skip("it has no weight")
        parametrize.register_parametrization(module, "weight", Halved())
    else:
        getattr(module, what)(lambda *_: None)
    with pytest.raises(TypeError, match=rf"{where or 'Layers'} (has hooks|is a .*Parametrized)"):
        read(layers)


def test_reading_computes_and_changes_nothing():
    layers = Layers(GATED[0][0]).to("meta").eval()
    before = {module: dict(vars(module)) for module in layers.modules()}
    assert read(layers)[True].activation == "silu"
    assert all(vars(module) == there for module, there in before.items()) and not layers.training
