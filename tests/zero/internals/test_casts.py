"""Casts that autocast makes of weights have bytes only while the weights have; gradients are the same to the bit."""

import contextlib
import copy
import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from outside.models import GROUPED, causal, text
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero_kit import CONFIG

from refimpl import memory
from refimpl.mixed_precision import autocast, autocast_activation_bytes, weight_cast_bytes
from refimpl.model import GPT
from refimpl.zero.internals.backwards import Backwards
from refimpl.zero.internals.casts import KEY, Casts, cast_bytes
from refimpl.zero.units import default_units, parameters_of_units

WIDTH = 24
OURS, TORCHS = (functools.partial(autocast, torch.bfloat16, "cpu"),
                functools.partial(torch.autocast, "cpu", torch.bfloat16))
REGIONS = {"ours": OURS, "ours, no cache": functools.partial(OURS, cache=False),
           "ours, fp16": functools.partial(autocast, torch.float16, "cpu"), "torch's": TORCHS,
           "torch's, no cache": functools.partial(TORCHS, cache_enabled=False), "no region": contextlib.nullcontext}


class Kept(Casts):
    """The mutant: casts stay."""
    def release(self, whole):
        pass


class Sharded:
    """A model whose parameters are whole only while a unit computes with them, as at stage 3 of ZeRO, on one rank."""

    def __init__(self, model, casts=None, units=None):
        self.model, self.casts, self.users = model, Casts() if casts is None else casts, Counter()
        self.backwards = Backwards(self.gather, self.release)
        self.flats, place = {}, {}
        for unit, parameters in parameters_of_units(default_units(model) if units is None else units).items():
            new = [p for p in parameters if p not in place]
            if new:
                flat = torch.cat([p.detach().flatten() for p in new])
                for p, part in zip(new, flat.split([p.numel() for p in new]), strict=True):
                    p.data, place[p] = part.view(p.shape), (flat, flat.clone())
            self.flats[unit] = list({id(place[p][0]): place[p] for p in parameters}.values())
            unit.register_forward_pre_hook(self.before, prepend=True)
            unit.register_forward_hook(self.after, always_call=True)
        for flats in self.flats.values():
            for flat, _ in flats:
                flat.untyped_storage().resize_(0)

    def gather(self, unit):
        for flat, values in self.flats[unit]:
            self.users[flat] += 1
            if self.users[flat] == 1:
                flat.untyped_storage().resize_(values.nbytes)
                flat.copy_(values)
                self.casts.restore(flat)

    def release(self, unit):
        for flat, _ in self.flats[unit]:
            self.users[flat] -= 1
            if not self.users[flat]:
                self.casts.release(flat)
                flat.untyped_storage().resize_(0)

    def before(self, unit, args):
        self.backwards.enter(unit, in_backward())
        self.gather(unit)
        self.casts.begin()

    def after(self, unit, args, output):
        self.casts.end()
        self.backwards.leave(output, in_backward())
        self.release(unit)

    def backward(self, loss, **options):
        loss.backward(**options)
        self.backwards.end_all()
        self.backwards.forget()


def in_backward():
    return torch._C._current_graph_task_id() != -1


class Stack(nn.Module):
    """Blocks; `order`: in which they are called; `around`: what each call is wrapped in."""

    def __init__(self, *blocks, order=None, around=lambda block, x: block(x)):
        super().__init__()
        self.blocks, self.order, self.around = nn.ModuleList(blocks), order or range(len(blocks)), around

    def forward(self, x):
        x = x.clone().requires_grad_()
        for index in self.order:
            x = self.around(self.blocks[index], x).tanh()
        return x.float().square().mean()


class Inside(nn.Module):
    """A unit that wraps its own computation."""

    def __init__(self, around):
        super().__init__()
        self.layer, self.around = nn.Sequential(linear(), nn.GELU(), linear(), nn.LayerNorm(WIDTH)), around

    def forward(self, x):
        return self.around(self.layer, x)


class Adapted(nn.Module):
    """A frozen weight and a small one beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = linear(), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Attention(nn.MultiheadAttention):
    """It takes one weight apart: casts of views."""
    def forward(self, x):
        return super().forward(x, x.detach() + 1, x, need_weights=False)[0]


class Own(nn.Linear):
    """It casts its weight by itself, and keeps that."""
    def forward(self, x):
        self.kept = self.weight.bfloat16()
        return F.linear(x, self.weight) + F.linear(x.bfloat16(), self.kept)


class Opens(nn.Sequential):
    """It opens a region by itself."""
    def forward(self, x):
        with REGIONS["torch's"](), REGIONS["ours"](enabled=False):
            return super().forward(x)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def linears(count, **options):
    return Stack(*(linear() for _ in range(count)), **options)


def tied():
    model = linears(3)
    model.blocks[2].weight = model.blocks[0].weight
    return model


def on_host(block, x):
    with save_on_cpu():
        return block(x)


RECOMPUTE = [functools.partial(checkpoint, use_reentrant=reentrant) for reentrant in (False, True)]
MODELS = {
    "linear layers": lambda: linears(3), "a weight of two units": tied,
    "blocks": lambda: Stack(*(nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.GELU(), linear()) for _ in range(3))),
    "a layer several times": lambda: linears(2, order=[0, 1, 0, 0, 1]),
    "adapted": lambda: Stack(*(Adapted() for _ in range(3))),
    "attention": lambda: Stack(*(Attention(WIDTH, 4, batch_first=True) for _ in range(2))),
    "casts of its own": lambda: Stack(*(Own(WIDTH, WIDTH) for _ in range(3))),
    "regions of its own": lambda: Stack(*(Opens(linear(), linear()) for _ in range(3))),
    "recomputed": lambda: linears(3, around=RECOMPUTE[0]),
    "recomputed, reentrant": lambda: linears(3, around=RECOMPUTE[1]),
    "a layer several times, recomputed": lambda: linears(2, order=[0, 1, 0, 0], around=RECOMPUTE[0]),
    "recomputed inside": lambda: Stack(*(Inside(RECOMPUTE[0]) for _ in range(3))),
    "recomputed inside, reentrant": lambda: Stack(*(Inside(RECOMPUTE[1]) for _ in range(3))),
    "recomputed twice": lambda: Stack(*(Inside(RECOMPUTE[0]) for _ in range(3)), around=RECOMPUTE[0]),
    "on the host": lambda: Stack(*(Inside(on_host) for _ in range(3)), linear(), around=on_host)}


def batch():
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def results(model, region, shard=None):
    """Losses of two steps, and gradients; and the sharded model."""
    sharded, found = shard and shard(model), []
    for _ in range(2):
        with region():
            loss = model(batch())
        found.append(loss.item())
        sharded.backward(loss) if shard else loss.backward()
    return found + [p.grad for p in model.parameters() if p.grad is not None], sharded


def equal(ours, theirs):
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_same_to_the_bit(name, region):
    torch.manual_seed(0)
    model = MODELS[name]()
    expected, _ = results(copy.deepcopy(model), REGIONS[region])
    ours, sharded = results(model, REGIONS[region], Sharded)
    assert equal(ours, expected)
    assert sharded.casts.nbytes() == 0 and not any(sharded.users.values())
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)


@pytest.mark.parametrize("region", ["ours", "torch's"])
def test_a_model_of_transformers(region):
    torch.manual_seed(0)
    plain, given, found = causal("llama", **GROUPED)(), text(2, 8)(), []
    for model in (copy.deepcopy(plain), plain):
        sharded = Sharded(model) if model is plain else None
        with memory.track(model) as t, REGIONS[region]():
            loss = model(**given).loss
        (sharded.backward if sharded else torch.Tensor.backward)(loss)
        found.append((loss.item(), [p.grad for p in model.parameters()], t.now["activations"]))
    (loss, gradients, bytes_kept), (ours, our_gradients, our_bytes) = found
    assert ours == loss and equal(our_gradients, gradients)
    matrices = [p for layer in plain.model.layers for p in layer.parameters() if p.dim() == 2]
    assert bytes_kept - our_bytes == 2 * sum(p.numel() for p in (*matrices, plain.lm_head.weight))


def most_casts(model, casts, region):
    """Bytes of casts: at most in forward, at its end, at most in backward, at the end."""
    sharded, found = Sharded(model, casts), []

    def look():
        found[-1] = max(found[-1], alive(casts))

    for unit in sharded.flats:
        unit.register_forward_hook(lambda *_: look(), prepend=True)
    sharded.backwards = Backwards(lambda unit: (sharded.gather(unit), look()), sharded.release)
    found.append(0)
    with region():
        loss = model(batch())
        found.append(alive(casts))
    found.append(0)
    sharded.backward(loss)
    return [*found, alive(casts)]


def alive(casts):
    """Bytes of all casts that anyone holds."""
    return sum(cast.nbytes() for each in (casts._of, casts._away) for kept in each.values() for cast in kept)


@pytest.mark.parametrize("region", ["ours", "torch's"])
def test_casts_are_those_of_one_unit(region):
    one, weights = cast_bytes([[*linear().parameters()]] * 4), 4 * 2 * WIDTH * WIDTH
    assert one == 2 * (WIDTH * WIDTH + WIDTH)
    assert most_casts(linears(4), Casts(), REGIONS[region]) == [one, 0, one - 2 * WIDTH, 0]
    kept = most_casts(linears(4), Kept(), REGIONS[region])
    assert kept == [4 * one, 4 * one, weights, 0], "the mutant"


def activations(make_casts, region):
    """What the tracker counts at the end of a forward of the GPT."""
    torch.manual_seed(0)
    model, tokens = GPT(CONFIG), torch.zeros(2, 16, dtype=torch.int64)
    sharded = Sharded(model, make_casts(), [*model.blocks, model])
    with memory.track(model, tokens) as t:
        with region():
            loss = model(tokens, tokens)
        kept = t.now["activations"]
        sharded.backward(loss)
    return kept


@pytest.mark.parametrize("region", ["ours", "torch's"])
def test_activations_are_those_without_the_casts(region):
    predicted, casts = autocast_activation_bytes(CONFIG, 2, 16), weight_cast_bytes(CONFIG, biases=False)
    assert activations(Kept, REGIONS[region]) == predicted, "the mutant"
    assert activations(Casts, REGIONS[region]) == predicted - casts


def test_a_dry_run_counts_the_same():
    for given in ((Casts, REGIONS["ours"]), (Kept, REGIONS["ours"])):
        assert memory.dry_run(activations, *given).result == activations(*given)


def test_the_allocator_sees_it():
    """It shares no fault with the tracker. Weights are large and rows few; a gradient takes 4 bytes an element, and a
    cast 2."""
    peaks = []
    for make_casts in (Casts, Kept):
        model, x = Stack(*(nn.Linear(256, 256) for _ in range(8))), torch.ones(1, 256)
        Sharded(model, make_casts())
        with memory.measure() as m, REGIONS["ours"]():
            loss = model(x)
        peaks.append(m.peak)
        del loss
    assert 7 <= (peaks[1] - peaks[0]) / (2 * 256 * 256) <= 7.1


@pytest.mark.parametrize("region", ["ours", "torch's"])
def test_a_cast_that_is_read_while_it_is_released_is_nan(region):
    """The cache still has it. As a view of a storage without bytes it would be read at address 0."""
    model = linears(2)
    Sharded(model)
    with REGIONS[region]():
        model(batch())
        assert F.linear(batch(), model.blocks[0].weight, None).isnan().all()


def test_casts_of_the_program_are_left_to_it():
    model = Stack(Own(WIDTH, WIDTH))
    weight = model.blocks[0].weight.detach().clone()
    Sharded(model)
    for region in REGIONS.values():
        with region():
            model(batch())
        assert torch.equal(model.blocks[0].kept, weight.bfloat16())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("region", ["ours", "torch's"])
def test_without_gradients(region, mode):
    model = MODELS["a layer several times"]()
    with mode(), REGIONS[region]():
        expected = model(batch())
    sharded = Sharded(model)
    with REGIONS[region](), mode():
        assert all(torch.equal(model(batch()), expected) for _ in range(2))
        assert sharded.casts.nbytes() == 0


def test_a_graph_that_is_kept():
    model = MODELS["blocks"]()
    plain, found, sharded = copy.deepcopy(model), [], Sharded(model)
    for each, backward in ((plain, torch.Tensor.backward), (model, sharded.backward)):
        with REGIONS["torch's"]():
            loss = each(batch())
        for _ in range(2):
            backward(loss, retain_graph=True)
            assert sharded.casts.nbytes() == 0
        found.append([p.grad for p in each.parameters()])
    assert equal(*found)


def test_hooks_on_saved_tensors_see_what_they_would_see():
    seen = []
    for shard in (None, Sharded):
        torch.manual_seed(0)
        model, shapes = MODELS["blocks"](), []
        def pack(x, shapes=shapes):
            shapes.append((tuple(x.shape), x.dtype))
            return x
        with saved_tensors_hooks(pack, lambda x: x):
            found, _ = results(model, REGIONS["ours"], shard)
        seen.append((shapes, found[:2]))
    assert seen[0] == seen[1]


def test_an_exception_leaves_nothing_watched():
    model = Stack(nn.Sequential(linear(), nn.Linear(WIDTH + 1, 2)), linear())
    sharded = Sharded(model)
    with pytest.raises(RuntimeError, match="shape"), REGIONS["ours"]():
        model(batch())
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(KEY) and sharded.casts.nbytes() == 0
    sharded.casts.end()  # one too many


def test_other_threads_are_not_watched():
    casts, weight, found = Casts(), torch.ones(4, 4, requires_grad=True), []
    casts.restore(weight)
    def elsewhere():
        with REGIONS["torch's"]():
            found.append((F.linear(torch.ones(1, 4), weight), casts.nbytes()))
    with REGIONS["torch's"]():
        casts.begin()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere)
        assert found[0][1] == 0
        y = F.linear(torch.ones(1, 4, requires_grad=True), weight)
        assert casts.nbytes() == 32
        casts.end()
    with REGIONS["torch's"]():
        z = F.linear(y, weight)
        assert casts.nbytes() == 32
    casts.release(weight)
    assert casts.nbytes() == 0 and z.requires_grad


@pytest.mark.parametrize("number", [3, 2.5, True, 1j])
def test_numbers_that_an_operation_casts(number):
    """Those of C++ come to the kernel as Python's."""
    casts, x = Casts(), torch.ones(2, 3, dtype=torch.complex64 if number == 1j else torch.float32)
    expected = x.mean(), x * number, torch.full((2,), number).to(x.dtype) * number
    casts.begin()
    found = x.mean(), x * number, torch.full((2,), number).to(x.dtype) * number
    casts.end()
    assert equal(found, expected) and [y.dtype for y in found] == [y.dtype for y in expected]


def test_two_models_one_inside_the_other():
    """As a student calls a teacher: each has its own casts."""
    teacher, student = linears(2), linears(2)
    expected, _ = results(copy.deepcopy(student), REGIONS["ours"])
    theirs = Sharded(teacher)

    @torch.no_grad()
    def ask(block, args):
        teacher(args[0].detach())

    student.blocks[0].register_forward_pre_hook(ask)
    ours, sharded = results(student, REGIONS["ours"], Sharded)
    assert equal(ours, expected) and theirs.casts.nbytes() == sharded.casts.nbytes() == 0


def test_compiled_code_is_let_alone():
    model = linears(2)
    expected, _ = results(copy.deepcopy(model), REGIONS["torch's"])
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    ours, _ = results(model, REGIONS["torch's"], Sharded)
    assert equal(ours, expected)
