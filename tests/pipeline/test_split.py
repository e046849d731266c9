"""A backward in two parts, on models as users write them: the gradients of one backward, and the bytes between."""

import contextlib
import copy
import dataclasses
import functools

import pytest
import torch
from outside.models import GROUPED, causal
from pipeline_kit import WIDTH, mlp
from tensor_kit import GPTS, OTHERS, with_exact_norms
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from users_kit import Model

from refimpl import memory
from refimpl.model import GPT
from refimpl.pipeline import split as split_module
from refimpl.pipeline.split import DeferredByFormulas, DeferredByGraph, SplitBackward

ROWS = 12


def attention(model, x):
    """torch's, which reads the weights of its last layer in place of calling it."""
    x = model.norm(x)
    return x + model.inner(x, x, x, need_weights=False)[0]


def scaled(model, x):
    """Has a weight and a child; calls one layer twice, and reads its weight, too."""
    return F.linear(model.linear(model.linear(x)) * model.scale, model.linear.weight)


def recurrent(model, x):
    out, (hidden, _) = model.inner(x)
    return model.out(out) + hidden.sum()


def recomputed(model, x, reentrant=False):
    return checkpoint(model.body, model.first(x), use_reentrant=reentrant)


def cast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model.body(x).to(x.dtype)


def frozen():
    model = nn.Sequential(linear(), nn.Tanh(), linear(), linear())
    model[2].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def linear():
    return nn.Linear(WIDTH, WIDTH)


def body():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


MODELS = {
    "gpt": lambda: GPT(GPTS["gpt"]), "rotary gpt": lambda: GPT(dataclasses.replace(
        GPTS["gpt"], positions="rotary", norm="rmsnorm", activation="swiglu", bias=False)),
    "gpt2": OTHERS["gpt2"], "llama": causal("llama", **GROUPED),
    "attention": lambda: Model(attention, norm=nn.LayerNorm(WIDTH), inner=nn.MultiheadAttention(
        WIDTH, 4, batch_first=True)),
    "scaled": lambda: Model(scaled, scale=nn.Parameter(torch.ones(WIDTH)), linear=linear()),
    "recurrent": lambda: Model(recurrent, inner=nn.LSTM(WIDTH, WIDTH, batch_first=True), out=linear()),
    "named": lambda: Model(lambda model, x: model.second(input=model.first(x)), first=linear(), second=linear()),
    "recomputed": lambda: Model(recomputed, first=linear(), body=body()),
    "recomputed, reentrant": lambda: Model(functools.partial(recomputed, reentrant=True), first=linear(), body=body()),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear()),
    "batch norm": lambda: nn.Sequential(linear(), nn.Flatten(), nn.BatchNorm1d(3 * WIDTH)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.PReLU()),
    "frozen": frozen,
    "cast": lambda: Model(cast, body=nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear()))}
TOKENS = ("gpt", "rotary gpt", "gpt2", "llama")


def built(name):
    torch.manual_seed(0)
    return with_exact_norms(MODELS[name]().train()).double()


def given(name):
    generator = torch.Generator().manual_seed(1)
    if name in TOKENS:
        return torch.randint(61, (ROWS, 7), generator=generator)
    return torch.randn(ROWS, 3, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(model, x):
    torch.manual_seed(2)
    out = model(x)
    out = getattr(out, "logits", out)
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + out.square().mean()


def gradients(model, x):
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def twice(name):
    """Return a model and its input, and the same again."""
    model, x = built(name), given(name)
    return model, x, copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)


def assert_gradients(model, x, whole, x_whole):
    theirs = gradients(whole, x_whole)
    for key, each in gradients(model, x).items():
        assert (each is None) == (theirs[key] is None), key
        if each is not None:
            assert (each - theirs[key]).abs().max() <= 1e-12 * max(1, theirs[key].abs().max()), key


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_of_one_backward(name):
    model, x, whole, x_whole = twice(name)
    split, parts = SplitBackward(model), []
    with split.recording(parts):
        loss = loss_of(model, x)
    expected = loss_of(whole, x_whole)
    assert torch.equal(loss, expected)
    with split.recording(parts):  # a checkpoint runs its forward once more
        loss.backward()
    expected.backward()
    early = {key for key, each in gradients(model, x).items() if each is not None} - {"x"}
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert set(split.whole) <= early < trained  # something is left for W
    assert name not in TOKENS or not early
    for part in reversed(parts):
        part.weights_backward()
    assert_gradients(model, x, whole, x_whole)
    assert all(torch.equal(each, whole.get_buffer(key)) for key, each in model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_are_added_in_place(name, monkeypatch):
    """B and W at once, twice, so that the second adds to what is there; weights of any size."""
    monkeypatch.setattr(split_module, "LARGE", 0)
    model, x, whole, x_whole = twice(name)
    split = SplitBackward(model)
    for _ in range(2):
        with split.recording():
            loss = loss_of(model, x)
            loss.backward()
        expected = loss_of(whole, x_whole)
        expected.backward()
        assert torch.equal(loss, expected)
    assert_gradients(model, x, whole, x_whole)


LARGE_LAYER = 2**17 * 8  # bytes of a weight


@pytest.mark.parametrize("kind", ["linear", "embedding"])
@pytest.mark.parametrize("in_place", [True, False])  # the mutant is autograd
def test_a_gradient_that_is_added_in_place_takes_no_temporary_tensor(kind, in_place):
    layer = (nn.Linear(256, 512, bias=False) if kind == "linear" else nn.Embedding(512, 256)).double()
    x = torch.randn(2, 256, dtype=torch.float64) if kind == "linear" else torch.tensor([3, 5])
    split = SplitBackward(layer)
    layer.weight.grad = torch.zeros_like(layer.weight)
    with memory.track(layer, layer.weight.grad, x) as t, split.recording() if in_place else contextlib.nullcontext():
        base = t.now.total
        layer(x).sum().backward()
    assert LARGE_LAYER == layer.weight.nbytes
    assert (t.peak.total - base < 0.1 * LARGE_LAYER) == in_place


def test_a_compiled_module_has_its_gradients_in_b():
    model, x, parts = nn.Sequential(linear(), linear()), torch.randn(3, WIDTH), []
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with SplitBackward(model).recording(parts):
        torch.compile(model, backend="aot_eager")(x).square().sum().backward()
    assert not parts and all(torch.allclose(p.grad, each) for p, each in zip(model.parameters(), expected, strict=True))


def hooked(model):
    model[0].weight.register_hook(lambda gradient: gradient * 2)


def accumulated(model):
    def triple(p):
        p.grad.mul_(3)

    model[0].weight.register_post_accumulate_grad_hook(triple)


def overridden(model):
    own = model[0].forward
    model[0].forward = lambda x: own(x) * 2


def watched_by_a_hook(model):
    model[0].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [hooked, accumulated, overridden, watched_by_a_hook])
@pytest.mark.parametrize("divided", [True, False])
def test_what_others_have_put_on_a_module_holds(change, divided, monkeypatch):
    monkeypatch.setattr(split_module, "LARGE", 0)
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model, x, parts = nn.Sequential(linear(), linear()), torch.randn(3, WIDTH), []
        change(model)
        split = SplitBackward(model) if ours else None
        with split.recording(parts if divided else None) if ours else contextlib.nullcontext():
            model(x).square().sum().backward()
        for part in parts:
            part.weights_backward()
        if ours:
            split.remove()
            assert ("forward" in model[0].__dict__) == (change is overridden)
        found.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def test_parameters_whose_gradients_come_in_b_are_named():
    assert SplitBackward(built("attention")).whole == ["inner.in_proj_weight", "inner.in_proj_bias"]
    assert SplitBackward(built("scaled")).whole == ["scale"] and SplitBackward(built("gpt")).whole == []


def test_outside_of_a_recording_a_backward_is_one():
    model, x = built("gpt"), given("gpt")
    split = SplitBackward(model)
    loss_of(model, x).backward()
    assert all(p.grad is not None for p in model.parameters())
    with split.recording([]), torch.no_grad():
        assert not loss_of(model, x).requires_grad
    other = copy.deepcopy(model)
    other.head.weight.data.zero_()  # its forward is its own
    with split.recording([]):
        assert loss_of(other, x).item() == 0 and loss_of(model, x).item() != 0
    split.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_version_that_leaves_nothing_for_w_is_seen():
    """The mutant whose B is the whole backward: what the test above holds `early` to."""
    model, x = built("gpt"), given("gpt")
    loss_of(model, x).backward()
    assert all(p.grad is not None for p in model.parameters())


# --- bytes between F, B and W ----------------------------------------------------------------------------------------

LAYER, HIDDEN = 8 * ROWS * 3 * WIDTH, 8 * ROWS * 3 * 4 * WIDTH  # bytes of x, and of what is 4 times as wide


def kept(whole_graph=False, parts_too=False):
    """Return the bytes kept after F, after B and after W. Mutants keep the graph after B, or the parts after W."""
    model, x = mlp(), given("mlp")
    for each in (x, *model.parameters()):
        each.grad = torch.zeros_like(each)
    split, parts, dy = SplitBackward(model), [], torch.ones(ROWS, 3, WIDTH, dtype=torch.float64)
    found = []
    with memory.track(model, x, x.grad, dy) as t:
        base = t.now.total
        with split.recording(parts):
            end = torch.autograd.graph.get_gradient_edge(model(x))
        found.append(t.now.total - base)
        torch.autograd.backward([end], [dy], retain_graph=whole_graph)
        found.append(t.now.total - base)
        for part in parts:
            part.weights_backward()
        parts = parts if parts_too else None
        del end
        found.append(t.now.total - base)
    return found


def test_bytes_between_f_b_and_w():
    statistics = 2 * 8 * ROWS * 3  # mean and 1/σ
    after_f = statistics + LAYER + 2 * HIDDEN  # norm's, its output for `up`, GELU's input and its output for `down`
    after_b = statistics + LAYER + HIDDEN + LAYER + HIDDEN  # without GELU's input; dy of the norm, and of `up`
    assert kept() == [after_f, after_b, 0]


def test_a_graph_that_is_kept_after_b_is_seen():
    assert kept(whole_graph=True)[1] == kept()[1] + HIDDEN  # GELU's input


def test_a_part_that_keeps_its_graph_after_w_is_seen(monkeypatch):
    before = kept()[1]

    def keeping(part):
        torch.autograd.backward(part.ends, part.gradients, inputs=[*part.leaf.parameters()], retain_graph=True)

    monkeypatch.setattr(DeferredByGraph, "weights_backward", keeping)
    monkeypatch.setattr(DeferredByFormulas, "weights_backward", lambda part: None)
    assert kept(parts_too=True)[2] == before


def test_gradients_that_a_small_graph_keeps_until_w_are_activations():
    leaf, x = linear(), torch.ones(ROWS, WIDTH, requires_grad=True)
    part = DeferredByGraph(leaf, [get_gradient_edge(leaf(x))], [x])
    with memory.track(leaf, x) as t:
        part.inputs_backward([torch.ones(ROWS, WIDTH)])
    assert t.now["activations"] == x.nbytes
