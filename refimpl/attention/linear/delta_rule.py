"""Linear attention with a gate and the delta rule: a state of D × V numbers a head, in place of keys and values.

    gated_delta_rule(q, k, v, log_decay, beta)          in training: chunks, by kernels where they run
    gated_delta_rule(…, state_BHDV=s, return_state=True)    (out, the state after the last token), for the next call

`papers/linear_attention` has the idea, `chunks` the arithmetic and its derivative, `triton_chunks` the kernels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...common.cache_bytes import check_counts
from ...common.derivatives import refuse_batched_gradients, refuse_transforms
from ...common.nested_tensors import is_dry
from ..call.arguments import check_scale, check_tensors, without_autocast
from ..flash import KERNEL_DTYPES, check_for_kernels, kernels_run_on
from ..reference import AttentionBytes, wide_dtype
from ..tiled import check_sizes
from . import chunks, kernels

INSTEAD = "refimpl.papers.linear_attention.recurrent"
FORMS = ("auto", "triton", "tiled")
CHUNK, CHUNKS = 64, (16, 32, 64)  # tokens of a chunk; those that the kernels take
MOST_COLUMNS = 128  # of q and k, in the kernels: two (chunk, D) matrices are to be in registers


class Call(NamedTuple):
    """What is computed, besides the tensors."""

    scale: float
    delta: bool
    chunk: int
    by_kernels: bool = False

    @property
    def form(self):
        """Return the module that computes it."""
        return kernels if self.by_kernels else chunks


def gated_delta_rule(q_BGTD: torch.Tensor, k_BGTD: torch.Tensor, v_BHTV: torch.Tensor,
                     log_decay_BHT: torch.Tensor | None = None, beta_BHT: torch.Tensor | None = None, *,
                     scale: float | None = None, delta: bool = True, state_BHDV: torch.Tensor | None = None,
                     return_state: bool = False, chunk: int | None = None, kernel: str = "auto") -> Any:
    """Compute, token by token, S = e^log_decay S + k uᵀ with u = β (v − e^log_decay Sᵀ k), and out = scale · Sᵀ q,
    chunk by chunk: (B, H, T, V) in q's dtype. It is causal. Bytes and FLOPs are linear in T.

    - G divides H: heads h·H/G … (h+1)·H/G − 1 of v, each with its state, share q and k of head h.
    - k is to be of length 1 at most (`torch.nn.functional.normalize`): with a longer one and β = 1 a state can grow.
    - `log_decay`: ≤ 0 and finite, by default 0; −50 forgets all. `beta`: by default 1. Any floating dtype.
    - `scale`: default 1/√D. `delta`: False for u = β v, linear attention.
    - `state`: S before the first token, by default zeros. `return_state`: (out, S after the last token), in fp32 or
      wider: with it the next call goes on, after one token or a thousand.
    - `chunk`: how many tokens are computed in parallel, a divisor of T (kernels: 16, 32 or 64). By default 64, and the
      last chunk is shorter where T is no multiple.
    - `kernel`: "triton", "tiled" (the same in PyTorch), or "auto": Triton where `flash_attention`'s kernels run.

    The arithmetic is in fp32 or wider; on a GPU factors of products are rounded to bf16, if q is. Autograd keeps the
    arguments alone. Raises TypeError or ValueError for arguments that do not fit, and RuntimeError where its backward
    would be differentiated, under transforms of torch.func, and for forward-mode derivatives.

    Gated DeltaNet (Yang et al. 2024), equation 10; DeltaNet in chunks (Yang et al. 2024), section 3.
    """
    tensors = q_BGTD, k_BGTD, v_BHTV, log_decay_BHT, beta_BHT
    refuse_transforms("gated_delta_rule", INSTEAD, (*tensors, state_BHDV))
    _check(tensors, state_BHDV)
    B, H, T, _ = v_BHTV.shape
    log_decay_BHT, beta_BHT = (v_BHTV.new_full((1, 1, 1), value, dtype=wide_dtype(v_BHTV.dtype)).expand(B, H, T)
                               if x is None else x for x, value in ((log_decay_BHT, 0), (beta_BHT, 1)))
    by_kernels = _by_kernels(kernel, q_BGTD)
    call = Call(check_scale(q_BGTD.shape[3] ** -0.5 if scale is None else scale), bool(delta),
                _check_chunk(chunk, T, by_kernels), by_kernels)
    if by_kernels:
        check_for_kernels(q_BGTD, k_BGTD, v_BHTV)
    out_BHTV, last_BHDV = GatedDeltaRule.apply(*tensors[:3], log_decay_BHT, beta_BHT, state_BHDV, call)
    return (out_BHTV, last_BHDV) if return_state else out_BHTV


def _by_kernels(kernel, q_BGTD):
    if kernel not in FORMS:
        raise ValueError(f"kernel={kernel!r}: expected one of {', '.join(map(repr, FORMS))}")
    runs = kernels_run_on(q_BGTD.device) or is_dry(q_BGTD) and kernel == "triton"  # a dry run has any device's bytes
    runs = runs and q_BGTD.dtype in KERNEL_DTYPES and q_BGTD.shape[3] <= MOST_COLUMNS
    if kernel == "triton" and not runs:
        raise ValueError(f"kernel='triton' for {q_BGTD.dtype} of {q_BGTD.shape[3]} columns on {q_BGTD.device}: the "
                         f"kernels take float16, bfloat16 and float32 of up to {MOST_COLUMNS} columns on CUDA "
                         "(capability 8.0 on), or on a CPU with TRITON_INTERPRET=1 set before Triton is imported; "
                         "kernel='tiled' computes the same in PyTorch")
    return runs and kernel != "tiled"


def _check_chunk(chunk, T, by_kernels):
    if chunk is None:
        return CHUNK
    check_sizes(chunk=chunk)
    if T % chunk:
        fitting = max(n for n in range(1, min(chunk, T) + 1) if T % n == 0)
        raise ValueError(f"chunk={chunk} with {T} tokens: expected a divisor, such as {fitting}, or None: chunks of "
                         f"{CHUNK}, the last one shorter")
    if by_kernels and chunk not in CHUNKS:
        raise ValueError(f"chunk={chunk}: expected one of {', '.join(map(str, CHUNKS))} for the kernels, or "
                         "kernel='tiled'")
    return chunk


def _check(tensors, state_BHDV):
    q_BGTD, k_BGTD, v_BHTV, *rows = tensors
    check_tensors(q_BGTD, k_BGTD, k_BGTD)
    check_tensors(v_BHTV, v_BHTV, v_BHTV)
    (B, G, T, D), (Bv, H, Tv, V) = k_BGTD.shape, v_BHTV.shape
    if q_BGTD.shape != k_BGTD.shape or (B, T) != (Bv, Tv) or H % G:
        raise ValueError(f"q, k and v of shapes {tuple(q_BGTD.shape)}, {tuple(k_BGTD.shape)} and {tuple(v_BHTV.shape)}"
                         ": expected q and k (batch, G, sequence, D) and v (batch, H, sequence, V) with H a multiple "
                         "of G")
    for what in ("dtype", "device"):
        if getattr(v_BHTV, what) != getattr(k_BGTD, what):
            raise ValueError(f"k of {what} {getattr(k_BGTD, what)} and v of {getattr(v_BHTV, what)}: expected one")
    shapes = {"log_decay": (B, H, T), "beta": (B, H, T), "state": (B, H, D, V)}
    for (name, shape), x in zip(shapes.items(), (*rows, state_BHDV), strict=True):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} is a {getattr(x, 'dtype', type(x).__name__)}: expected a floating tensor {shape}")
        if tuple(x.shape) != shape or x.device != k_BGTD.device:
            raise ValueError(f"{name} of shape {tuple(x.shape)} on {x.device}: expected {shape} on {k_BGTD.device}")


class GatedDeltaRule(torch.autograd.Function):
    """The rule as one operation. Autograd keeps what it was given alone."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, state, call):
        ctx.save_for_backward(q, k, v, log_decay, beta, state)
        ctx.call = call
        ctx.set_materialize_grads(False)
        with without_autocast(q.device):
            return call.form.forward((q, k, v, log_decay, beta), state, call)

    @staticmethod
    def backward(ctx, d_out, d_last):
        refuse_batched_gradients("gated_delta_rule", INSTEAD, d_out, d_last)
        return *_Backward.apply(*ctx.saved_tensors, d_out, d_last, ctx.call), None


class _Backward(torch.autograd.Function):
    """The backward as an operation of its own: a derivative of it comes here and is refused."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, state, d_out, d_last, call):
        d_out = torch.zeros_like(v) if d_out is None else d_out  # the last state alone was used
        with without_autocast(q.device):
            *found, d_state = call.form.backward(d_out, d_last, (q, k, v, log_decay, beta), state, call)
        return *found, None if state is None else d_state.to(state.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(f"gated_delta_rule's backward is not differentiable itself: use {INSTEAD} where gradients "
                           "of gradients are needed")


# --- bytes and FLOPs -------------------------------------------------------------------------------------------------


def delta_rule_bytes(k_shape: Sequence[int], v_shape: Sequence[int], dtype: torch.dtype = torch.float32, *,
                     delta: bool = True, chunk: int = CHUNK, kernel: str = "tiled") -> AttentionBytes:
    """Predict the AttentionBytes of `gated_delta_rule` for shapes (B, G, T, D) and (B, H, T, V), with gates in the wide
    dtype and without a state. With e bytes an element, w a wide one (4, or 8 for fp64) and N = T / chunk:

        kept   e·BHT·V                                        the output
        peak   kept + e·(2·BGT·D + BHT·V) + 2w·BHT             the gradients
               + w·BH·(N + 1)·D·V                             S before each chunk, and dS
               + one chunk (tiled; `chunks.chunk_numbers`), or 4·BHT·chunk, each chunk's (I + A)⁻¹ (triton)

    so the slope in the sequence length is 1. With G < H the kernels write dQ and dK of each head in fp32 first. Raises
    as `gated_delta_rule` does.
    """
    q_BGTD, v_BHTV = (torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in (k_shape, v_shape))
    _check((q_BGTD, q_BGTD, v_BHTV, None, None), None)
    (B, G, T, D), (_, H, _, V) = k_shape, v_shape
    e, w, n = dtype.itemsize, wide_dtype(dtype).itemsize, B * H
    kept, states = e * n * T * V, w * n * (-(-T // chunk) + 1) * D * V
    rows = e * n * T * V + 2 * w * n * T  # the gradients of v, log_decay and beta
    qk = 2 * e * B * G * T * D
    if kernel == "triton":
        inverse, per_head = 4 * n * T * chunk * delta, 2 * n * T * D * (e if G == H else 4)
        # then the heads of a group are summed, q's before k's: each in fp32, and rounded
        summed = 0 if G == H else per_head + 4 * B * G * T * D + (e < 4) * e * B * G * T * D + qk // 2
        forward = inverse + 4 * n * D * V
        return AttentionBytes(kept, kept + max(forward, rows + max(inverse + states + per_head, summed)))
    forward, backward = (w * n * x for x in chunks.chunk_numbers(min(chunk, T), D, V, delta))
    return AttentionBytes(kept, kept + max(forward + w * n * D * V, qk + rows + states + backward))


def delta_rule_flops(k_shape: Sequence[int], v_shape: Sequence[int], *, delta: bool = True,
                     chunk: int = CHUNK) -> int:
    """Count the FLOPs of a forward's products; a multiply-add counts 2. For each head and chunk of C tokens:

        2 · C · (2 D·V + C·(D + V))         S' and Q S; Q Kᵀ and P U
        2 · C · (D·V + C·D + C·V / 2)       K S, K Kᵀ and the triangular system, with the delta rule

    so that T·chunk stands in the place of T².
    """
    (_, _, T, D), (B, H, _, V) = k_shape, v_shape
    flops = 0
    for C in [chunk] * (T // chunk) + [T % chunk]:
        flops += 2 * C * (2 * D * V + C * (D + V)) + delta * (2 * C * (D * V + C * D) + C * C * V)
    return B * H * flops


def state_bytes(*, layers: int, heads: int, head_dim: int, v_dim: int | None = None,
                dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of the states that stand in place of a cache: layers · heads · D · V · e, whatever the length.
    ValueError for a count that is not positive."""
    v_dim = head_dim if v_dim is None else v_dim
    check_counts(layers=layers, heads=heads, head_dim=head_dim, v_dim=v_dim)
    return layers * heads * head_dim * v_dim * dtype.itemsize
