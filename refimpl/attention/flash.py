"""FlashAttention by Triton kernels where they run, and the bytes that it takes."""

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..common.derivatives import refuse_transforms
from ..common.interpreter import new_enough
from .call.arguments import INSTEAD, check_kernel, check_tensors, resolve, resolve_packed
from .kernels.operators import MAX_STRIDE, attention_forward
from .reference import AttentionBytes, resolve_shapes
from .scores import as_kernels_take, hook_of
from .tiled import tiled_attention

if TYPE_CHECKING:
    from .scores import ScoreHook

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HAS_TRITON = importlib.util.find_spec("triton") is not None  # at import, since torch.compile cannot trace find_spec


def flash_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *, causal: bool = False,
                    window: int | None = None, scale: float | None = None, dropout_p: float = 0.0,
                    seed: int | None = None, cu_seqlens: torch.Tensor | None = None,
                    cu_seqlens_k: torch.Tensor | None = None, max_seqlen: int | None = None,
                    max_seqlen_k: int | None = None, score: "ScoreHook | None" = None,
                    sinks: torch.Tensor | None = None, return_logsumexp: bool = False, kernel: str = "auto") -> Any:
    """Compute `reference_attention` by Triton kernels: same arguments, same result, same dropout mask for the same
    seed. Autograd keeps the output and one fp32 logsumexp per row; backward computes the weights again, and gives the
    same bits in every run.

    The kernels run on CUDA from compute capability 8.0 on, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1
    before Triton is first imported; slow, for learning and tests). Elsewhere, on CUDA for fp64, and for a hook in
    `score` that is a class of yours, `tiled_attention` does the same in PyTorch.

    - `cu_seqlens`: as a list, its values are known. A tensor on CUDA is read by the host, which waits for the device;
      with `max_seqlen` (and `max_seqlen_k`, by default the same) given it is not, nor under torch.compile or in a dry
      run. Then the device checks it, and an error ends the process as a failed device assertion does.
    - `kernel`: which forward: "triton" (loads through pointers, on any GPU), "hopper" (tensor descriptors, compute
      capability 9.0), "gluon" (the same with barriers by hand: the fastest on an H200), or "auto": "triton" where the
      kernels run, and `tiled_attention` elsewhere. The backward is the same for all.

    Raises as the reference does; ValueError for bfloat16 in the interpreter, for a stride of rows or columns of
    2²³ elements and more, and for a `kernel` by name that cannot compute this call; RuntimeError for "gluon" with
    a Triton that lacks it, for forward-mode derivatives, under torch.func's grad and the like, and where its backward
    would be differentiated.
    """
    check_kernel(kernel)  # an unknown name is refused even where no kernel runs
    packing = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "max_seqlen": max_seqlen,
               "max_seqlen_k": max_seqlen_k}
    options = {"causal": causal, "window": window, "scale": scale, "dropout_p": dropout_p, "seed": seed, "score": score,
               "sinks": sinks}
    check_tensors(q_BHTD, k_BGSD, v_BGSV)
    hooks = as_kernels_take(hook_of(score))  # without one four Nones; None: one that kernels do not know
    if not kernels_run_on(q_BHTD.device) or q_BHTD.dtype not in KERNEL_DTYPES or hooks is None:
        if kernel != "auto":
            # another bad argument is named first, as everywhere
            resolve(q_BHTD, k_BGSD, v_BGSV, **options, **packing)
            raise ValueError(f"kernel={kernel!r} for {q_BHTD.dtype} on {q_BHTD.device}: Triton's kernels take float16, "
                             "bfloat16 and float32 on CUDA (capability 8.0 on), or on a CPU with TRITON_INTERPRET=1 "
                             f"set before Triton is imported, and of hooks (score={score}) those of "
                             "refimpl.attention.scores, a softcap first; kernel='auto' takes tiled_attention elsewhere")
        return tiled_attention(q_BHTD, k_BGSD, v_BGSV, **options, **packing, return_logsumexp=return_logsumexp)
    given = [x for x in (q_BHTD, k_BGSD, v_BGSV, sinks) if isinstance(x, torch.Tensor)]
    # An operator would silently take a tensor with a tangent for a constant. It computes right under vmap.
    refuse_transforms("flash_attention", INSTEAD, given, ["Grad"] * any(x.requires_grad for x in given))
    call, packed = resolve_packed(q_BHTD, k_BGSD, v_BGSV, options, packing)
    check_for_kernels(q_BHTD, k_BGSD, v_BGSV)
    seed = call.seed
    if seed is not None and not isinstance(seed, torch.Tensor):
        # the operator takes a tensor, so that a seed drawn on the device stays there
        seed = torch.full((), seed, dtype=torch.int64, device=q_BHTD.device)
    out_BHTV, lse2_BHT = attention_forward(q_BHTD, k_BGSD, v_BGSV, call.scale, causal, window, float(dropout_p), seed,
                                           *packed, kernel, *(x.contiguous() if isinstance(x, torch.Tensor) else x
                                                              for x in (sinks, *hooks)))
    return (out_BHTV, lse2_BHT * math.log(2)) if return_logsumexp else out_BHTV  # from base 2, in which kernels count


def kernels_run_on(device):
    """Tell whether Triton's kernels run on `device`: a GPU that is new enough, or a CPU that interprets them."""
    return HAS_TRITON and (device.type == "cuda" and new_enough(device)
                           or device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def check_for_kernels(q_BHTD, k_BGSD, v_BGSV):
    """Raise ValueError for tensors that the reference supports and the kernels do not."""
    for x in (q_BHTD, k_BGSD, v_BGSV):
        if max(x.stride()[2:]) >= MAX_STRIDE:
            raise ValueError(f"a tensor of strides {x.stride()}: expected less than {MAX_STRIDE:,} elements from row "
                             "to row and from column to column; .contiguous() gives a tensor that fits")
    if q_BHTD.shape[1] * v_BGSV.shape[3] >= MAX_STRIDE:
        raise ValueError(f"{q_BHTD.shape[1]} heads of {v_BGSV.shape[3]}: expected less than {MAX_STRIDE:,} elements in "
                         "one row of the output; move heads to the batch")


def flash_attention_bytes(q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype = torch.float32, *,
                          v_dim: int | None = None, causal: bool = False, window: int | None = None,
                          dropout_p: float = 0.0, sinks: Any = None) -> AttentionBytes:
    """Predict the AttentionBytes of `flash_attention`'s kernels for shapes (B, H, T, D) and (B, G, S, D), exact. With
    elements of e bytes and V the head_dim of v (`v_dim`, by default D):

        kept   e·BHT·V + 4·BHT                          the output and its logsumexp
        peak   kept + e·BHT·D + e·BGS·(D + V) + 4·BHT   dQ, dK and dV; Δ

    so the slope in the sequence length is 1. Tiles are not counted: they are on the chip. Hooks take nothing, masks
    included. With dropout a seed takes 8 bytes more; `sinks` (their dtype, if there are any) a gradient of H elements,
    and while it is summed two more logsumexps in place of dQ, dK and dV. FlashAttention-2 (Dao 2023), algorithms 1 and
    2. Raises as `flash_attention` does.
    """
    _, (e, _) = resolve_shapes(q_shape, k_shape, dtype, v_dim=v_dim, causal=causal, window=window, dropout_p=dropout_p)
    if dtype not in KERNEL_DTYPES:
        raise ValueError(f"dtype={dtype}: expected float16, bfloat16 or float32; other dtypes are tiled_attention's")
    (B, H, T, D), (G, S), V = q_shape, k_shape[1:3], v_dim or q_shape[3]
    rows, kept = 4 * B * H * T, e * B * H * T * V + 4 * B * H * T + 8 * (dropout_p > 0)
    gradients = e * B * H * T * D + e * B * G * S * (D + V)
    if sinks is not None:
        # the sinks' gradient is summed before dQ, dK and dV are there
        gradients = max(gradients + H * sinks.itemsize, 2 * rows + 4 * H * (sinks != torch.float32))
    return AttentionBytes(kept, kept + gradients + rows)
