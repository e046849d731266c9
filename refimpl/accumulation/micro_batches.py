"""Micro-batches: how a batch is cut, and the weight of each part in the mean over the whole.

With n targets in the batch and nₘ of them in micro-batch m, whose own mean loss is Lₘ, the mean over the batch is

    L = Σₘ (nₘ / n) · Lₘ

The mean of the means, Σₘ Lₘ / N over N micro-batches, is L only if all nₘ are equal.
"""

import math
from numbers import Integral
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def split(batch: Any, size: int) -> list[Any]:
    """Cut `batch` into micro-batches of `size` rows; the last may have fewer. Returns a list of such structures.

    `batch`: a tensor, or lists, tuples and dicts of tensors with the same first dimension. A None in it goes to every
    micro-batch. The parts are views, so nothing is copied. Raises TypeError for anything else in the batch. Raises
    ValueError for a `size` that is not an integer of at least 1, for no rows, and for first dimensions that differ.
    """
    if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
        raise ValueError(f"micro_batch={size!r}: expected an integer of at least 1, the rows of each micro-batch")
    leaves, structure = tree_flatten(batch)
    rows = _rows(leaves)
    return [tree_unflatten([leaf if leaf is None else leaf[first : first + size] for leaf in leaves], structure)
            for first in range(0, rows, int(size))]


def _rows(leaves):
    """Return the first dimension, which all tensors in `leaves` must share."""
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise TypeError(f"the batch holds {type(leaf).__name__}: expected tensors. Give what is the same for every "
                            "micro-batch to loss_fn, not to the batch")
        if leaf is not None and leaf.dim() == 0:
            raise ValueError("the batch holds a tensor without dimensions: expected rows in the first dimension")
    shapes = [tuple(leaf.shape) for leaf in leaves if leaf is not None]
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"tensors of shapes {', '.join(map(str, shapes))}: expected one number of rows in all, the "
                         "first dimension")
    if not shapes or shapes[0][0] == 0:
        raise ValueError(f"the batch is empty ({shapes[0] if shapes else 'no tensors'}): expected at least one row")
    return shapes[0][0]


def count_targets(*micro_batch: torch.Tensor, ignore_index: int = -100) -> Any:
    """Count the targets of a micro-batch, its last argument. They are the terms of its mean loss.

    Integers count unless they are `ignore_index`, as in `cross_entropy` and `refimpl.model.GPT`. The result is then a
    tensor without dimensions, so that the CPU does not wait for a GPU. Floating-point numbers all count, and the result
    is an int. Raises ValueError if the last argument is something else (a dict, a mask): then give `accumulate` a
    `count` of your own.
    """
    last = micro_batch[-1]
    if not isinstance(last, torch.Tensor) or last.dtype is torch.bool:
        what = "a mask" if isinstance(last, torch.Tensor) else type(last).__name__
        raise ValueError(f"the batch's last argument is {what}, not targets: give count=, a function of a micro-batch "
                         "that returns how many terms its mean loss has")
    return last.numel() if last.is_floating_point() else (last != ignore_index).sum()


def cut(batch, micro_batch, micro_batches):
    """Return the arguments of each micro-batch. Raises ValueError unless exactly one of the two ways is used."""
    if (micro_batch is None) == (micro_batches is None) or bool(batch) == (micro_batches is not None):
        raise ValueError("expected either a batch and micro_batch=, the rows of a part: accumulate(model, tokens, "
                         "targets, micro_batch=8); or micro_batches=, the parts themselves, and nothing else")
    if micro_batches is None:
        return split(batch, micro_batch)
    parts = [part if isinstance(part, tuple) else (part,) for part in micro_batches]
    for part in parts:
        _rows(tree_flatten(part)[0])
    if not parts:
        raise ValueError("micro_batches is empty: expected at least one micro-batch")
    return parts


def weights(parts, reduction, count, total):
    """Return the weight of each part's loss: nₘ / n for a mean, 1 for a sum.

    `total(n)` returns n summed over all ranks. Raises ValueError if that is 0.
    """
    if reduction == "sum":
        return [1.0] * len(parts)
    terms = _counts(parts, count)
    n = total(sum(terms))
    if n == 0:
        raise ValueError("every target of the batch is ignored (or count returned 0 for all of it): a mean needs at "
                         "least one term")
    return [each / n for each in terms]


def _counts(parts, count):
    """Return nₘ of each part as a number, waiting for a GPU once. In a dry run tensors have no values: 1 for each."""
    found = [count(*part) for part in parts]
    if any(isinstance(each, FakeTensor) for each in found):
        return [1] * len(found)
    if all(isinstance(each, torch.Tensor) and each.numel() == 1 for each in found):
        # One wait for the device, not one for each part.
        found = torch.stack([each.detach().reshape(()) for each in found]).tolist()
    for number, each in enumerate(found):
        if not isinstance(each, (int, float)) or not 0 <= each < math.inf:
            raise ValueError(f"count returned {each!r} for micro-batch {number}: expected one number, 0 or more")
    return found
