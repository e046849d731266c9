"""checkpoint: the gradients of a plain call bit for bit, and the bytes of its inputs alone."""

import gc
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from users_kit import function_of

from refimpl import memory
from refimpl.checkpointing import RecomputeError, checkpoint
from refimpl.checkpointing.region import OPTIONS, OPTIONS_OF_TORCH, RecomputedRegion
from refimpl.model import GPT, GPTConfig, softmax_attention

CONFIG = GPTConfig(vocab_size=64, context_length=64, layers=2, hidden=32, heads=4, dropout=0.1)
RANDOM_STATE = 5056  # bytes, of the CPU's generator


def plain(fn, *args, **kwargs):
    """The mutant: right in every result, and it saves nothing."""
    return fn(*args, **kwargs)


def gpt(how=plain, config=CONFIG, **options):
    torch.manual_seed(0)
    model = GPT(config, **options)
    for block in model.blocks:
        block.forward = partial(how, block.forward)
    return model


def step(model, tokens):
    torch.manual_seed(1)
    loss = model(tokens, tokens)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def tanh_chain(x, w, depth=4):
    for _ in range(depth):
        x = (x @ w).tanh()
    return x


def gradients(how, fn, x, w):
    return torch.autograd.grad(how(fn, x, w).square().sum(), (x, w))


# --- parity -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", [softmax_attention, F.scaled_dot_product_attention])
def test_gradients_of_a_gpt_are_bit_equal(dropout, attention):
    config, tokens = replace(CONFIG, dropout=dropout), torch.randint(0, 64, (2, 32))
    expected_loss, expected = step(gpt(plain, config, attention=attention), tokens)
    after_plain = torch.get_rng_state()
    loss, found = step(gpt(checkpoint, config, attention=attention), tokens)
    assert torch.equal(loss, expected_loss) and same(found, expected)
    assert torch.equal(after_plain, torch.get_rng_state()), "the recomputation drew numbers of its own"


@pytest.mark.parametrize("tracked", ["forward", "backward"])
def test_a_tracker_may_look_on_in_forward_or_in_backward_alone(tracked):
    """A dispatch mode has `reshape` make another node of autograd."""
    tokens, found = torch.randint(0, 64, (2, 32)), {}
    for how in (plain, checkpoint):
        model = gpt(how)
        torch.manual_seed(1)
        with memory.track() if tracked == "forward" else nullcontext():
            loss = model(tokens, tokens)
        with memory.track() if tracked == "backward" else nullcontext():
            loss.backward()
        found[how] = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, found[plain], found[checkpoint]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_it_was_in_the_forward(dtype):
    tokens = torch.randint(0, 64, (2, 32))
    def under_autocast(how):
        model = gpt(how)
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            loss = model(tokens, tokens)
        loss.backward()  # outside of autocast, as torch advises
        return [p.grad for p in model.parameters()]
    assert same(under_autocast(checkpoint), under_autocast(plain))


def test_a_backward_under_autocast_recomputes_without_it(x, w):
    def run(how):
        y = how(tanh_chain, x, w).sum()
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(y, (x, w))
    assert same(run(checkpoint), run(plain))


def test_any_arguments_and_several_outputs(x, w):
    def fn(pair, table, index, *, scale, nothing=None, name):
        assert nothing is None and name == "linear" and index.dtype == torch.int64
        hidden = pair[0] @ table["w"][index] * scale
        return {"out": hidden.tanh(), "index": index, "more": (hidden.sin(), None, 3)}
    index, fixed = torch.randperm(32), torch.randn(16, 32)
    def run(how):
        out = how(fn, (x, fixed), {"w": w}, index, scale=torch.tensor(2.0), name="linear")
        assert out["index"] is index and out["more"][1:] == (None, 3)
        return torch.autograd.grad(out["out"].sum() + (out["more"][0] * fixed).sum(), (x, w))
    assert same(run(checkpoint), run(plain))


def test_inputs_that_need_no_gradient_and_tokens(w):
    layer, tokens = nn.Embedding(10, 32), torch.randint(0, 10, (4, 8))
    def run(how):
        return torch.autograd.grad(how(lambda t: (layer(t) @ w).tanh(), tokens).sum(), (layer.weight, w))
    assert same(run(checkpoint), run(plain))


def test_outputs_used_twice(x, w):
    def run(how):
        y = how(tanh_chain, x, w)
        return torch.autograd.grad((y * y + y.sin()).sum() + y[0, 0], (x, w))
    assert same(run(checkpoint), run(plain))


def test_nested_regions(x, w):
    def middle(x, w):
        return checkpoint(tanh_chain, checkpoint(tanh_chain, x, w), w).sin()
    def outer(x, w):
        return checkpoint(middle, tanh_chain(x, w), w).cos()
    def without(x, w):
        return tanh_chain(tanh_chain(tanh_chain(x, w), w), w).sin().cos()
    assert same(gradients(checkpoint, outer, x, w), gradients(plain, without, x, w))


def test_a_graph_that_is_kept_is_walked_again(x, w):
    loss = checkpoint(tanh_chain, x, w).square().sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second, third = torch.autograd.grad(loss, (x, w), retain_graph=True), torch.autograd.grad(loss, (w,))
    assert same(first, second) and same(first[1:], third) and same(first, gradients(plain, tanh_chain, x, w))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives(x, w):
    def penalty(how):
        (slope,) = torch.autograd.grad(how(tanh_chain, x, w).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, w))
    assert same(penalty(checkpoint), penalty(plain))


def test_a_derivative_inside_the_region(x, w):
    def fn(x, w):
        (slope,) = torch.autograd.grad(tanh_chain(x, w).sum(), x, create_graph=True)
        return slope.square() + x
    leaf = x.detach().requires_grad_()
    assert same(gradients(checkpoint, fn, leaf, w), gradients(plain, fn, leaf, w))


def test_a_function_that_reads_its_saved_tensors_twice(x):
    def backward(ctx, g):
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        return g * (first == second) * 2
    twice = function_of(lambda ctx, x: ctx.save_for_backward(x) or x * 2, backward)
    assert same(torch.autograd.grad(checkpoint(lambda x: twice.apply(x.sin()), x).sum(), x),
                torch.autograd.grad(twice.apply(x.sin()).sum(), x))


def test_backward_from_several_threads(x, w):
    losses = [checkpoint(tanh_chain, x, w).sum() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda loss: torch.autograd.grad(loss, (x, w)), losses))
    expected = torch.autograd.grad(tanh_chain(x, w).sum(), (x, w))
    assert all(same(each, expected) for each in found)


def test_without_grad_mode_it_is_a_plain_call(x, w):
    calls = []
    def fn(x):
        calls.append(torch.is_grad_enabled())
        return x * 2
    with torch.no_grad():
        assert not checkpoint(fn, x).requires_grad
    with torch.inference_mode():
        checkpoint(fn, x)
    assert calls == [False, False] and not checkpoint(fn, x.detach()).requires_grad


# --- bytes ------------------------------------------------------------------------------------------------------------

def kept(how, config=CONFIG, dtype=torch.float32):
    tokens, model = torch.randint(0, 64, (2, 64)), gpt(how, config, dtype=dtype)
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
    assert loss.isfinite()
    return t.now.total - t.start.total - loss.nbytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_region_keeps_its_input_and_no_more(dropout, dtype):
    config = replace(CONFIG, dropout=dropout)
    terms = memory.activation_terms(config, 2, 64, dtype)
    inputs = CONFIG.layers * dtype.itemsize * 2 * 64 * CONFIG.hidden
    states = CONFIG.layers * RANDOM_STATE * (dropout > 0)
    assert kept(checkpoint, config, dtype) == sum(terms.values()) - terms["blocks"] + inputs + states
    assert kept(plain, config, dtype) == sum(terms.values()), "the mutant is the whole activation"


@pytest.mark.parametrize("measured", ["tracker", "allocator"])
def test_the_peak_is_not_above_torchs(measured):
    tokens = torch.randint(0, 64, (2, 64))
    def peak(how):
        model = gpt(how)
        step(model, tokens)
        model.zero_grad()
        with memory.track(model) if measured == "tracker" else memory.measure("cpu") as m:
            step(model, tokens)
        return m.peak.total if measured == "tracker" else m.peak
    ours, theirs = peak(checkpoint), peak(partial(torch_checkpoint, use_reentrant=False))
    assert ours <= theirs < peak(plain)


def test_backward_lets_go_of_each_tensor_as_it_takes_it(monkeypatch):
    """The mutant keeps all that was recomputed until the region goes."""
    x = torch.randn(1000, requires_grad=True)
    def wide(x):
        for _ in range(8):
            x = x.sin()
        return x
    def held_along_backward():
        with memory.track(x) as t:
            checkpoint(wide, x).sum().backward()
        by_op = [(m.operation, m.ledger["activations"]) for m in t.timeline if m.phase == "backward"]
        return [held for name, held in by_op if name == "cos"]
    assert held_along_backward() == [(7 - i) * 4000 for i in range(8)]  # x itself is an input
    class Hoarder(RecomputedRegion):
        def pop_tensor(self, placeholder):
            tensor = super().pop_tensor(placeholder)
            self.__dict__.setdefault("hoard", []).append(tensor)
            return tensor

    monkeypatch.setattr("refimpl.checkpointing.region.RecomputedRegion", Hoarder)
    assert held_along_backward() == [7 * 4000] * 8


def test_the_recomputation_stops_with_the_last_tensor_needed():
    runs = []
    def fn(x):
        y = x.sin()
        runs.append("half")
        y = y + y.cos()
        runs.append("whole")
        return y * 3
    x = torch.randn(4, requires_grad=True)
    for early_stop, expected in ((True, ["half"]), (False, ["half", "whole"])):
        y = checkpoint(fn, x, early_stop=early_stop)
        runs.clear()
        y.sum().backward()
        assert runs == expected


def test_a_region_runs_once_more_for_a_backward_and_is_gone_after_it(x, w):
    runs = []
    def fn(x):
        runs.append(1)
        return tanh_chain(x, w)
    gc.collect()
    y = checkpoint(fn, x)
    y.square().sum().backward()
    assert len(runs) == 2
    del y
    assert not [o for o in gc.get_objects() if type(o) is RecomputedRegion], "it waits for the collector of cycles"


def test_what_a_backward_does_not_take_goes_at_its_end():
    x, unused = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)
    left, right = checkpoint(lambda x, other: (x.sin().sin(), other.sin().sin().sin()), x, unused)
    with memory.track(x, unused) as t:
        (gradient,) = torch.autograd.grad(left.sum(), x)
    assert t.now.total - t.start.total == gradient.nbytes and right.requires_grad


def test_looking_at_a_node_leaves_nothing_behind(x, w):
    y = checkpoint(tanh_chain, x, w)
    with memory.track(x, w) as t:
        seen = y.grad_fn._saved_result
    assert torch.equal(seen, tanh_chain(x, w)) and t.now.total - t.start.total == seen.nbytes


# --- what goes wrong --------------------------------------------------------------------------------------------------

def test_what_cannot_be_called_is_refused(x):
    with pytest.raises(TypeError, match=r"checkpoint\(Tensor, …\): expected a function"):
        checkpoint(x.sin(), x)


@pytest.mark.parametrize("name", OPTIONS_OF_TORCH)
def test_an_option_of_torch_s_checkpoint_is_refused(x, name):
    with pytest.raises(TypeError, match=f"{name}=False is an option of torch.*early_stop, save, recompute_context"):
        checkpoint(lambda x, **anything: x.sin(), x, **{name: False})
    assert name in inspect.getsource(torch_checkpoint), "torch knows it"


def test_the_options_are_those_of_the_signature():
    parameters = inspect.signature(checkpoint).parameters.values()
    assert OPTIONS == tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize(("second", "early_stop", "message"), [
    (lambda x: x.sin().cos().tanh(), True, r"tensor 2 of the 3 .*TanhBackward0.* was .*ExpBackward0"),
    (lambda x: x.double().sin().cos().exp(), True, r"tensor 0 .* is float64 \[16, 32\].* was float32 \[16, 32\]"),
    (lambda x: x[:4].sin().cos().exp(), True, r"tensor 0 .* is float32 \[4, 32\].* was float32 \[16, 32\]"),
    (lambda x: x.sin().exp(), True, r"tensor 1 .* made by ExpBackward0 .* was .* made by SinBackward0"),
    (lambda x: x.sin(), True, r"3 tensors in the forward and 1 in the recomputation: tensor 1, .* is missing"),
    (lambda x: x.sin().cos().exp().exp(), False, "3 tensors in the forward and 4 .*: tensor 3 was not there before")])
def test_another_function_the_second_time_names_the_first_difference(x, second, early_stop, message):
    runs = [lambda x: x.sin().cos().exp(), second]
    y = checkpoint(lambda x: runs.pop(0)(x), x, early_stop=early_stop)
    with pytest.raises(RecomputeError, match=message):
        y.sum().backward()


def test_an_argument_changed_in_place_is_an_error():
    x, buffer = torch.randn(8, requires_grad=True), torch.randn(8)
    y = checkpoint(lambda x, b: (x * b).sin(), x, buffer)
    buffer.add_(1)
    with pytest.raises(RuntimeError, match=r"float32 \[8\].*changed in place.*version 1, expected 0; clone"):
        y.sum().backward()


@pytest.mark.parametrize("tracked", [False, True])
def test_an_exception_in_the_recomputation_leaves_everything_as_it_was(x, w, tracked):
    failures, runs = [RuntimeError("out of memory"), KeyboardInterrupt("stop button")], []
    def fn(x):
        y = F.dropout(tanh_chain(x, w), 0.5)
        runs.append(1)
        if len(runs) > 1 and failures:
            raise failures.pop(0)
        return (y @ w).tanh()
    torch.manual_seed(2)
    loss = checkpoint(fn, x).sum()
    state, threshold = torch.get_rng_state(), torch._C._autograd._top_saved_tensors_default_hooks(True)
    for kind in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(kind), memory.track(x) if tracked else torch.enable_grad():
            torch.autograd.grad(loss, (x, w), retain_graph=True)
        assert torch.equal(state, torch.get_rng_state())
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == threshold
    found = torch.autograd.grad(loss, (x, w))
    torch.manual_seed(2)
    assert same(found, torch.autograd.grad((F.dropout(tanh_chain(x, w), 0.5) @ w).tanh().sum(), (x, w)))


def test_a_recomputation_that_fails_holds_no_bytes(x, w):
    runs = []
    def fn(x):
        runs.append(1)
        y = tanh_chain(x, w)
        return y.sin() if len(runs) == 1 else y.reshape(-1).sin()
    loss = checkpoint(fn, x).sum()
    with memory.track(x, w) as t, pytest.raises(RecomputeError):
        torch.autograd.grad(loss, (x, w), retain_graph=True)
    assert t.now.total == t.start.total and loss.requires_grad


def test_a_function_that_writes_into_its_input_makes_no_cycle(x):
    gc.collect()
    hidden = x.sin()
    y = checkpoint(lambda h: h.exp_() * 2, hidden)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()
    del hidden, y
    assert not [o for o in gc.get_objects() if type(o) is RecomputedRegion], "it waits for the collector of cycles"


def test_an_exception_in_the_forward_leaves_no_hooks(x):
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: x.sin() / (1 // 0), x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_function_that_swallows_exceptions_gets_its_gradients(x, w):
    def fn(x):
        y = x
        for _ in range(3):
            try:
                y = (y @ w).tanh()
            except Exception:
                y = y * 2
        return y
    assert same(torch.autograd.grad(checkpoint(fn, x).sum(), (x, w)), torch.autograd.grad(fn(x).sum(), (x, w)))


def test_a_dry_run_reads_the_same_bytes():
    config = replace(CONFIG, dropout=0.0)
    def train():
        model, tokens = gpt(checkpoint, config), torch.zeros(2, 32, dtype=torch.int64)
        model(tokens, tokens).backward()
    with memory.track() as real:
        train()
    assert memory.dry_run(train).peak == real.peak


# --- inputs kept in another form --------------------------------------------------------------------------------------

class Rounded:
    """Keeps fp32 inputs in bf16. `.log` says what it was asked."""

    def __init__(self):
        self.log = []

    def pack(self, tensor):
        self.log.append("pack")
        return (tensor.detach().bfloat16(), tensor.dtype) if tensor.dtype is torch.float32 else None

    def unpack(self, kept, dtype):
        self.log.append("unpack")
        return kept.to(dtype)


class Hoarding(Rounded):
    """The mutant: it keeps the original, too."""

    def pack(self, tensor):
        packed = super().pack(tensor)
        return packed and (packed[0], (packed[1], tensor.detach()))

    def unpack(self, kept, context):
        return super().unpack(kept, context[0])


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("make", [Rounded, Hoarding])
def test_an_input_is_kept_as_keep_has_it(make, early_stop, w):
    keep, start = make(), torch.randn(64, 32, requires_grad=True)
    with memory.track(start, w) as t:
        y = checkpoint(lambda x, integers: (x @ w).tanh(), start * 1, torch.arange(5), keep=keep, early_stop=early_stop)
        kept = t.now.total - t.start.total - y.nbytes - 5 * 8
        (found,) = torch.autograd.grad(y.sum(), w)
    assert keep.log == ["pack", "pack", "unpack"]
    expected = torch.autograd.grad((start.detach().bfloat16().float() @ w).tanh().sum(), w)[0]
    assert torch.equal(found, expected) and kept == 64 * 32 * (2 if make is Rounded else 2 + 4)


def test_in_the_forward_of_another_region_nothing_is_kept_of_it(x, w):
    keep = Rounded()
    with memory.track(x, w) as t:
        y = checkpoint(lambda x: checkpoint(tanh_chain, x.sin(), w, keep=keep).cos(), x)
        assert t.now.total - t.start.total == y.nbytes, "the mutant: its own 2 bytes an element on top"
        y.sum().backward()
    assert keep.log == ["pack"] * 4 + ["unpack"] * 2, "x.sin() and w, in the forward and in the outer recomputation"


def test_what_cannot_keep_is_refused(x):
    with pytest.raises(TypeError, match=r"keep='cpu' has no method pack: expected an object with pack\(tensor\)"):
        checkpoint(torch.sin, x, keep="cpu")
