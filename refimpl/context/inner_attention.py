"""How an attention is called with the options that it has, and how tensors are kept without what they are views of."""

import functools
import inspect
from collections import Counter

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right


def call(attention, q_BHTD, k_BGSD, v_BGSD, causal, **options):
    """Return attention(q, k, v), (B, H, T, D). `causal` is aligned bottom-right: the last query sees every key.

    An attention gets `causal` if it has that option, and PyTorch's own gets what it has instead. A function without
    that option decides by itself what it masks, so it is called with as many keys as queries alone. ValueError for
    more keys, and for options that it does not have.
    """
    if attention is F.scaled_dot_product_attention:
        T, S = q_BHTD.shape[2], k_BGSD.shape[2]
        mask = causal_lower_right(T, S) if causal and T != S else None  # is_causal alone is aligned top-left
        return attention(q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=causal and mask is None,
                         enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1], **options)
    taken = options_of(attention)
    unknown = [name for name in options if name not in taken and None not in taken]
    if unknown:
        raise ValueError(f"{unknown[0]}={options[unknown[0]]!r}, but {attention} has no such option: give another "
                         "attention=, such as refimpl.attention.flash_attention")
    if {"causal", None} & taken:
        return attention(q_BHTD, k_BGSD, v_BGSD, causal=causal, **options)
    if causal and q_BHTD.shape[2] != k_BGSD.shape[2]:
        raise ValueError(f"{q_BHTD.shape[2]} queries of {k_BGSD.shape[2]} keys, and {attention} has no option `causal`"
                         ", so which keys it would mask is not known: give an attention with that option (of PyTorch "
                         "torch.nn.functional.scaled_dot_product_attention itself), or use Ulysses")
    return attention(q_BHTD, k_BGSD, v_BGSD, **options)


def options_of(attention):
    """Return the names of an attention's options, without those that a partial has fixed. None among them: any."""
    fixed = attention.keywords if isinstance(attention, functools.partial) else {}
    try:
        # A module's forward has the names; its call takes anything.
        given = inspect.signature(getattr(attention, "forward", attention)).parameters.values()
    except ValueError:  # a builtin
        return set()
    return {None if each.kind is each.VAR_KEYWORD else each.name for each in given} - {*fixed}


def check_shapes(q_BHTD, k_BGTD, v_BGTD):
    """Raise ValueError unless a rank has as many keys and values as queries, and G divides H."""
    q, k, v = (tuple(x.shape) for x in (q_BHTD, k_BGTD, v_BGTD))
    if len(q) != 4 or k != v or k != (q[0], *k[1:2], *q[2:]) or q[1] % k[1]:
        raise ValueError(f"q {q}, k {k}, v {v} on a rank: expected (B, H, T, D) and twice (B, G, T, D), for the same T "
                         "tokens, and G to divide H")


def check_dropout(dropout_p):
    """Raise ValueError for dropout."""
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p!r}: attention of a split sequence drops no weights, since ranks would "
                         "draw other masks than one device does; use dropout_p=0.0: GPTConfig(dropout=0.0), in a "
                         "config of transformers attention_dropout=0.0 or attn_pdrop=0.0")


def compact(*tensors):
    """Return tensors that keep no memory but their own: copies of those that are views of more, such as v of q, k and v
    in one matrix, whose q and k have been rotated to other memory."""
    own = Counter()
    for x in tensors:
        own[x.untyped_storage()._cdata] += x.nbytes
    return [x if x.untyped_storage().nbytes() <= own[x.untyped_storage()._cdata] else
            x.clone(memory_format=torch.contiguous_format) for x in tensors]
