"""What both techniques stand on: each storage once, whatever is not ours left alone, hooks that go when the region
ends."""

import copy
import gc
import io
import pickle
import weakref
from unittest.mock import Mock

import pytest
import torch
from threads_kit import in_a_thread
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from users_kit import Model, function_of

from refimpl import memory
from refimpl.activations import compress_activations, saved_tensors
from refimpl.activations.saved_tensors import PackedStorage, PackedView, SavedStorages, Whole
from refimpl.model import GPT, GPTConfig


class Copies(SavedStorages):
    """The plainest technique: a copy of everything. `.packed` lists what it was given."""

    def __init__(self, model, smallest=0, only=None):
        super().__init__(model, smallest, only)
        self.packed = []

    def store(self, flat, tensor):
        self.packed.append(tuple(tensor.shape))
        stored = Copy(tensor)
        stored.flat = flat.clone()
        return "copied", flat.nbytes, stored


class Copy(PackedStorage):
    def restore(self):
        return self.flat


@pytest.fixture
def linear():
    return nn.Linear(16, 16)


@pytest.fixture
def x():
    return torch.randn(4, 16, requires_grad=True) * 1


def no_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def check_gradient(loss, leaf, context):
    """The gradient of what was saved in the context is that without it, to the bit."""
    expected = torch.autograd.grad(loss(), leaf)[0]
    with context as entered:
        kept = loss()
    assert torch.equal(torch.autograd.grad(kept, leaf)[0], expected)
    return entered


# --- whose it is ----------------------------------------------------------------------------------------------------

def test_parameters_their_views_and_their_casts_are_left(linear, x):
    with Copies(linear) as c:
        y = linear(x)  # saves x, and the transposed view of the weight
        z = x.bfloat16() @ linear.weight.to(torch.bfloat16).t()  # and a cast's view
        n = nn.functional.layer_norm(x, (16,), linear.bias)
    assert y.isfinite().all() and z.isfinite().all() and n.isfinite().all()
    assert c.packed == [(4, 16), (4, 16), (4, 1), (4, 1)]
    assert c.report.before == {"copied": 4 * 16 * 4 + 4 * 16 * 2 + 2 * 4 * 4}
    assert c.report.owned == linear.weight.nbytes * 3 // 2 + linear.bias.nbytes


def test_a_parameter_of_another_model_is_left_and_so_is_a_callers_leaf(linear):
    x = torch.randn(4, 16, requires_grad=True)
    with Copies(nn.Linear(2, 2)) as c:
        linear(x).sin().sum()
        x.t() * x.t().detach()
    assert c.packed == [(4, 16)], "the sine's input alone"


def test_buffers_and_what_the_model_is_called_with_are_left():
    model = Model(lambda self, x, *, mask: (self.weight * self.table * x).masked_fill(mask["in a dict"][0], 0),
                  weight=nn.Parameter(torch.randn(8)), table=nn.Buffer(torch.randn(8)))
    with Copies(model) as c:
        model(torch.randn(8), mask={"in a dict": [torch.rand(8) > 0.5]})
    assert c.packed == [] and c.report.owned == 2 * 8 * 4 + 8, "table, x and mask"
    with Copies(model) as c:
        model(torch.randn(8, requires_grad=True).sin(), mask={"in a dict": [torch.rand(8) > 0.5]})
    assert c.packed == [(8,), (8,)], "weight · table, and an activation of another model's: it may be nobody's"


# --- storages -------------------------------------------------------------------------------------------------------

def test_a_storage_is_stored_once_whoever_saves_it(linear):
    x = torch.randn(16, 16, requires_grad=True)
    def three_times():
        y = x.sin()
        return y.exp().sum() + (y.t() * y[1:, :4].sum()).sum() + (y * y).sum() + linear(y).sum()
    c = check_gradient(three_times, x, Copies(linear))
    assert c.packed.count((16, 16)) == 2, "y once, and its exponential"


def test_views_come_back_as_they_were():
    base = torch.randn(6, 8, requires_grad=True) * 1
    views = [base, base.t(), base[2:5], base[:, 3], base[1:2].expand(4, 8), base.view(2, 3, 8)[1], base[::2, ::3]]
    for view in views:
        stored = Copy(view)
        stored.flat = base.detach().clone().view(-1)
        back = PackedView(stored, view).unpack()
        assert torch.equal(back, view) and back.stride() == view.stride()


def test_what_one_operation_keeps_whole_no_other_stores(linear):
    """A storage that is alive anyway: a copy would come on top."""
    with Copies(nn.Sequential(linear), only="0") as c:
        y = torch.randn(4, 16, requires_grad=True) * 1
        z = y.sin()  # saved outside the chosen module: left
        after = linear(y)  # and inside it
    assert after.isfinite().all() and z.shape == (4, 16)
    assert c.packed == [] and c.report.before == {"left: of other modules": y.nbytes}


def test_the_content_at_the_time_of_saving_is_what_comes_back():
    """Changed in place between two savings: two versions, two copies; PyTorch itself refuses such a backward."""
    x = torch.randn(8, requires_grad=True)
    def twice(change):
        y = x * 1
        first = y.sin()
        change(y)
        return first.sum() + y.cos().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice(lambda y: y.mul_(2)).backward()
    with Copies(nn.Linear(1, 1)) as c:
        loss = twice(lambda y: y.mul_(2))
    assert c.packed.count((8,)) >= 2
    loss.backward()
    x64 = x.detach().double()
    assert torch.allclose(x.grad.double(), x64.cos() - 2 * (2 * x64).sin(), atol=1e-6)


def test_what_is_left_and_then_changed_is_refused_as_without_hooks():
    x = torch.randn(8, requires_grad=True)
    with Copies(nn.Linear(1, 1), smallest=1000):
        y = x * 1
        z = y.sin()
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: torch.float32 \[8\] is at version 1, "
                                           "expected version 0"):
        z.sum().backward()


def test_a_storage_freed_and_its_address_used_again_is_not_taken_for_the_old_one():
    x = torch.randn(1024, requires_grad=True)
    with Copies(nn.Linear(1, 1)):  # each factor is freed when its sine is made, and its memory is used again
        terms = [(x * k).sin().sum() for k in range(20)]
    sum(terms).backward()
    assert torch.allclose(x.grad, sum(k * (x.detach() * k).cos() for k in range(20)), atol=1e-3)


def test_tensors_that_are_not_plain_are_kept_as_they_are():
    class Mine(torch.Tensor):
        pass

    x, sparse = torch.randn(4, requires_grad=True), torch.eye(4).to_sparse()
    with Copies(nn.Linear(1, 1)) as c:
        loss = (x * torch.randn(4).as_subclass(Mine)).as_subclass(torch.Tensor).sum()
        loss = loss + torch.sparse.mm(sparse, x[:, None]).sum() + (x * torch.randn(4, dtype=torch.cfloat).imag).sum()
    loss.backward()
    assert x.grad.isfinite().all() and len(c.packed) <= 1


def test_complex_numbers_seen_as_real_ones_share_a_storage():
    x = torch.randn(4, 2, requires_grad=True)
    def loss():
        z = torch.view_as_complex(x * 1)
        return (z * z).abs().sum() + torch.view_as_real(z).sin().sum()
    assert check_gradient(loss, x, Copies(nn.Linear(1, 1))).report.counts["copied"] >= 2


def test_a_lazily_negated_view_does_not_negate_for_others():
    """The imaginary part of a conjugate is a view with a bit that says minus."""
    x, z = torch.randn(8, requires_grad=True), torch.randn(8, dtype=torch.cfloat) * 1
    negated = z.conj().imag
    assert negated.is_neg()
    with Copies(nn.Linear(1, 1)):
        loss = (x * negated * 3 + x * z.imag).sum()
    assert torch.allclose(torch.autograd.grad(loss, x)[0], -2 * z.imag)


# --- the context ----------------------------------------------------------------------------------------------------

def test_hooks_go_with_the_region_even_after_an_exception(model, tokens):
    hooks = [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()]
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), Copies(model, only="blocks.*"):
            assert not no_hooks()
            raise error
        assert no_hooks()
    with pytest.raises(ValueError, match="tokens run from"), Copies(model):
        model(tokens + 1000)
    assert no_hooks() and hooks == [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()]


def test_an_exception_inside_a_chosen_module_does_not_choose_what_follows():
    model, x = nn.Sequential(nn.Identity(), nn.Linear(4, 4)), torch.randn(4, 4, requires_grad=True) * 1
    model[0].forward = Mock(side_effect=ValueError("not today"))
    with Copies(model, only="0") as c:
        with pytest.raises(ValueError):
            model[0](x)
        model[1](x)
    assert c.packed == []


def test_one_region_at_a_time_and_then_again(linear, x):
    context = Copies(linear)
    with context:
        linear(x)
        with pytest.raises(RuntimeError, match="in use already: make another one"):
            context.__enter__()
    with context:
        linear(x)
    assert context.report.before == {"copied": x.nbytes}, "of the last region alone"


def test_a_region_of_many_steps_does_not_grow(linear):
    with Copies(linear, smallest=10**6) as c:
        for _ in range(3000):
            linear(torch.ones(1, 16)).sin().sum()
        assert 0 < len(c._left) < 1100 and 0 < len(c._callers) < 1100


def test_the_innermost_context_is_asked(linear, x):
    with Copies(linear) as outer:
        with Copies(linear) as inner:
            y = linear(x).sin()
        y.cos()
    assert inner.packed == [(4, 16), (4, 16)] and outer.packed == [(4, 16)] and no_hooks()


def test_only_the_chosen_modules():
    model = GPT(GPTConfig(vocab_size=64, context_length=32, layers=2, hidden=32, heads=4))
    tokens = torch.randint(0, 64, (2, 32))
    with Copies(model, only=["blocks.*.mlp"]) as c:
        model(tokens, tokens)
    assert c.packed == 2 * [(64, 32), (2, 32, 128), (64, 128)]
    with Copies(model, only="blocks.1") as one, Copies(model, only=["blocks.*"]):
        pass
    assert one.packed == []


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"model": [nn.Linear(1, 1)]}, TypeError, "model is a list: expected the module"),
    ({"smallest": -1}, ValueError, "smallest=-1: expected a number of bytes"),
    ({"smallest": 1.5}, ValueError, "smallest=1.5"),
    ({"only": "block*"}, ValueError, "only='block.': no module of this Sequential has such a name; there are '0'")])
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Copies(**{"model": nn.Sequential(nn.Linear(1, 1)), **arguments})


def test_techniques_say_what_they_do(linear, x):
    with pytest.raises(NotImplementedError, match="SavedStorages defines no store"), SavedStorages(linear, 0, None):
        linear(x)
    with pytest.raises(NotImplementedError, match=r"PackedStorage defines no restore\(\)"):
        PackedStorage(x).restore()
    assert no_hooks()


# --- autograd -------------------------------------------------------------------------------------------------------

def test_nothing_is_left_when_backward_never_comes(model, tokens):
    """An output that its own node saves (a softmax's) must not hold itself alive, stored or left."""
    gc.collect()
    gc.disable()
    try:
        with memory.measure("cpu") as m:
            for smallest in (0, 10**9):
                with Copies(model, smallest=smallest) as c:
                    loss = model(tokens, tokens)
                alive = weakref.WeakSet(c.report._stored)
                assert bool(alive) == (smallest == 0)
                del loss
                assert not alive
        assert m.net == 0
    finally:
        gc.enable()


def test_backward_twice_and_backward_of_backward(linear):
    x = torch.randn(4, 16, requires_grad=True)
    def loss():
        return (linear(x.sin()).exp().softmax(1) * x).square().sum()
    expected = torch.autograd.grad(loss(), x, create_graph=True)[0]
    second = torch.autograd.grad(expected.sum(), x)[0]
    with Copies(linear):
        kept = loss()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(kept, x, retain_graph=True)[0], expected)
    with Copies(linear):  # what the gradient's own graph saves is packed, too
        found = torch.autograd.grad(kept, x, create_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(found.sum(), x)[0], second, rtol=1e-5, atol=1e-6)


def test_backward_in_another_thread(model, tokens, expected):
    torch.manual_seed(1)
    with Copies(model):
        loss = model(tokens, tokens)
    assert all(map(torch.equal, in_a_thread(torch.autograd.grad, loss, list(model.parameters())), expected))


def test_hooks_of_another_thread_are_its_own(linear):
    with Copies(linear):
        assert in_a_thread(no_hooks)


def test_hooks_around_ours_are_there_again_afterwards(linear):
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        outside = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with Copies(linear):
            pass
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == outside


def test_a_tensor_kept_whole_is_an_alias():
    x = torch.randn(4, requires_grad=True).exp()
    kept = Whole(x)
    assert kept.unpack().data_ptr() == x.data_ptr() and kept.unpack().grad_fn is None


def test_a_version_that_stores_views_for_themselves_is_seen(monkeypatch, linear):
    """The mutant: no registry."""
    x = torch.randn(16, 16, requires_grad=True) * 1
    with Copies(linear) as right:
        (x.sin() + x.cos() + x.t().sin()).sum()
    forgetful = type("Forgetful", (dict,), {"get": lambda self, key: None})
    monkeypatch.setattr(weakref, "WeakValueDictionary", forgetful)
    with Copies(linear) as wrong:
        (x.sin() + x.cos() + x.t().sin()).sum()
    assert len(right.packed) == 1 and len(wrong.packed) == 3


def test_compression_is_one_of_them(linear):
    assert issubclass(type(compress_activations(linear)), SavedStorages)


def test_a_copy_of_the_model_made_inside_is_not_in_the_region(model, tokens):
    """And does not free what the region still watches: a copied weak reference to a storage would."""
    with Copies(model, only="blocks.*") as c:
        loss = model(tokens, tokens)
        twin, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        seen = len(c._callers)
        for other in (twin, torch.load(io.BytesIO(file.getvalue()), weights_only=False)):
            other(tokens.clone(), tokens.clone())
        assert len(c._callers) == seen
        hooks = [hook for m in twin.modules() for hook in (m._forward_pre_hooks | m._forward_hooks).values()]
        assert all(hook._function is saved_tensors._nothing for hook in hooks)
    again = pickle.loads(pickle.dumps(copy.deepcopy(c.report)))
    assert again.before == c.report.before and again.held_elsewhere() == [] and loss.isfinite()


def test_a_model_compiled_inside_does_not_compile_our_hooks(linear, x, monkeypatch):
    """The weak references that they make would come out half made, without what frees them."""
    with Copies(linear, only="") as c:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as Dynamo answers while it traces
        linear(x)
        assert not c._callers and c.packed == []
        monkeypatch.undo()
        linear(torch.ones(4, 16))
        assert c._callers


def test_a_region_that_was_never_entered_has_nothing_to_report(linear):
    assert Copies(linear).report.counts == {}


def test_a_hook_that_raises_before_ours_does_not_choose_what_follows(linear, x):
    model = nn.Sequential(linear, nn.Linear(16, 16))
    linear.register_forward_pre_hook(Mock(side_effect=ValueError("not today")))
    with Copies(model, only="0") as c:
        with pytest.raises(ValueError, match="not today"):
            linear(x)
        model[1](x)
    assert c.packed == []


def test_a_shared_module_goes_by_each_of_its_names(linear):
    model = nn.ModuleDict({"first": linear, "second": linear})
    assert saved_tensors.chosen(model, ["second"]) == saved_tensors.chosen(model, ["*"])[1:] == [linear]


def test_a_conjugate_comes_back_as_a_conjugate():
    """It is a view with a bit that says so: z and its conjugate share a storage, a version and a dtype."""
    z = torch.randn(8, dtype=torch.cfloat, requires_grad=True)
    def loss():
        w = z * 1
        return (w * w).abs().sum() + (w * w.conj() * w).abs().sum()
    check_gradient(loss, z, Copies(nn.Linear(1, 1)))


@pytest.mark.filterwarnings("ignore")  # torch means to drop quantized tensors
def test_a_quantized_tensor_is_kept_as_it_is():
    saves = function_of(lambda ctx, x, other: ctx.save_for_backward(other) or x * 2,  # the other one for backward
                        lambda ctx, gradient: (gradient * ctx.saved_tensors[0].dequantize(), None))
    x, other = torch.randn(64, requires_grad=True), torch.quantize_per_tensor(torch.randn(64), 0.1, 0, torch.qint32)
    with compress_activations(nn.Linear(1, 1), smallest=0) as c:
        y = saves.apply(x, other)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], other.dequantize()) and c.report.counts == {}


@pytest.mark.filterwarnings("ignore")  # torch calls nested tensors a prototype
def test_a_nested_tensor_is_kept_as_it_is(linear):
    rows = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    def loss():
        y = linear(rows)
        return torch.nested.to_padded_tensor(y * y, 0).sum()
    check_gradient(loss, linear.weight, compress_activations(linear, smallest=0))


class Hoarding(Copies):
    """The mutant: casts of weights stay from forward to backward."""
    def _made_of(self, node):
        owner, steps = super()._made_of(node)
        return owner, [*steps, *steps]


def test_casts_of_weights_are_made_again_and_take_no_bytes_from_forward_to_backward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 62), nn.Tanh(), nn.Linear(62, 64, bias=False))
    x, between = torch.randn(4, 64, requires_grad=True), {}

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().sum()

    expected = torch.autograd.grad(loss(), [x, *model.parameters()])
    for make in (Copies, Hoarding):
        with memory.track(model, x) as t:
            with make(model):
                kept = loss()
            between[make] = t.now.total
            assert all(map(torch.equal, torch.autograd.grad(kept, [x, *model.parameters()]), expected))
        del kept
    assert between[Hoarding] - between[Copies] == 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1)


def test_a_parameter_that_changed_after_its_cast_was_saved_is_refused(linear, x):
    with Copies(linear):
        y = x.bfloat16() @ linear.weight.to(torch.bfloat16).t()
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"a parameter \[\d+, 16\], of which a cast was saved, is at version"):
        y.sum().backward()
