"""Programs as people write them: under both instruments they give the same results, the instruments agree, and
PyTorch is afterwards as it was."""

import copy
import functools
import inspect
import io
import pickle
import threading
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.autograd.variable import Variable
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from users_kit import closure_of

from refimpl import memory
from refimpl.common.nested_tensors import tensors_in

PROGRAMS = {}


def program(function):
    """Takes a model, which is older than the context, and an input (16, 32); what it returns is compared, or the
    model's gradients."""
    PROGRAMS[function.__name__] = function
    return function


def gradients(model):
    return [p.grad for p in model.parameters()]


def detached(model):
    return {name: p.detach() for name, p in model.named_parameters()}


# --- torch.func ------------------------------------------------------------------------------------------------------


@program
def gradient_of_a_functional_call(model, x):
    return grad(lambda weights: functional_call(model, weights, (x,)).square().sum())(dict(model.named_parameters()))


@program
def gradients_per_sample(model, x):
    def loss(weights, sample):
        return functional_call(model, weights, (sample,)).square().sum()

    return vmap(grad(loss), (None, 0))(detached(model), x)


@program
def model_under_vmap(model, x):
    return vmap(model)(x)


@program
def jacobian_vector_product(model, x):
    return jvp(model, (x,), (torch.ones_like(x),))


@program
def jacobian(model, x):
    return jacrev(model)(x[0])


@program
def batched_gradients(model, x):
    return torch.autograd.grad(model(x).sum(0), list(model.parameters()), torch.eye(32), is_grads_batched=True)


@program
def gradient_steps_inside_the_graph(model, x):
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = functional_call(model, weights, (x,)).square().mean()
        found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), found, strict=True)}
    functional_call(model, weights, (x,)).mean().backward()


# --- techniques ------------------------------------------------------------------------------------------------------


@program
def checkpoint_reentrant(model, x):
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).sum().backward()


@program
def checkpoints_nested(model, x):
    def twice(x):
        return checkpoint(model, checkpoint(model, x, use_reentrant=False), use_reentrant=False)

    checkpoint(twice, x.clone().requires_grad_(), use_reentrant=False).sum().backward()


@program
def checkpoint_by_operation(model, x):
    def policy(context, operation, *args, **kwargs):
        saves = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=False, context_fn=contexts).sum().backward()


@program
def hooks_in_hooks(model, x):
    with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        y = model(x)
        with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            model(y).sum().backward()


@program
def one_pair_of_hooks_entered_twice(model, x):
    hooks = saved_tensors_hooks(lambda t: t.double(), lambda t: t.float())
    with hooks:
        y = model(x)
    with hooks:
        model(y).sum().backward()


@program
def saved_on_the_host(model, x):
    with save_on_cpu():
        y = model(x)
    y.sum().backward()


@program
def saved_tensors_that_may_change(model, x):
    with allow_mutation_on_saved_tensors():
        y = model(x).exp()
        z = y * y
        y.add_(1)
        z.sum().backward()


@program
def autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()


@program
def parameters_exchanged(model, x):
    other = torch.nn.Parameter(torch.zeros(64, 32))
    torch.utils.swap_tensors(model[0].weight, other)
    return other.detach().clone()


@program
def parameters_offloaded_by_hand(model, x):
    for p in model.parameters():
        p.data = p.data.clone() * 2
    model(x).sum().backward()


# --- modules and optimizers ------------------------------------------------------------------------------------------


@program
def lazy_modules(model, x):
    model = torch.nn.Sequential(torch.nn.LazyLinear(64), torch.nn.LazyBatchNorm1d())
    model(x).sum().backward()
    return gradients(model)


@program
def copy_of_the_model(model, x):
    model = copy.deepcopy(model)
    model(x).sum().backward()
    return gradients(model)


@program
def scripted_model(model, x):
    scripted = torch.jit.script(model)
    for _ in range(3):
        scripted(x).sum().backward()
    return gradients(scripted)


@program
def state_loaded_into_an_optimizer(model, x):
    first = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    first.step()
    second = torch.optim.AdamW(model.parameters())
    second.load_state_dict(first.state_dict())
    second.step()
    return list(second.state.values())


@program
def closures(model, x):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    closure = closure_of(optimizer, lambda: model(x).square().mean())
    return optimizer.step(closure), optimizer.step(closure=closure), gradients(model)


@program
def backward_on_a_thread(model, x):
    thread = threading.Thread(target=lambda: model(x).sum().backward())
    thread.start()
    thread.join()


@program
def a_branch_taken_by_a_tensor(model, x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


# --- tensors that come from elsewhere --------------------------------------------------------------------------------


@program
def tensors_from_numpy(model, x):
    return sum(torch.from_numpy(np.full(512, i, dtype=np.float32)) * 2 for i in range(20))


@program
def tensors_from_buffers(model, x):
    return sum(torch.frombuffer(bytearray(2048), dtype=torch.float32) + i for i in range(20))


@program
def tensors_from_dlpack(model, x):
    return sum(torch.from_dlpack(np.full(512, i, dtype=np.float32)) * 2 for i in range(20))


@program
def tensors_from_a_pickle(model, x):
    pickled = pickle.dumps(torch.ones(1000))
    return sum(pickle.loads(pickled) for _ in range(20))


@program
def tensors_from_a_file(model, x):
    file = io.BytesIO()
    torch.save(torch.ones(1000), file)
    total = torch.zeros(1000)
    for _ in range(20):
        file.seek(0)
        total += torch.load(file)
    return total


@program
def states_of_the_generator(model, x):
    return [torch.get_rng_state().sum() for _ in range(3)]


@program
def complex_views(model, x):
    y = torch.complex(x, x).requires_grad_()
    z = (y * 2).conj()
    (z.imag * z.real).sum().backward()
    return y.grad, torch.view_as_real(z.detach().resolve_conj()).clone()


def state_of_torch():
    return [
        saved_tensors_hooks.__enter__, torch.UntypedStorage.resize_,
        inspect.getattr_static(torch.autograd.Function, "apply"),
        Variable._execution_engine, torch._C._dynamo.guards._empty_strided_cpu, list(warnings.filters),
        torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python),
        torch.frombuffer, torch.from_dlpack, torch.get_rng_state, torch.autograd.graph.disable_saved_tensors_hooks,
        torch._C._autograd._top_saved_tensors_default_hooks(True), torch._C._len_torch_dispatch_stack(),
        *[len(hooks) for owner in (module_hooks, optimizer_hooks) for name, hooks in vars(owner).items()
          if name.startswith("_global") and isinstance(hooks, dict)]]


def run(function, instrument=nullcontext):
    """The result, and what `instrument(model, x)` read; each run has a model of its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    x = torch.randn(16, 32)
    with instrument(model, x) if instrument is not nullcontext else nullcontext() as read:
        result = function(model, x)
    return gradients(model) if result is None else result, read


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_bytes_and_torch_stay_as_they_are(name):
    before = state_of_torch()
    run(PROGRAMS[name])  # the first use of some parts of PyTorch keeps something for ever
    plain, m = run(PROGRAMS[name], lambda model, x: memory.measure("cpu"))
    tracked, t = run(PROGRAMS[name], memory.track)
    pairs = list(zip(tensors_in(plain), tensors_in(tracked), strict=True))
    assert pairs and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert state_of_torch() == before
    older = memory.Trace(t.ops, t.records, [e for e in t.events if t.records[e[1]].born != -1 or e[0] == -1])
    if name == "backward_on_a_thread":  # not seen, as `Tracker` says: what it kept counts as older, nothing as born
        assert t.start["gradients"] == t.now["gradients"] == m.net
        return
    assert older.now.total - t.start.total == m.net
    inside = m.peak - (older.peak.total - t.start.total)
    if abs(inside) > 64:  # in kernels: the allocator beside the tracker names them
        _, (t, both) = run(PROGRAMS[name], both_instruments)
        assert inside > 0
        assert abs(memory.with_workspaces(t, both).peak.total - t.start.total - m.peak) <= 64


@contextmanager
def both_instruments(model, x):
    with memory.track(model, x) as t, memory.measure("cpu") as m:
        yield t, m


def fail(*_):
    raise KeyError("the user's own")


def in_forward(model, x):
    model(x)
    fail()


def in_backward(model, x):
    y = model(x).sort()[0]
    y.grad_fn.register_hook(fail)  # while autograd's formula runs without the tracker
    y.sum().backward()


def in_a_hook(model, x):
    h = model(x)
    h.register_hook(fail)
    (h.sum() + h.square().sum()).backward()


def in_a_step(model, x):
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(fail)
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("failing", [in_forward, in_backward, in_a_hook, in_a_step])
def test_a_program_that_fails_has_its_own_traceback_and_the_ledger_so_far(failing):
    model, x, before = torch.nn.Linear(32, 64), torch.randn(16, 32), state_of_torch()
    with pytest.raises(KeyError, match="the user's own") as caught, memory.track(model, x) as t:
        failing(model, x)
    assert caught.traceback[-1].name == "fail"
    assert t.start["parameters"] == t.now["parameters"] == 4 * (32 * 64 + 64)
    assert t.peak.total > t.start.total
    assert state_of_torch() == before
    with memory.track(model, x) as again:  # and the next one reads as ever
        model(x).sum().backward()
    assert again.now["gradients"] == again.now["parameters"]
