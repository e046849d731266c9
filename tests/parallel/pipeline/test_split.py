"""A backward in two parts, on models as users write them: the gradients of one backward, and the bytes between."""

import contextlib
import copy

import pytest
import torch
from outside.models import GROUPED, causal
from tensor_kit import with_exact_norms
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from refimpl import memory
from refimpl.model import GPT, GPTConfig
from refimpl.parallel.pipeline import split as split_module
from refimpl.parallel.pipeline.split import KnownPart, Part, SplitBackward

WIDTH, ROWS = 16, 12


class Attention(nn.Module):
    """torch's, which reads the weights of its last layer in place of calling it."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        return x + self.inner(x, x, x, need_weights=False)[0]


class Scaled(nn.Module):
    """Has a weight and a child; calls one layer twice, and reads its weight, too."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.linear(self.linear(self.linear(x)) * self.scale, self.linear.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out, (hidden, _) = self.inner(x)
        return self.out(out) + hidden.sum()


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)


class Named(nn.Module):
    """Gives a layer its input by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(input=self.first(x))


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x).to(x.dtype)


def frozen():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[2].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


GPTS = {"vocab_size": 61, "context_length": 16, "layers": 2, "hidden": 32, "heads": 4}
SIZES = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "gpt": lambda: GPT(GPTConfig(**GPTS)),
    "rotary gpt": lambda: GPT(GPTConfig(**GPTS, positions="rotary", norm="rmsnorm", activation="swiglu", bias=False)),
    "gpt2": causal("gpt2", **SIZES), "llama": causal("llama", **GROUPED),
    "attention": Attention, "scaled": Scaled, "recurrent": Recurrent, "named": Named,
    "recomputed": lambda: Recomputed(False), "recomputed, reentrant": lambda: Recomputed(True),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(), nn.BatchNorm1d(3 * WIDTH)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.PReLU()),
    "frozen": frozen, "cast": Cast}
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


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_of_one_backward(name):
    model, x = built(name), given(name)
    whole, x_whole = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    split, parts = SplitBackward(model), []
    with split.recording(parts):
        loss = loss_of(model, x)
    expected = loss_of(whole, x_whole)
    assert torch.equal(loss, expected)
    with split.recording(parts):  # a checkpoint runs its forward once more
        loss.backward()
    expected.backward()
    theirs = gradients(whole, x_whole)
    early = {key for key, each in gradients(model, x).items() if each is not None} - {"x"}
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert early < trained  # something is left for W
    assert early >= set(split.whole)
    if name in TOKENS:
        assert not early
    for part in reversed(parts):
        part.weights_backward()
    for key, each in gradients(model, x).items():
        if theirs[key] is None:
            assert each is None, key
        else:
            assert (each - theirs[key]).abs().max() <= 1e-12 * max(1, theirs[key].abs().max()), key
    for key, each in model.named_buffers():
        assert torch.equal(each, whole.get_buffer(key))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_are_added_in_place(name, monkeypatch):
    """B and W at once, twice, so that the second adds to what is there; weights of any size."""
    monkeypatch.setattr(split_module, "LARGE", 0)
    model, x = built(name), given(name)
    whole, x_whole = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    split = SplitBackward(model)
    for _ in range(2):
        with split.recording():
            loss = loss_of(model, x)
            loss.backward()
        expected = loss_of(whole, x_whole)
        expected.backward()
        assert torch.equal(loss, expected)
    theirs = gradients(whole, x_whole)
    for key, each in gradients(model, x).items():
        assert (each is None) == (theirs[key] is None), key
        if each is not None:
            assert (each - theirs[key]).abs().max() <= 1e-12 * max(1, theirs[key].abs().max()), key


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
    torch.manual_seed(0)
    model, x, parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH), []
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    split = SplitBackward(model)
    compiled = torch.compile(model, backend="aot_eager")
    with split.recording(parts):
        compiled(x).square().sum().backward()
    assert not parts
    assert all(torch.allclose(p.grad, each) for p, each in zip(model.parameters(), expected, strict=True))


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
        model, x, parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH), []
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
    assert SplitBackward(built("scaled")).whole == ["scale"]
    assert SplitBackward(built("gpt")).whole == []


def test_outside_of_a_recording_a_backward_is_one():
    model, x = built("gpt"), given("gpt")
    split = SplitBackward(model)
    loss_of(model, x).backward()
    theirs = gradients(model, x)
    assert all(each is not None for key, each in theirs.items() if key != "x")
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


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
                         nn.Linear(4 * WIDTH, WIDTH)).double()


def kept(whole_graph=False, parts_too=False):
    """Return the bytes kept after F, after B and after W. Mutants keep the graph after B, or the parts after W."""
    model, x = mlp(), given("mlp")
    x.grad = torch.zeros_like(x)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
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

    monkeypatch.setattr(Part, "weights_backward", keeping)
    monkeypatch.setattr(KnownPart, "weights_backward", lambda part: None)
    assert kept(parts_too=True)[2] == before
