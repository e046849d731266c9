"""A backward in two parts, on modules as users write them: B, the gradient of a stage's input, and W, of its weights.

The stage before waits for B alone; W fills what would be idle time ("Zero Bubble Pipeline Parallelism", Qi et al. 2023,
section 2). Both parts meet in leaf modules: those with parameters of their own and no children, as Linear, Embedding,
LayerNorm. In forward such a module runs on x' = x without its history, and y' is what it returns; the rest of the stage
goes on with y = y', whose history is this module alone:

    B       dy arrives:  dx = dy · ∂y'/∂x', passed on;  dy is kept beside x'
    W       dθ = dy · ∂y'/∂θ, added to θ.grad;  dy and x' go

    between F and B     what an undivided backward keeps
    between B and W     what the leaf modules need (a Linear its x) and each one's dy

Known kinds have formulas (`leaves`); the others keep their small graph, from x' and θ to y', until W. An undivided
backward of known kinds comes by here, too, and B and W are one: gradients are added without a temporary tensor.

A parameter that is used elsewhere gets its gradient in B, with the rest of the graph: one of a module with children
(nn.MultiheadAttention), or a weight that a function reads. `SplitBackward.whole` names them. A compiled module is one
piece, and its weights' gradients come in B, too. Numbers are the same.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..comm.backend.torch_internals import watched
from ..common.marks import mark, mark_of
from .leaves import LARGE, formulas_hold, formulas_of, tell_trackers


class SplitBackward:
    """Divides the backward of `module`, one stage, or runs it without temporary gradients.

    It wraps the `forward` of leaf modules until `remove`, and acts inside `recording` alone. `whole`: names of
    trainable parameters of no leaf module, whose gradients come in B.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.active, self.parts = False, None
        self._leaves = [each for each in module.modules() if not any(True for _ in each.children())
                        and any(p.requires_grad for p in each.parameters(recurse=False))]
        for leaf in self._leaves:
            leaf.forward = LeafForward(leaf, self)  # on the object: a call of the module still runs its hooks
        apart = {p for leaf in self._leaves for p in leaf.parameters(recurse=False)}
        self.whole = [name for name, p in module.named_parameters() if p.requires_grad and p not in apart]

    @contextlib.contextmanager
    def recording(self, parts: Any = None) -> Iterator[None]:
        """Divide the backwards of forwards in this context: B appends to the list `parts` what W has to do. Without a
        list, backwards are whole, and add to gradients at once. A backward runs in the context that its forward had: a
        checkpoint runs forwards in it."""
        before, self.active, self.parts = (self.active, self.parts), True, parts
        try:
            yield
        finally:
            self.active, self.parts = before

    def remove(self) -> None:
        """Give the leaf modules their own forward again."""
        for leaf in self._leaves:
            leaf.forward.remove()


class LeafForward:
    """Wraps a leaf module's own forward."""

    def __init__(self, leaf, split):
        self.leaf, self.split = leaf, split
        self.rule = None if split is None else formulas_of(leaf)
        self.own = leaf.__dict__.get("forward")  # of this object alone, if somebody gave it one
        self.also_whole = self.rule is not None and self.rule.also_whole and leaf.weight.numel() >= LARGE

    def __call__(self, *args, **kwargs):
        """Call the module's forward; inside a recording, as a node of the graph that knows B and W."""
        split = self.split
        # While dynamo compiles, it is given a plain call.
        if split is None or not split.active or not torch.is_grad_enabled() or is_compiling():
            return self.plain(*args, **kwargs)
        rule = self.rule
        if rule is not None and (split.parts is not None or self.also_whole) and formulas_hold(self.leaf, args, kwargs):
            return _ByFormulas.apply(self, split.parts, args[0], None if args[0].requires_grad else _anchor())
        # A tensor inside an argument would lose its graph.
        if split.parts is None or _has_history(kwargs, *(x for x in args if not isinstance(x, torch.Tensor))):
            return self.plain(*args, **kwargs)
        return run_detached(self, split.parts, args, kwargs)

    def plain(self, *args, **kwargs):
        """Call the module's own forward."""
        return type(self.leaf).forward(self.leaf, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)

    def remove(self):
        """Give the module its own forward again."""
        del self.leaf.forward
        if self.own is not None:
            self.leaf.forward = self.own

    def __deepcopy__(self, memo):
        """Return the forward of a copied module, which is of no pipeline."""
        other = LeafForward(memo[id(self.leaf)], None)
        other.own = self.own
        return other


class _ByFormulas(torch.autograd.Function):
    """Runs a leaf module by formulas. `parts` is None if B and W are one."""

    @staticmethod
    def forward(ctx, leaf, parts, x, anchor):
        ctx.leaf, ctx.parts = leaf, parts
        y, needed = leaf.rule.forward(leaf, x)
        ctx.save_for_backward(x, leaf.leaf.weight, *needed)  # saved, so that a weight changed in place is noticed
        ctx.set_materialize_grads(False)
        return y.detach()  # else a view, to autograd, and nobody could write to it

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None
        (x, weight, *needed), rule, leaf = ctx.saved_tensors, ctx.leaf.rule, ctx.leaf.leaf
        if ctx.parts is None:
            rule.add_weight_gradients(leaf, x, dy, *needed)
            tell_trackers(leaf)
        else:
            _mark_kept(dy)
            # Detached, since a stage's x is a leaf, and would keep its own gradient alive with it until W.
            ctx.parts.append(DeferredByFormulas(leaf, rule, x.detach(), dy, *needed))
        return None, None, rule.input_gradient(leaf, x, dy, weight, *needed) if ctx.needs_input_grad[2] else None, None


class DeferredByFormulas:
    """Holds what W needs of a leaf module with formulas: its x and dy, and what else it kept."""

    def __init__(self, leaf, rule, *kept):
        self.leaf, self.rule, self.kept = leaf, rule, kept

    @torch.no_grad()
    def weights_backward(self):
        """Add to the gradients of the module's parameters, and forget x and dy."""
        kept, self.kept = self.kept, None
        self.rule.add_weight_gradients(self.leaf, *kept)
        tell_trackers(self.leaf)


def run_detached(leaf, parts, args, kwargs):
    """Call a leaf module on inputs without history; return its output as part of the stage's graph."""
    # The small graph ends here: its B goes no further.
    apart = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
    outputs, structure = tree_flatten(leaf.plain(*apart, **kwargs))
    places = [i for i, y in enumerate(outputs) if isinstance(y, torch.Tensor) and y.requires_grad]
    if places:
        ends, inputs = [get_gradient_edge(outputs[i]) for i in places], [x for x in args if isinstance(x, torch.Tensor)]
        part = DeferredByGraph(leaf.leaf, ends, [x for x in apart if isinstance(x, torch.Tensor)])
        anchor = None if any(x.requires_grad for x in inputs) else _anchor()
        nodes = _ByGraph.apply(part, parts, [outputs[i].detach() for i in places], anchor, *inputs)
        for i, y in zip(places, nodes, strict=True):
            outputs[i] = y
    return tree_unflatten(outputs, structure)


class _ByGraph(torch.autograd.Function):
    """Stands for a leaf module in the stage's graph; the module keeps a small graph of its own."""

    @staticmethod
    def forward(ctx, part, parts, outputs, anchor, *inputs):
        ctx.part, ctx.parts = part, parts
        ctx.set_materialize_grads(False)
        return tuple(outputs)  # of a list: else they would be views of inputs, to autograd

    @staticmethod
    def backward(ctx, *gradients):
        if all(dy is None for dy in gradients):
            return (None,) * (4 + len(ctx.part.inputs))
        ctx.parts.append(ctx.part)  # in the order of B, the last module first
        return None, None, None, None, *ctx.part.inputs_backward(gradients)


class DeferredByGraph:
    """Holds a leaf module's small graph, from `inputs` to `ends`, and from B until W its outputs' gradients."""

    def __init__(self, leaf, ends, inputs):
        self.leaf, self.ends, self.inputs, self.gradients = leaf, ends, inputs, None

    def inputs_backward(self, gradients):
        """Return the gradients of the inputs, None of those that need none; keep the outputs' gradients."""
        self.ends, self.gradients = zip(*((end, dy) for end, dy in zip(self.ends, gradients, strict=True)
                                          if dy is not None), strict=True)
        _mark_kept(*self.gradients)
        wanted = [x for x in self.inputs if x.requires_grad]
        # The graph is retained for W. An input may lead to no output.
        found = iter(torch.autograd.grad(self.ends, wanted, self.gradients, retain_graph=True, allow_unused=True)
                     if wanted else ())
        return [next(found) if x.requires_grad else None for x in self.inputs]

    def weights_backward(self):
        """Add to the gradients of the module's parameters, and forget the graph."""
        weights = [p for p in self.leaf.parameters(recurse=False) if p.requires_grad]
        torch.autograd.backward(self.ends, self.gradients, inputs=weights)  # the weights alone: dx was made in B
        self.ends, self.gradients, self.inputs = (), None, ()


def _has_history(*things):
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_flatten(things)[0])


def _mark_kept(*gradients):
    """Mark gradients that are kept until W, unless they are messages, for a tracker that looks on."""
    for dy in gradients if watched() else ():
        if mark_of(dy.untyped_storage()) is None:
            mark(dy, "activations")


def _anchor():
    """Return a tensor that needs a gradient and gets none, for a part whose inputs need none: it needs a graph, too."""
    return torch.empty(0, requires_grad=True)
