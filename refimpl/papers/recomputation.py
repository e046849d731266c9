"""Recomputation in one screen: keep the input of a few layers instead of all their results; compute them again later.

`checkpoint` is "Training Deep Nets with Sublinear Memory Cost" (Chen et al. 2016), section 3. `optimal_schedule` says
which stages of a chain to recompute so that a step fits in m bytes and takes the least time: "Optimal checkpointing for
heterogeneous chains" (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019), section 4. Stage i (from 0 to n−1) has

    f[i], b[i]    the times of its forward and its backward
    a[i]          the bytes of its output x[i], and of the gradient of that; stage i reads x[i−1]
    s[i]          the bytes that autograd saves in it besides its input (here not its output: PyTorch frees that)

T(i, j, m) is the least time for forward and backward of the stages i … j within m bytes, given x[i−1] (not counted) and
the gradient of x[j] (counted). Either stage i keeps what it saves, or stages i … k−1 run now without saving anything,
only their result x[k−1] is kept, and they run again when backward has come that far:

    keep         f[i] + b[i] + T(i+1, j, m − s[i] − a[i])
    recompute    f[i] + … + f[k−1] + T(k, j, m − a[k−1]) + T(i, k−1, m)           for the best k in i+1 … j
"""

from functools import cache, partial
from math import inf

import torch


class Checkpoint(torch.autograd.Function):
    """Compute fn(x₁, x₂, …). Forward saves the x alone; backward runs fn again with a graph and goes through that."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn = fn
        ctx.save_for_backward(*inputs)  # all that is kept
        return fn(*inputs)  # a Function's forward has no graph, so autograd saves nothing inside fn

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.fn(*inputs)  # the second forward: now autograd saves what backward needs
        torch.autograd.backward(outputs, gradients)  # parameters of fn get their gradients here, the inputs theirs
        return None, *(x.grad for x in inputs)  # None: for fn


def checkpoint(fn, *inputs):
    """Call `fn(*inputs)`, all of them tensors of which one needs a gradient, and compute it again in backward.

    Without dropout: the second time it would draw other masks.
    """
    return Checkpoint.apply(fn, *inputs)


def run_chain(functions, plan, x):
    """Run x through the functions. A tuple in `plan` is recomputed as one: [(0, 1), 2] keeps x, x[1] and s[2].

    Tuples nest: [((0, 1), 2), 3] recomputes 0, 1 and 2 from x; that time, too, 0 and 1 keep x only.
    """
    for item in plan:
        region = isinstance(item, tuple)
        x = checkpoint(partial(run_chain, functions, item), x) if region else functions[item](x)
    return x


def optimal_schedule(f, b, a, s, m):
    """Return (time, plan) of the least time within m bytes, the chain's input not counted; (inf, []) if none fits."""

    @cache
    def T(i, j, m):
        if i > j:
            return 0, []
        best = inf, []
        before = a[i - 1] if i else 0
        saving = a[j] + s[i] + a[i]  # in forward: the gradient of x[j], what is saved, x[i]
        in_backward = s[i] + a[i] + before  # what was saved, the gradients of x[i] and of x[i−1]
        if m >= max(saving, in_backward):
            time, rest = T(i + 1, j, m - s[i] - a[i])
            best = min(best, (f[i] + b[i] + time, [i, *rest]), key=lambda option: option[0])
        for k in range(i + 1, j + 1):
            dropping = a[j] + max(a[h] + (a[h - 1] if h > i else 0) for h in range(i, k))  # x[h−1] → x[h], none saved
            if m >= dropping:
                (right, rest), (left, region) = T(k, j, m - a[k - 1]), T(i, k - 1, m)
                best = min(best, (sum(f[i:k]) + right + left, [tuple(region), *rest]), key=lambda option: option[0])
        return best

    return T(0, len(f) - 1, m)
