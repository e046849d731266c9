"""What readers build on the page *Recomputation*: right functions are taken, others are not."""

from functools import partial

import torch
from exercises_kit import Answers, graded, in_fp64

from blanks import recomputation as page

# --- keep_inputs -----------------------------------------------------------------------------------------------------


def keep_in_a_list(ctx, fn, *inputs):
    outputs = fn(*inputs)
    ctx.save_for_backward(*list(inputs))
    setattr(ctx, "fn", fn)  # noqa: B010
    return outputs


def keep_without_a_graph(ctx, fn, *inputs):
    ctx.fn, given = fn, [x.detach() for x in inputs]
    ctx.save_for_backward(*inputs)
    with torch.no_grad():
        return fn(*given)


def kept(ctx, fn, *inputs, note=True, save=True, first=False, last=False, attribute=False, output=False, graph=False,
         again=False, detached=False):
    if note:
        ctx.fn = fn
    saved = [x.detach() for x in inputs] if detached else inputs
    if save:
        ctx.save_for_backward(*(saved[:1] if first else saved[::-1] if last else saved))
    if attribute:
        ctx.inputs = inputs
    if graph:
        with torch.enable_grad():
            ctx.outputs = fn(*(x.detach().requires_grad_(x.requires_grad) for x in inputs))
        return ctx.outputs.detach()
    if again:
        fn(*inputs)
    outputs = fn(*inputs)
    if output:
        ctx.outputs = outputs.clone()
    return outputs


def of_copies(ctx, fn, *inputs):
    ctx.fn = fn
    ctx.save_for_backward(*(x.clone() for x in inputs))
    return fn(*inputs)


def without_the_star(ctx, fn, *inputs):
    ctx.fn = fn
    ctx.save_for_backward(inputs)
    return fn(*inputs)


def fn_among_tensors(ctx, fn, *inputs):
    ctx.save_for_backward(fn, *inputs)
    return fn(*inputs)


def returns_inputs(ctx, fn, *inputs):
    page.keep_inputs(ctx, fn, *inputs)
    return inputs[0]


# --- run_again -------------------------------------------------------------------------------------------------------


def again_by_a_sum(ctx, *gradients):
    inputs = []
    for x in ctx.saved_tensors:
        inputs.append(x.detach())
        inputs[-1].requires_grad = x.requires_grad
    with torch.enable_grad():
        outputs = ctx.fn(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum((y * gradient).sum() for y, gradient in zip(outputs, gradients, strict=True))
    total.backward()
    return tuple([None] + [x.grad for x in inputs])


@torch.enable_grad()
def again_by_edges(ctx, *gradients):
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
    outputs = ctx.fn(*inputs)
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in (outputs if isinstance(outputs, tuple) else [outputs])]
    del outputs  # before backward begins
    torch.autograd.backward(edges, gradients)
    return None, *[x.grad if x.requires_grad else None for x in inputs]


HELD = []


def again(ctx, *gradients, graph=True, detach=True, wants=None, none=True, ones=False, grad=False, twice=False,
          first=False, hold=False, flip=False, retain=False, as_list=False):
    saved = ctx.saved_tensors
    inputs = [x.detach() if detach else x for x in saved]
    if detach:
        for x, s in zip(inputs, saved, strict=True):
            x.requires_grad_(s.requires_grad if wants is None else wants)
    with torch.set_grad_enabled(graph):
        outputs = ctx.fn(*inputs)
        if twice:
            outputs = ctx.fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if ones:
        gradients = [torch.ones_like(y) for y in outputs]
    if first:
        outputs, gradients = outputs[:1], gradients[:1]
    if hold:
        HELD.append(outputs)
    if grad:
        needed = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, needed, gradients))
        return None, *(next(found) if x.requires_grad else None for x in inputs)
    torch.autograd.backward(outputs, gradients, retain_graph=retain)
    found = [x.grad for x in inputs]
    found = found[::-1] if flip else found
    return [None, *found] if as_list else (None, *found) if none else tuple(found)


# --- same_numbers ----------------------------------------------------------------------------------------------------


def same_by_hand(fn):
    states = []

    def repeatable(*inputs):
        before = torch.get_rng_state()
        if not states:
            states.append(before)
            return fn(*inputs)
        torch.set_rng_state(states[0])
        try:
            return fn(*inputs)
        finally:
            torch.set_rng_state(before)

    return repeatable


class SameNumbers:
    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *inputs):
        with torch.random.fork_rng(devices=[], enabled=hasattr(self, "state")):
            if hasattr(self, "state"):
                torch.random.default_generator.set_state(self.state)
            else:
                self.state = torch.random.default_generator.get_state()
            return self.fn(*inputs)


def same(fn, *, early=False, seed=False, fork=True, always=False, anew=False, memo=False, fresh=False):
    state, results = torch.get_rng_state() if early else None, []

    def repeatable(*inputs):
        nonlocal state
        if memo and results:
            return results[0]
        if seed:
            torch.manual_seed(0)
        begin = state is None
        if begin or anew:
            state = torch.get_rng_state()
        with torch.random.fork_rng(devices=[], enabled=fork and (always or not begin)):
            if not begin or early:
                torch.set_rng_state(state)
            results.append(fn(*inputs))
            return results[-1]

    return repeatable


SHARED = {}


def same_for_all(fn):
    def repeatable(*inputs):
        if "state" not in SHARED:
            SHARED["state"] = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(SHARED["state"])
            return fn(*inputs)

    return repeatable


def called_at_once(fn):
    return fn(torch.ones(40, 30), 1.0)


ANSWERS = {
    page.check_keep_inputs: Answers(
        right=[page.keep_inputs, keep_in_a_list, keep_without_a_graph],
        wrong=[
            (partial(kept, note=False), "a function of x and w: in backward there is no ctx.fn"),
            (partial(kept, save=False), "in backward there are 0 tensors from ctx.save_for_backward: expected 2"),
            (partial(kept, save=False, attribute=True), "there are 0 tensors from ctx.save_for_backward: expected 2"),
            (partial(kept, first=True), "there are 1 tensors from ctx.save_for_backward: expected 2"),
            (partial(kept, last=True), "a function of x and w: in backward mat1 and mat2 shapes cannot be multiplied"),
            (partial(kept, detached=True), "x needs a gradient and what is saved of it needs none: save the inputs as"),
            (of_copies, "in backward x needs a gradient and what is saved of it needs none"),
            (partial(kept, output=True), "forward keeps 51,"),
            (without_the_star, "autograd cannot keep what forward noted, since it takes tensors one by one"),
            (fn_among_tensors, "but argument 0 is of type function"),
            (partial(kept, again=True), "fn runs 3 times: expected 2"),
            (lambda ctx, fn, *inputs: 2 * kept(ctx, fn, *inputs), "the output is not fn(x, w)"),
            (returns_inputs, "the output is not fn(x, w)"),
            (lambda ctx, fn, *inputs: (kept(ctx, fn, *inputs),), "expected a tensor"),
            (lambda ctx, fn, x: kept(ctx, fn, x), "and does not take them")],
        saves_nothing=(partial(kept, graph=True), "the gradients are right, but forward keeps"),
    ),
    page.check_run_again: Answers(
        right=[page.run_again, again_by_a_sum, again_by_edges],
        wrong=[
            (partial(again, graph=False), "your function raises RuntimeError: element 0 of tensors does not require"),
            (partial(again, detach=False), "you return ['NoneType', 'NoneType', 'NoneType']"),
            (partial(again, wants=False), "expected 3 values, None and the gradients of x and w; you return"),
            (partial(again, wants=True), "only Tensors of floating point"),
            (partial(again, none=False), "you return ['Tensor', 'Tensor']"),
            (partial(again, ones=True), "the gradient of x is another"),
            (partial(again, grad=True), "the gradient of a parameter of fn is missing"),
            (partial(again, twice=True), "fn runs 3 times: expected 2"),
            (partial(again, first=True), "two outputs: the gradient of a parameter of fn is"),
            (partial(again, flip=True), "a function of x and w: "),
            (partial(again, as_list=True), "in backward expected a tuple, you return [None"),
            (partial(again, hold=True, retain=True), "bytes are still there after backward"),
            (lambda ctx, *gradients: (None, *gradients, None), "a function of x and w: "),
            (in_fp64(page.run_again), "the gradient of x is torch.float64, and x is float32"),
            (lambda ctx, gradient: again(ctx, gradient), "and does not take them")],
        saves_nothing=(partial(again, hold=True), "the gradients are right, but"),
    ),
    page.check_same_numbers: Answers(
        right=[page.same_numbers, same_by_hand, SameNumbers],
        wrong=[
            (lambda fn: fn, "a later call is not fn of its inputs with the random numbers of the first call"),
            (partial(same, early=True), "the first call draws other random numbers"),
            (partial(same, seed=True), "the first call draws other random numbers"),
            (partial(same, fork=False), "a later call moves the random generator"),
            (partial(same, always=True), "after the first call the generator is not where fn leaves it"),
            (partial(same, anew=True), "a later call is not fn of its inputs"),
            (partial(same, memo=True), "a later call is not fn of its inputs"),
            (same_for_all, "after the first call the generator is not where fn leaves it"),
            (called_at_once, "expected a function"),
            (lambda fn: lambda *inputs: None, "expected a function that returns what fn returns")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
