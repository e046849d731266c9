"""Checks what the losses of a head are called with."""

import math

import torch

from ..common.derivatives import refuse_batched_gradients, refuse_transforms
from ..common.nested_tensors import is_dry

INSTEAD = "the logits and torch.nn.functional.cross_entropy"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def flat(targets):
    """Return targets as a vector."""
    return targets.reshape(-1)


def check_call(hiddens, weight, targets, scales, bias, reduction, chunk_size, terms, columns):
    """Return hiddens as matrices (N, C), cast as autocast asks; raise ValueError, TypeError or
    IndexError for what cannot be computed."""
    refuse_transforms("a chunked cross-entropy", INSTEAD, (*hiddens, weight, bias))
    terms.check()
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean' or 'sum'. A loss for each row is not known in "
                         "backward any more: its gradients are computed in forward, and summed")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size!r}: expected an integer of at least 1, in tokens, or None")
    if not len(hiddens) == len(targets) == len(scales) or not hiddens:
        raise ValueError(f"{len(hiddens)} hidden states, {len(targets)} targets and {len(scales)} scales: expected as "
                         "many of each, at least one")
    if any(scale == 0 or not math.isfinite(scale) for scale in scales):
        raise ValueError(f"scales={scales}: expected finite numbers, none of 0; leave that loss out")
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        shape = None if bias is None else tuple(bias.shape)
        raise ValueError(f"weight {tuple(weight.shape)} and bias {shape}: expected (V, C) and (V,)")
    for hidden, target in zip(hiddens, targets, strict=True):
        if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != target.shape:
            raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
                             f"{tuple(target.shape)}: expected (…, C), (V, C) and (…)")
        check_targets(target, columns.V, terms.ignore_index)
    return _same_dtype([each.reshape(-1, each.shape[-1]) for each in hiddens], weight, bias)


def _same_dtype(hiddens, weight, bias):
    """Return hiddens, cast as autocast asks. The loss itself casts the weight, whose gradient then is not rounded."""
    device = weight.device.type
    found = {each.dtype for each in (*hiddens, weight, *([] if bias is None else [bias]))}
    if torch.is_autocast_enabled(device) and torch.float64 not in found:  # autocast never casts fp64
        return [each.to(torch.get_autocast_dtype(device)) for each in hiddens]
    if len(found) != 1 or not found <= {*FLOATS}:
        raise TypeError(f"hidden, weight and bias are of {sorted(map(str, found))}: expected one dtype, fp64, fp32, "
                        "bf16 or fp16 (or autocast)")
    return hiddens


def sum_dtype(weight_gradient, weight, dtype):
    """Return the dtype in which dW is summed, if hidden states are of `dtype`; ValueError if that is not known."""
    wide = torch.promote_types(dtype, torch.float32)
    # a weight that autocast casts keeps its gradient in fp32
    known = (wide, weight.dtype) if weight.dtype == dtype else (wide,)
    if weight_gradient not in (None, *known):
        raise ValueError(f"weight_gradient={weight_gradient!r} for hidden states of {dtype} and a weight of "
                         f"{weight.dtype}: expected None or {' or '.join(map(str, dict.fromkeys(known)))}")
    return weight_gradient or wide


def check_targets(targets, V, ignore_index):
    """Raise IndexError for a target outside 0 … V − 1 that is not `ignore_index`; TypeError for other dtypes. A GPU is
    not waited for: there an assertion fails."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets are {targets.dtype}: expected ids in int64 or int32")
    if is_dry(targets) or targets.is_meta:  # they have no values to check
        return
    inside = ((targets >= 0) & (targets < V)).logical_or_(targets == ignore_index)
    if targets.is_cuda:
        torch._assert_async(inside.all(), f"targets: an id is outside the vocabulary of {V}")
    elif not inside.all():
        raise IndexError(f"targets hold {targets[~inside][0].item()}: the vocabulary is 0…{V - 1}, or "
                         f"ignore_index={ignore_index}")


def refuse_second_derivative(gradient):
    """Raise RuntimeError in a backward under `create_graph=True`, and in one for several gradients at once."""
    refuse_batched_gradients("a chunked cross-entropy", INSTEAD, gradient)
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True for a chunked cross-entropy: its gradients have no graph. For second "
                           f"derivatives, compute {INSTEAD}")
