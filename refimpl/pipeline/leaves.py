"""How leaf modules of known kinds compute their gradients: without a graph, and added where they belong.

    Linear      y = x Wᵀ + b        dx = dy W         W.grad += dyᵀ x         b.grad += Σ dy
    Conv1D      y = x W + b         dx = dy Wᵀ        W.grad += xᵀ dy         b.grad += Σ dy      (Hugging Face's GPT-2)
    Embedding   y = W[ids]                            W.grad[ids] += dy
    LayerNorm   y = (x − μ)/σ ∘ w + b                 autograd's own kernel, for dx and for dw, db apart

Autograd makes a gradient first and adds it then: a temporary tensor as large as the weight, written and read again for
each micro-batch. A matrix product that adds to its result saves both ("gradient accumulation fusion" in Megatron-LM,
Shoeybi et al. 2019). An embedding's dense gradient is mostly zeros; here only the rows of its tokens are touched.

Where B and W are one, that is for large weights: of a small one a temporary gradient costs less than a call of Python.
Whatever is not plainly so is left to autograd: other classes, hooks on a weight, autocast, weights of another dtype
than x, gradients of another dtype than the weight.
"""

import torch
from torch import nn

from ..common.marks import meters
from ..others import ask_of_others

LARGE = 2**17  # elements of a weight, from which on a temporary gradient costs more than a node of Python's


class Linear:
    """Computes by the formulas of nn.Linear. `also_whole`: they are worth it where B and W are one."""

    also_whole = True

    @staticmethod
    def forward(call, x):
        """Return y, and what backward needs besides x and the weight."""
        return call.plain(x), ()

    @staticmethod
    def input_gradient(leaf, x, dy, weight):
        """Return dx."""
        return dy @ weight

    @staticmethod
    def add_weight_gradients(leaf, x, dy):
        """Add to the gradients of the weight and the bias."""
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        add_product(leaf.weight, dy.t(), x)
        add_sum(leaf.bias, dy)


class Conv1D(Linear):
    """Computes by the formulas of Hugging Face's Conv1D, a Linear whose weight is transposed."""

    @staticmethod
    def input_gradient(leaf, x, dy, weight):
        """Return dx."""
        return dy @ weight.t()

    @staticmethod
    def add_weight_gradients(leaf, x, dy):
        """Add to the gradients of the weight and the bias."""
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        add_product(leaf.weight, x.t(), dy)
        add_sum(leaf.bias, dy)


class Embedding(Linear):
    """Computes by the formulas of nn.Embedding; ids have no gradient."""

    @staticmethod
    def add_weight_gradients(leaf, ids, dy):
        """Add to the gradient of the weight."""
        ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if leaf.padding_idx is not None:
            dy = dy.masked_fill((ids == leaf.padding_idx)[:, None], 0)  # the padding row gets no gradient
        if leaf.weight.grad is None:
            leaf.weight.grad = torch.zeros_like(leaf.weight)
        leaf.weight.grad.index_add_(0, ids, dy)  # not weight.grad += one of all rows: it is zero but for these tokens


class LayerNorm(Linear):
    """Computes by the formulas of nn.LayerNorm. In one piece autograd's kernel is quicker."""

    also_whole = False

    @staticmethod
    def forward(call, x):
        """Return y, and μ and 1/σ of each row."""
        leaf = call.leaf
        y, mean, rstd = torch.native_layer_norm(x, leaf.normalized_shape, leaf.weight, leaf.bias, leaf.eps)
        return y, (mean, rstd)

    @staticmethod
    def input_gradient(leaf, x, dy, weight, *saved):
        """Return dx."""
        return torch.ops.aten.native_layer_norm_backward(dy, x, leaf.normalized_shape, *saved, weight, leaf.bias,
                                                         (True, False, False))[0]

    @staticmethod
    def add_weight_gradients(leaf, x, dy, *saved):
        """Add to the gradients of the weight and the bias."""
        _, dw, db = torch.ops.aten.native_layer_norm_backward(dy, x, leaf.normalized_shape, *saved, leaf.weight,
                                                              leaf.bias, (False, True, leaf.bias is not None))
        for p, gradient in ((leaf.weight, dw), (leaf.bias, db)):
            if p is not None and p.requires_grad:
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)


def add_product(weight, a, b):
    """Add the matrix product a b to a weight's gradient."""
    if not weight.requires_grad:
        return
    if weight.grad is None:
        weight.grad = a @ b
    else:
        weight.grad.addmm_(a, b)  # beta = 1: the product is added as it is made


def add_sum(bias, dy):
    """Add the sum of dy's rows to a bias's gradient."""
    if bias is None or not bias.requires_grad:
        return
    if bias.grad is None:
        bias.grad = dy.sum(0)
    else:
        bias.grad.add_(dy.sum(0))


def formulas_of(leaf):
    """Return the formulas of a leaf module, or None if autograd has to do it."""
    kind = type(leaf)
    if "forward" in leaf.__dict__:  # somebody's own
        return None
    if kind is nn.Linear:
        return Linear
    if kind is nn.Embedding and not (leaf.sparse or leaf.scale_grad_by_freq or leaf.max_norm):
        return Embedding
    if kind is nn.LayerNorm and leaf.weight is not None:
        return LayerNorm
    return Conv1D if ask_of_others("transposed", leaf) else None


def formulas_hold(leaf, args, kwargs):
    """Tell whether a leaf module's formulas hold for this call: one tensor comes in, dtypes are one, nobody hooks into
    gradients of weights."""
    if len(args) != 1 or kwargs or type(args[0]) is not torch.Tensor or torch.is_autocast_enabled(args[0].device.type):
        return False
    if args[0].dtype != leaf.weight.dtype and args[0].is_floating_point():  # ids are integers, whatever the weight is
        return False
    for p in leaf._parameters.values():
        if p is not None and not _is_plain(p):
            return False
    return True


def _is_plain(p):
    if type(p) is not nn.Parameter or p._backward_hooks or not _only_watched(p):
        return False
    grad = p.grad
    return grad is None or grad.dtype == p.dtype and grad.is_contiguous() and type(grad) is torch.Tensor


def _only_watched(p):
    """Tell whether a parameter has no hooks that run after its gradient was added, but those of trackers."""
    hooks = p._post_accumulate_grad_hooks
    watching = set(map(id, meters))
    return not hooks or all(id(getattr(hook, "__self__", None)) in watching for hook in hooks.values())


def tell_trackers(leaf):
    """Call the hooks of trackers, after a gradient was added."""
    for p in leaf._parameters.values():
        if p is not None and p._post_accumulate_grad_hooks and p.grad is not None:
            for hook in p._post_accumulate_grad_hooks.values():  # autograd calls them for what it adds itself
                hook(p)
