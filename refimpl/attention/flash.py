"""FlashAttention by Triton kernels where they run, and the bytes that it takes."""

import importlib.util
import math
import os

import torch
from torch.autograd.forward_ad import unpack_dual

from .call.arguments import check_kernel, resolve
from .kernels.operators import MAX_STRIDE, attention_forward
from .reference import AttentionBytes, resolve_shapes
from .tiled import tiled_attention

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HAS_TRITON = importlib.util.find_spec("triton") is not None  # at import, since torch.compile cannot trace find_spec


def flash_attention(q_BHTD, k_BGSD, v_BGSD, *, causal=False, window=None, scale=None, dropout_p=0.0, seed=None,
                    cu_seqlens=None, cu_seqlens_k=None, return_logsumexp=False, kernel="auto"):
    """Compute `reference_attention` by Triton kernels: same arguments, same result, same dropout mask for the same
    seed. Autograd keeps the output and one fp32 logsumexp per row; backward computes the weights again, and gives the
    same bits in every run.

    The kernels run on CUDA, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1 before Triton is first
    imported; slow, for learning and tests). Elsewhere, and on CUDA for fp64, `tiled_attention` does the same in
    PyTorch. Under torch.compile give `cu_seqlens` as lists: the values of a tensor are not known there.

    - `kernel`: which forward: "triton" (loads through pointers, on any GPU), "hopper" (tensor descriptors, compute
      capability 9.0), "gluon" (the same with barriers by hand), or "auto": the fastest that a GPU has proven with this
      version of Triton and that agrees with "triton" on this device (`hopper/fast_path.py`). The backward is the same
      for all.

    Raises as the reference does; ValueError for bfloat16 in the interpreter, for a stride of rows or columns of
    2²³ elements and more, and for a `kernel` by name that cannot compute this call; RuntimeError for forward-mode
    derivatives, and where its backward would be differentiated.
    """
    check_kernel(kernel)
    call = resolve(q_BHTD, k_BGSD, v_BGSD, causal=causal, window=window, scale=scale, dropout_p=dropout_p, seed=seed,
                   cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    if not kernels_run_on(q_BHTD.device) or q_BHTD.dtype not in KERNEL_DTYPES:
        if kernel != "auto":
            raise ValueError(f"kernel={kernel!r} for {q_BHTD.dtype} on {q_BHTD.device}: Triton's kernels take float16, "
                             "bfloat16 and float32 on CUDA, or on a CPU where TRITON_INTERPRET=1 is set before Triton "
                             "is imported; kernel='auto' takes tiled_attention elsewhere")
        return tiled_attention(q_BHTD, k_BGSD, v_BGSD, causal=causal, window=window, scale=scale, dropout_p=dropout_p,
                               seed=call.seed, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k,
                               return_logsumexp=return_logsumexp)
    check_for_kernels(q_BHTD, k_BGSD, v_BGSD)
    seed = call.seed
    if seed is not None and not isinstance(seed, torch.Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=q_BHTD.device)
    out_BHTD, lse2_BHT = attention_forward(q_BHTD, k_BGSD, v_BGSD, call.scale, causal, window, float(dropout_p), seed,
                                           *_packing(call, cu_seqlens is not None, q_BHTD.device), kernel)
    return (out_BHTD, lse2_BHT * math.log(2)) if return_logsumexp else out_BHTD


def _packing(call, packed, device):
    """Return (cu_seqlens, cu_seqlens_k, longest, longest_k) for the operators: None, None, 0, 0 if nothing is
    packed."""
    if not packed:
        return None, None, 0, 0
    spans = [[sequence[which] for sequence in call.sequences] for which in (0, 1)]
    starts = [torch.tensor([0, *(end for _, end in which)], dtype=torch.int32, device=device) for which in spans]
    return *starts, *(max(end - first for first, end in which) for which in spans)


def kernels_run_on(device):
    """Tell whether Triton's kernels run on `device`: on CUDA, and on a CPU in a process that interprets them."""
    return HAS_TRITON and (device.type == "cuda" or device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def check_for_kernels(q_BHTD, k_BGSD, v_BGSD):
    """Raise ValueError or RuntimeError for tensors that the reference supports and the kernels do not."""
    for x in (q_BHTD, k_BGSD, v_BGSD):
        if max(x.stride()[2:]) >= MAX_STRIDE:
            raise ValueError(f"a tensor of strides {x.stride()}: expected less than {MAX_STRIDE:,} elements from row "
                             "to row and from column to column; .contiguous() gives a tensor that fits")
        if unpack_dual(x).tangent is not None:  # an operator would silently treat it as a constant
            raise RuntimeError("flash_attention has no forward-mode derivative (torch.func.jvp): use "
                               "reference_attention or memory_efficient_attention")
    if q_BHTD.shape[1] * q_BHTD.shape[3] >= MAX_STRIDE:
        raise ValueError(f"{q_BHTD.shape[1]} heads of {q_BHTD.shape[3]}: expected less than {MAX_STRIDE:,} elements in "
                         "one row of the output; move heads to the batch")


def flash_attention_bytes(q_shape, k_shape, dtype=torch.float32, *, causal=False, window=None, dropout_p=0.0):
    """Predict the AttentionBytes of `flash_attention`'s kernels for shapes (B, H, T, D) and (B, G, S, D), exact. With
    Q = BHTD and K = BGSD elements of e bytes:

        kept   e·Q + 4·BHT                    the output and its logsumexp
        peak   kept + e·(Q + 2K) + 4·BHT      dQ, dK and dV; Δ

    so the slope in the sequence length is 1. Tiles are not counted: they are on the chip. With dropout a seed takes 8
    bytes more. FlashAttention-2 (Dao 2023), algorithms 1 and 2. Raises as `flash_attention` does.
    """
    _, (e, _) = resolve_shapes(q_shape, k_shape, dtype, causal=causal, window=window, dropout_p=dropout_p)
    if dtype not in KERNEL_DTYPES:
        raise ValueError(f"dtype={dtype}: expected float16, bfloat16 or float32; other dtypes are tiled_attention's")
    (B, H, T, D), (G, S) = q_shape, k_shape[1:3]
    Q, K, rows, seed = B * H * T * D, B * G * S * D, 4 * B * H * T, 8 * (dropout_p > 0)
    kept = e * Q + rows + seed
    return AttentionBytes(kept, kept + e * (Q + 2 * K) + rows)
