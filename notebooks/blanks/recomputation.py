"""What readers build on the page *Recomputation*: a region that keeps its inputs alone, and draws the same twice."""

import torch

from exercises import close
from exercises.asking import Complaint
from refimpl import memory

from . import blank

HINTS = {
    "keep_inputs": [
        "`ctx` is an object that forward and backward share. `ctx.fn = fn` is enough for the function.",
        "Tensors are noted by `ctx.save_for_backward(*inputs)`. Then call the function and return what it returns."],
    "run_again": [
        "Inputs that are cut off from the graph before them: `x.detach().requires_grad_(x.requires_grad)`, for each x "
        "of `ctx.saved_tensors`.",
        "Backward runs without graphs, so call `ctx.fn` on these inputs under `with torch.enable_grad():`.",
        "`torch.autograd.backward(outputs, gradients)` goes back through the new graph. It fills `.grad` of parameters "
        "and of your inputs. Return None, then each input's `.grad`."],
    "same_numbers": [
        "`torch.get_rng_state()` is the state of the generator, `torch.set_rng_state(state)` puts it back. Take the "
        "state in the first call, not before.",
        "`with torch.random.fork_rng(devices=[]):` puts the generator back at its end. Every later call sets the first "
        "call's state in there."]}


def keep_inputs(ctx, fn, *inputs):
    """Return fn(*inputs), one tensor. Autograd calls keep_inputs without a graph, so nothing inside fn is kept.

    Note for backward: the function as `ctx.fn`, the inputs (tensors) by `ctx.save_for_backward`, and nothing else.
    """
    ctx.fn = fn
    ctx.save_for_backward(*inputs)
    return fn(*inputs)


def run_again(ctx, *gradients):
    """Return a tuple: None, for fn, and then the gradient of each input, which is None for an input that needs none.

    `ctx.fn` and `ctx.saved_tensors` are what forward noted. `gradients` has one tensor for each output of fn, of its
    shape. Add the gradients of fn's parameters to their `.grad`. Autograd calls run_again without a graph, too.
    """
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
    with torch.enable_grad():
        outputs = ctx.fn(*inputs)
    torch.autograd.backward(outputs, gradients)
    return None, *(x.grad for x in inputs)


def same_numbers(fn):
    """Return a function of the same inputs that calls fn, each time with the random numbers of its own first call (on a
    CPU), and returns what fn returns.

    The first call draws as fn does. Every later one leaves the random generator as it was before.
    """
    state = None

    def repeatable(*inputs):
        nonlocal state
        if state is None:
            state = torch.get_rng_state()
            return fn(*inputs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            return fn(*inputs)

    return repeatable


def region(forward, backward):
    """Return the function (fn, *inputs) that autograd runs by these two."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Region", (torch.autograd.Function,), methods).apply


SMALL = 4096  # bytes; each of the tensors here has more than three times as many


def _cases():
    """Yield (what is said of it, fn, its parameters, its two inputs)."""
    torch.manual_seed(0)
    up, down = torch.nn.Linear(48, 80), torch.nn.Linear(80, 64)
    parameters = [*up.parameters(), *down.parameters()]
    x, w, rows = torch.randn(200, 48), torch.randn(200, 80), torch.randperm(200)[:90]

    def one(x, w):
        return down((up(x).tanh() * w).exp()).sigmoid()

    yield "a function of x and w: ", one, parameters, (x.clone().requires_grad_(), w.clone().requires_grad_())
    yield "x alone needs a gradient: ", one, parameters, (x.clone().requires_grad_(), w)
    yield "w is made of integers: ", lambda x, w: up(x)[w].exp(), parameters[:2], (x.clone().requires_grad_(), rows)
    yield "two outputs: ", lambda x, w: (up(x).sin() * w, down(w).exp()), parameters, (x.clone().requires_grad_(), w)


def _faults(about, apply, fn, parameters, inputs):
    """Yield sentences about what differs from fn without recomputation, values first."""
    leaves, runs, outputs = [x for x in inputs if x.requires_grad] + parameters, [], _outputs(fn(*inputs))
    weights = [torch.randn_like(y) for y in outputs]
    expected = torch.autograd.grad(outputs, leaves, weights)

    def counted(*inputs):
        runs.append(1)
        return fn(*inputs)

    for leaf in leaves:
        leaf.grad = None
    with memory.track(*leaves, *inputs, *weights) as t:
        try:
            found = _outputs(apply(counted, *inputs))
        except TypeError as error:  # of autograd, about what it was to save
            yield f"{about}autograd cannot keep what forward noted, since it takes tensors one by one: {error}"
            return
        if not all(map(close, found, outputs)):
            yield about + "the output is not fn(x, w)"
        if not all(y.requires_grad for y in found):
            yield about + "the output has no graph, so nothing before it learns"
        loss = sum((y * weight).sum() for y, weight in zip(found, weights, strict=True))
        del found
        kept = t.now.total - t.start.total
        try:
            loss.backward()
        except (Complaint, RuntimeError) as error:  # of autograd, about what it was given
            yield f"{about}in backward {error}"
        del loss
        after = t.now.total - t.start.total - sum(0 if leaf.grad is None else leaf.grad.nbytes for leaf in leaves)
    for number, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
        if leaf.grad is None or not close(leaf.grad, gradient):
            which = "a parameter of fn" if number >= len(leaves) - len(parameters) else "xw"[number]
            yield f"{about}the gradient of {which} is {'missing' if leaf.grad is None else 'another'}"
    if kept > SMALL:
        yield f"{about}the gradients are right, but forward keeps {kept:,} bytes besides the inputs"
    if len(runs) != 2:
        yield f"{about}the gradients are right, but fn runs {len(runs)} times: expected 2, forward and once more"
    if after > SMALL:
        yield f"{about}the gradients are right, but {after:,} bytes are still there after backward"


def _outputs(given):
    return given if isinstance(given, tuple) else (given,)


@blank(keep_inputs, "parity and bytes", torch.Tensor)
def check_keep_inputs(keep_inputs):
    """Check forward, with our own backward, against the function without recomputation."""
    def backward(ctx, *gradients):
        if not hasattr(ctx, "fn"):
            raise Complaint("there is no ctx.fn: forward has to note the function")
        if len(ctx.saved_tensors) != 2:
            raise Complaint(f"there are {len(ctx.saved_tensors)} tensors from ctx.save_for_backward: expected 2 inputs")
        for name, saved, needed in zip("xw", ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True):
            if needed and not saved.requires_grad:
                raise Complaint(f"{name} needs a gradient and what is saved of it needs none: save the inputs as they "
                                "are, no copies")
        return run_again(ctx, *gradients)

    for about, *case in list(_cases())[:3]:  # those of one output
        for fault in _faults(about, region(keep_inputs, backward), *case):
            return fault
    return None


@blank(run_again, "parity and bytes", tuple)  # autograd takes no list
def check_run_again(run_again):
    """Check backward, with our own forward, against the function without recomputation."""
    dtypes = []

    def backward(ctx, *gradients):
        given = run_again(ctx, *gradients)
        if len(given) != 3 or not isinstance(given[1], torch.Tensor):
            raise Complaint("expected 3 values, None and the gradients of x and w; you return "
                            f"{[type(each).__name__ for each in given]}")
        dtypes.append(given[1].dtype)
        return given

    for about, *case in _cases():
        for fault in _faults(about, region(keep_inputs, backward), *case):
            return fault
    return next((f"the gradient of x is {each}, and x is float32" for each in dtypes if each != torch.float32), None)


@blank(same_numbers, "random numbers", callable)
def check_same_numbers(same_numbers):
    """Check that all calls of a function draw what the first one draws, and that the generator knows of that alone."""
    def fn(x, scale):
        return torch.nn.functional.dropout(x, 0.3) * torch.rand(x.shape) * scale

    x = torch.ones(40, 30)
    torch.manual_seed(0)
    first, second = same_numbers(fn), same_numbers(fn)
    for again, seed in ((first, 1), (second, 2)):
        torch.manual_seed(seed)
        expected, after = fn(x, 1.0), torch.get_rng_state()
        torch.manual_seed(seed)
        if not close(_tensor(again(x, 1.0)), expected):
            return "the first call draws other random numbers than fn does by itself"
        if not torch.equal(torch.get_rng_state(), after):
            return "after the first call the generator is not where fn leaves it: what comes next draws other numbers"
    for again, seed, scale in ((second, 2, 3.0), (first, 1, 5.0), (first, 1, 7.0)):
        torch.manual_seed(seed)
        expected = fn(x, scale)
        torch.manual_seed(9)
        before = torch.get_rng_state()
        if not close(_tensor(again(x, scale)), expected):
            return "a later call is not fn of its inputs with the random numbers of the first call"
        if not torch.equal(torch.get_rng_state(), before):
            return "a later call moves the random generator: what comes next draws other numbers"
    return None


def _tensor(value):
    if not isinstance(value, torch.Tensor):
        raise Complaint(f"expected a function that returns what fn returns, yours returns {type(value).__name__}")
    return value
