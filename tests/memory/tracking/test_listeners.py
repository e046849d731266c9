"""What a technique keeps out of sight is still told apart, and PyTorch behaves as it does without a tracker."""

import contextlib
import gc
import inspect
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from users_kit import closure_of, function_of

from refimpl import memory


def keeps(ctx, x):
    """x², keeping a bf16 copy the proper way."""
    ctx.save_for_backward(x.bfloat16())
    return x * x


def hides(ctx, x):
    """The same, where no hook sees it."""
    ctx.copy = x.bfloat16()
    return x * x


@pytest.mark.parametrize("function", [
    function_of(keeps, lambda ctx, grad: 2 * grad * ctx.saved_tensors[0].float()),
    function_of(hides, lambda ctx, grad: 2 * grad * ctx.copy.float())], ids=["Keeps", "Hides"])
def test_what_a_custom_function_keeps_is_an_activation(function):
    x = torch.randn(1000, requires_grad=True)
    with memory.track(x) as t:
        y = function.apply(x)
        y.sum().backward()
        del y
    forward = t.peak_moment("forward").ledger
    assert forward["activations"] == 2000
    assert torch.allclose(x.grad, 2 * x, rtol=1e-2)


def test_an_exception_leaves_the_trace_readable_and_torch_as_it_was(trained):
    model, optimizer, step = trained
    before = (torch.autograd.graph.saved_tensors_hooks.__enter__, torch.UntypedStorage.resize_,
              inspect.getattr_static(torch.autograd.Function, "apply"))
    with pytest.raises(KeyError), memory.track(model, optimizer) as t:
        kept = torch.zeros(1000)
        step()
        raise KeyError("in the middle")
    after = (torch.autograd.graph.saved_tensors_hooks.__enter__, torch.UntypedStorage.resize_,
             inspect.getattr_static(torch.autograd.Function, "apply"))
    assert before == after
    assert t.now["temporaries"] == kept.nbytes
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torch.zeros(10)
    assert t.now["temporaries"] == kept.nbytes


class Held:
    """A handle that no search through lists and dicts looks into."""

    def __init__(self, tensor):
        self.tensor = tensor


HOOKS = {  # name -> (pack, unpack, bytes that live on, per element of the saved tensor)
    "identity": (lambda t: t.detach(), lambda t: t, 4),
    "handle": (lambda t: Held(t.detach()), lambda h: h.tensor, 4),
    "half the bits": (lambda t: t.bfloat16(), lambda t: t.float(), 2),
    "half, in a handle": (lambda t: Held(t.bfloat16()), lambda h: h.tensor.float(), 2),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_category_stays_right_under_a_techniques_hooks(name):
    pack, unpack, width = HOOKS[name]
    x = torch.randn(1000, requires_grad=True)
    with memory.track(x) as t:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = x.exp().sum()
        assert t.now["activations"] == 1000 * width
        loss.backward()
        peak, after = t.peak_moment("forward").ledger, t.now
    assert after["activations"] == 0
    assert peak["activations"] + peak["temporaries"] >= 1000 * width
    assert t.timeline[-1].ledger["activations"] == 0


def test_hooks_installed_before_the_tracker_still_do_their_work():
    calls = []
    x = torch.randn(1000, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (calls.append("pack"), t.bfloat16())[1],
                                                     lambda t: (calls.append("unpack"), t.float())[1])
    with hooks, memory.track() as t:
        loss = x.exp().sum()
        assert t.now["activations"] == 2000
        loss.backward()
    assert calls == ["pack", "unpack"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_leaves_the_block_inputs_and_recomputes_activations(reentrant):
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
        for _ in range(4))
    width = 4 * 32 * 64

    def forward(x, recompute):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        return x.sum()

    readings = {}
    for recompute in (False, True):
        x = torch.randn(32, 64, requires_grad=True)
        with memory.track(layers, x) as t:
            loss = forward(x, recompute)
            before = t.now["activations"]
            loss.backward()
            readings[recompute] = before, t.peak_moment("backward").ledger["activations"]
            del loss
        assert t.now["activations"] == 0
    assert readings[False][0] == 16 * width - 8 * width  # Tanh's outputs, which the next Linear shares
    rng_states = 4 * torch.get_rng_state().nbytes if reentrant else 0  # reentrant: kept by the autograd.Function
    assert readings[True][0] == 3 * width + rng_states  # the inputs of blocks 2 to 4; the first is x itself
    assert readings[True][1] >= 3 * width + width  # one block's worth, made again in backward


def test_moving_saved_tensors_to_another_device_is_read_there():
    x = torch.randn(1000, requires_grad=True)

    def step():
        with torch.autograd.graph.save_on_cpu():
            return x.exp().sum()

    with memory.track(x) as t:
        step().backward()
    assert t.devices == ["cpu"] and t.now["activations"] == 0
    with pytest.raises(ValueError, match="'cuda:7'.*saw cpu"):
        t.on("cuda:7")


def test_a_saved_tensor_changed_in_place_is_still_an_error():
    x = torch.randn(10, requires_grad=True)
    with memory.track():
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_double_backward_gives_the_same_gradients():
    def second(x):
        (grad,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    with memory.track():
        tracked = second(x)
    assert torch.equal(tracked, second(x))


def test_a_graph_that_is_dropped_frees_what_it_saved():
    with memory.track() as t:
        y = torch.randn(1000, requires_grad=True).exp().sigmoid()
        storage = weakref.ref(y.untyped_storage())
        gc.disable()
        del y
        gc.enable()
        assert storage() is None
    assert t.now.total == 0


def test_gradients_freed_inside_backward_by_a_hook_were_gradients(trained):
    """The optimizer stepped inside backward, one parameter at a time, the gradient freed at once."""
    model, _, _ = trained
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    tokens = torch.randint(0, 256, (2, 16))
    with memory.track(model) as t:
        model(tokens, tokens).backward()
    gradients = t.timeline.nbytes[:, t.timeline.categories.index("gradients")]
    assert 0 < gradients.max() < 4 * model.config.parameter_count() / 2
    assert t.now["gradients"] == 0


def test_a_step_that_raises_does_not_stay_the_phase(trained):
    model, optimizer, _ = trained

    class Fails(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise ArithmeticError

    failing = Fails(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 256, (1, 8))
    with memory.track(model, optimizer) as t:
        with contextlib.suppress(ArithmeticError):
            failing.step()
        model(tokens)
    assert t.ops[-1].phase == "forward"


def test_transforms_that_refuse_hooks_run_and_hooks_come_back():
    x = torch.randn(1000)
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    with memory.track(x) as t:
        gradient = torch.func.grad(lambda v: v.exp().sum())(x)
        loss = x.clone().requires_grad_().exp().sum()
        assert t.now["activations"] == 4000 and loss.isfinite()
    assert torch.equal(gradient, x.exp())
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable


def test_what_a_pack_hook_had_ready_is_an_activation():
    x = torch.randn(1000, requires_grad=True)
    with memory.track(x) as t:
        ready = [Held(torch.zeros(500))]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: ready.pop().tensor, lambda t: torch.zeros(1000)):
            loss = x.exp().sum()
        assert t.now["activations"] == 2000
        del loss


def test_a_pair_of_hooks_keeps_its_own_functions():
    def pack(tensor):
        return tensor.bfloat16()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.float)
    with memory.track(), hooks:
        assert hooks.pack_hook is pack
    assert (hooks.pack_hook, hooks.unpack_hook) == (pack, torch.Tensor.float)


class Interrupted(torch.nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


class Recovers(torch.nn.Module):
    def __init__(self, error):
        super().__init__()
        self.part, self.last = Interrupted(error), torch.nn.Linear(4, 4)

    def forward(self, x):
        with contextlib.suppress(BaseException):
            self.part(x)
        return self.last(x.exp())


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_a_module_that_raises_is_left(error):
    model = Recovers(error)
    with memory.track(model) as t:
        with contextlib.suppress(ValueError):
            Interrupted(ValueError())(torch.ones(1, 4))
        torch.zeros(3)
        model(torch.ones(1, 4))
        torch.zeros(5)
    modules = {op.name: op.module for op in t.ops}
    assert modules["addmm"] == "last" and modules["zeros"] == ""
    assert [op.module for op in t.ops if op.name == "zeros"] == ["", ""]
    if isinstance(error, ValueError):  # PyTorch tells of no other: until the outer module is left, the inner one runs
        assert modules["exp"] == "Recovers"


def test_a_closure_is_no_part_of_the_step(trained):
    model, _, _ = trained
    tokens = torch.randint(0, 256, (2, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    closure = closure_of(optimizer, lambda: model(tokens, tokens))
    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        with memory.track(model, optimizer) as t:
            loss = call()
        assert loss.ndim == 0
        assert {op.phase for op in t.ops if op.name == "addmm"} == {"forward"}
        assert {op.phase for op in t.ops if op.name == "native_layer_norm_backward"} == {"backward"}
        assert t.ops[-1].phase == "step"
    with memory.track(model, optimizer) as t, contextlib.suppress(ArithmeticError):
        optimizer.step(lambda: 1 / 0)
    assert not t._waiting
    with memory.track(model, optimizer) as t:
        optimizer.step(lambda: torch.ones(3).exp())
    assert {op.phase for op in t.ops if op.name == "exp"} == {"forward"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_recomputation_feeds_a_module_is_no_input(reentrant):
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    tokens, embedding = torch.randint(0, 100, (4, 32)), torch.nn.Embedding(100, 64)

    def block(x):
        middle = x + first(x)
        return middle + second(middle).tanh()

    with memory.track(embedding, first, second, tokens) as t:
        y = checkpoint(block, embedding(tokens) * 2, use_reentrant=reentrant)
        y.square().sum().backward()
        del y
    assert t.peak["inputs"] == tokens.nbytes
    assert t.timeline.nbytes[:, t.timeline.categories.index("inputs")].max() == tokens.nbytes


def test_a_failed_entry_leaves_nothing_behind(trained):
    model, optimizer, step = trained
    resize = torch.UntypedStorage.resize_
    with (torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"),
          memory.track(model)):
        pass
    assert torch.UntypedStorage.resize_ is resize and not torch.nn.modules.module._global_forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    with memory.track(model, optimizer) as t:
        step()
    assert t.peak_moment("step").ledger["gradients"] == 4 * model.config.parameter_count()
