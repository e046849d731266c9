"""The arguments of every attention here, checked before anything is computed, and what follows from them.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads, D head_dim of q and k, V that of v and the output.
Each key head serves H/G query heads.
"""

import contextlib
import math
from typing import NamedTuple

import torch

from ..scores import ScoreHook, check_tensor, hook_of
from .sequence_tiles import SequenceTiles
from .sequences import (
    Band,
    Sequence,
    as_tensors,
    check_cu_seqlens,
    check_max_seqlens,
    check_on_device,
    check_packing,
    is_known,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNELS = ("auto", "triton", "hopper", "gluon")
MAX_HEAD_DIM = 256


class AttentionCall(NamedTuple):
    """The arguments of an attention, checked, with their defaults filled in."""

    scale: float
    dropout_p: float
    seed: int | torch.Tensor | None  # None without dropout
    sequences: tuple  # of Sequence; one that holds everything unless cu_seqlens says otherwise
    score: ScoreHook | None = None
    packed: bool = False
    may_hide = property(lambda self: self.score is not None)  # whether a query that has tiles may see no key

    def parts(self, q_BHTD, k_BGSD):
        """List what is computed one after the other: the tiles of each sequence."""
        heads = (*q_BHTD.shape[:2], k_BGSD.shape[1])
        return [SequenceTiles(self, index, heads, q_BHTD.device) for index in range(len(self.sequences))]

    def with_seed(self, seed):
        """Return the call with another seed. Not by `_replace`: under torch.compile of PyTorch 2.11 what that returns
        is an empty tuple once it leaves the graph."""
        return AttentionCall(self.scale, self.dropout_p, seed, self.sequences, self.score, self.packed)


def resolve(q_BHTD, k_BGSD, v_BGSV, *, causal, window, scale, dropout_p, seed, cu_seqlens, cu_seqlens_k,
            max_seqlen=None, max_seqlen_k=None, score=None, sinks=None, sequences=None):
    """Check the arguments and return them as an AttentionCall. Raises TypeError or ValueError before any computation.
    `sequences`: how many are packed, if only the device knows where (`resolve_packed`)."""
    check_tensors(q_BHTD, k_BGSD, v_BGSV)
    check_mask(causal, window)
    (B, _, T, D), S = q_BHTD.shape, k_BGSD.shape[2]
    scale = check_scale(D**-0.5 if scale is None else scale)
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    longest, longest_k = check_max_seqlens(max_seqlen, max_seqlen_k, cu_seqlens)
    queries = [0, T] if cu_seqlens is None else check_cu_seqlens("cu_seqlens", cu_seqlens, T, B, longest)
    keys = [0, S] if cu_seqlens_k is None else check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, S, B, longest_k)
    if (cu_seqlens is None) != (cu_seqlens_k is None) or len(queries) != len(keys):
        raise ValueError(f"queries in {len(queries) - 1} sequences and keys in {len(keys) - 1}: expected as many of "
                         "both; cu_seqlens says where those of the queries end, cu_seqlens_k (default: the same) those "
                         "of the keys")
    sequences = sequences if cu_seqlens is None else len(queries) - 1
    score = check_score(score, sinks, q_BHTD, k_BGSD, causal, sequences)
    seed = check_dropout(dropout_p, seed, q_BHTD.device)  # last: it may draw
    spans = zip(zip(queries, queries[1:], strict=False), zip(keys, keys[1:], strict=False), strict=True)
    return AttentionCall(scale, dropout_p, seed, tuple(
        Sequence(rows, cols, Band.of(rows[1] - rows[0], cols[1] - cols[0], causal, window)) for rows, cols in spans),
        score, sequences is not None)


def resolve_packed(q_BHTD, k_BGSD, v_BGSV, options, packing):
    """Return (AttentionCall, (cu_seqlens, cu_seqlens_k, longest, longest_k)) for the kernels; None, None, 0, 0 if
    nothing is packed. With `max_seqlen` the host does not wait for the device, and the call's sequences are not set if
    only the device knows them. `options`, `packing`: the arguments of `resolve`."""
    ends, ends_k = packing["cu_seqlens"], packing["cu_seqlens_k"]
    ends_k = ends if ends_k is None else ends_k
    if packing["max_seqlen"] is None or all(map(is_known, (ends, ends_k))):
        call = resolve(q_BHTD, k_BGSD, v_BGSV, **options, **packing)
        return call, as_tensors(call, packing, (ends, ends_k), q_BHTD.device)
    longest = check_max_seqlens(packing["max_seqlen"], packing["max_seqlen_k"], ends)
    found = []
    for name, which, x, most in zip(("cu_seqlens", "cu_seqlens_k"), (ends, ends_k), (q_BHTD, k_BGSD), longest,
                                    strict=True):
        check_packing(name, which, q_BHTD.shape[0])
        which = torch.tensor(which, dtype=torch.int32, device=x.device) if isinstance(which, (list, tuple)) else which
        if which.device != x.device or which.shape[0] < 2:
            raise ValueError(f"{name} of shape {tuple(which.shape)} on {which.device}: expected 0 and the end of each "
                             f"sequence, on {x.device}")
        check_on_device(name, which, x.shape[2], most)
        found.append(which)
    if found[0].shape != found[1].shape:
        raise ValueError(f"queries in {len(found[0]) - 1} sequences and keys in {len(found[1]) - 1}: expected as many "
                         "of both")
    alone = dict.fromkeys(("cu_seqlens", "cu_seqlens_k"))  # the band of a sequence is the device's to know
    return resolve(q_BHTD, k_BGSD, v_BGSV, **options, **alone, sequences=len(found[0]) - 1), (*found, *longest)


def check_tensors(q_BHTD, k_BGSD, v_BGSV):
    """Check ranks, shapes, dtypes and devices of q, k and v."""
    named = {"q": q_BHTD, "k": k_BGSD, "v": v_BGSV}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: expected a tensor (batch, heads, sequence, "
                            "head_dim)")
        if tensor.ndim != 4:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)}: expected (batch, heads, sequence, head_dim); "
                             "unsqueeze(0) adds a batch, transpose(1, 2) brings heads before the sequence")
        if 0 in tensor.shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} is empty: expected at least 1 in each dimension; "
                             "skip the call")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}: expected float16, bfloat16, float32 or float64; cast it first")
    for what in ("dtype", "device"):
        values = {name: str(getattr(tensor, what)) for name, tensor in named.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"several {what}s: {listed}; expected one, cast with .to(…)")
    (B, H, _, D), (Bk, G, _, Dk) = q_BHTD.shape, k_BGSD.shape
    if k_BGSD.shape[:3] != v_BGSV.shape[:3]:
        raise ValueError(f"k of shape {tuple(k_BGSD.shape)} and v of shape {tuple(v_BGSV.shape)}: expected the same, "
                         "but for the last dimension")
    if (B, D) != (Bk, Dk):
        raise ValueError(f"q of shape {tuple(q_BHTD.shape)} and k of shape {tuple(k_BGSD.shape)}: batch (first) and "
                         "head_dim (last) must be the same")
    if H % G:
        raise ValueError(f"{H} query heads and {G} key heads: expected a number of key heads that divides {H}")
    for what, dim in (("head_dim", D), ("head_dim of v", v_BGSV.shape[-1])):
        if dim > MAX_HEAD_DIM:
            raise ValueError(f"{what}={dim}: expected 1 to {MAX_HEAD_DIM}; use more heads that are smaller")


def check_mask(causal, window):
    """Check that `causal` is a bool, and `window` None or an int of at least 0."""
    if not isinstance(causal, bool):  # 1, or a mask, would pass for True
        raise TypeError(f"causal is a {type(causal).__name__}: expected True or False; masks other than causal and "
                        "window are not supported")
    if window is not None and type(window) is not int:
        raise TypeError(f"window={window!r}: expected None or an int, how many keys to the left a query sees besides "
                        "its own position")
    if window is not None and window < 0:
        raise ValueError(f"window={window}: expected at least 0 (its own position only), or None for no window")


def check_kernel(kernel):
    """Check that `kernel` is one of KERNELS."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r}: expected one of {', '.join(map(repr, KERNELS))}")


def check_scale(scale):
    """Check that `scale` is a finite number above 0: kernels take a row's maximum before they multiply by it."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale is a {type(scale).__name__}: expected a number, such as head_dim**-0.5, or None for it")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: expected a finite number above 0; for a negative one, negate q")
    return float(scale)


def check_dropout(dropout_p, seed, device):
    """Return the seed of the call's dropout mask: `seed`, or by default a number from PyTorch's generator of the device
    (so torch.manual_seed governs it); None if nothing is dropped. A seed on the device is not copied to the host."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p is a {type(dropout_p).__name__}: expected a number in [0, 1)")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p}: expected a number in [0, 1); 0.1 drops a tenth of the weights")
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.ndim or seed.device != device:
            raise ValueError(f"seed of shape {tuple(seed.shape)}, {seed.dtype}, on {seed.device}: expected an int, or "
                             f"one int64 without dimensions on {device}")
    elif seed is not None and type(seed) is not int:
        raise TypeError(f"seed is a {type(seed).__name__}: expected an int, a tensor, or None to draw one")
    elif seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: expected an int in [0, 2**63)")
    if not dropout_p:
        return None
    # on the device: `.item()` would wait for it
    return torch.randint(0, 2**63 - 1, (), device=device) if seed is None else seed


def check_score(score, sinks, q_BHTD, k_BGSD, causal, sequences):
    """Return `score` as one ScoreHook or None, checked against the call, and so are `sinks`."""
    score = hook_of(score)
    if score is not None:
        score.check(q_BHTD, k_BGSD, causal, sequences)
    if sinks is not None:
        check_tensor("sinks", sinks, (q_BHTD.shape[1],), "one logit for each query head", q_BHTD.device)
    return score


def without_autocast(device):
    """Return a context without autocast; some devices, such as "meta", have none."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)  # it would cast fp32 scores down again


def empty_outputs(q_BHTD, V=None):
    """Allocate (out_BHTV, lse2_BHT); V: head_dim of v, by default D. In memory out is (B, T, H, V): the model that
    joins its heads next needs no copy, which autograd would keep."""
    B, H, T, D = q_BHTD.shape
    return q_BHTD.new_empty(B, T, H, V or D).transpose(1, 2), q_BHTD.new_empty((B, H, T), dtype=torch.float32)


INSTEAD = "reference_attention"


def refuse_second_derivative(name):
    """Raise RuntimeError: the backward of the attention `name` has no derivative."""
    raise RuntimeError(f"{name}'s backward is not differentiable itself: use reference_attention or "
                       "memory_efficient_attention where gradients of gradients are needed")
