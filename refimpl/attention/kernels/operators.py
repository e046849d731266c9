"""The Triton kernels as PyTorch operators, so that autograd, fake tensors, torch.compile and the tracker see them.

A kernel that is just launched is invisible to all of these: they see operators. Each operator here has a fake kernel,
which gives the shapes and strides of its results without computing them, and the forward has a formula for autograd.
The backward is two operators: what an operator allocates inside is not seen, and Δ, 4 bytes a row, is in memory while
dQ, dK and dV are computed.

    refimpl::attention_forward     q, k, v, sinks → out, lse2               kept for backward: all of these
    refimpl::attention_delta       out, dO, d_lse2 → Δ
    refimpl::attention_backward    dO, q, k, v, lse2, Δ → dq, dk, dv

The kernels' modules are imported at the first launch: Triton decides when it is imported whether it interprets.
"""

import math

import torch
from torch import Tensor

from ...common import interpreter
from ..call.arguments import empty_outputs, refuse_second_derivative
from ..scores import sink_gradient

LIBRARY = "refimpl"
MAX_STRIDE = 2**23  # elements, of rows and columns: a kernel addresses a tile of up to 256 of each in 32 bits


def check_interpreter(q):
    """Raise ValueError or RuntimeError for what Triton's interpreter is known to get wrong. Compiled kernels pass."""
    from ..triton_forward import forward_kernel

    interpreter.check_interpreter(forward_kernel, q, (
        "TRITON_INTERPRET=1 came after Triton was imported, which by then had made its kernels for a GPU: set it "
        "before anything imports Triton, at the top of the page or in the shell"),
        "unset the variable: then tiled_attention takes it", "tiled_attention")


@torch.library.custom_op(f"{LIBRARY}::attention_forward", mutates_args=())
def attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None,
                      dropout_p: float, seed: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None,
                      longest: int, longest_k: int, kernel: str = "auto", sinks: Tensor | None = None,
                      softcap: float | None = None, slopes: Tensor | None = None, documents: Tensor | None = None,
                      prefix: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (out_BHTV, lse2_BHT), laid out by `empty_outputs`; lse2 is the base-2 logsumexp of each row, fp32."""
    from .. import triton_forward
    from .tile import Problem, Score

    check_interpreter(q)
    problem = Problem.of(q, k, scale, causal, window, dropout_p, seed, cu_seqlens, cu_seqlens_k, longest, longest_k,
                         Score.of(softcap, slopes, documents, prefix), sinks)
    if kernel in ("hopper", "gluon"):
        from ..triton_hopper import check_suits, module_of

        check_suits(kernel, q, k, v, problem)  # a kernel by name never falls back in silence
        return module_of(kernel).forward(q, k, v, scale=scale, causal=causal, window=window)
    return triton_forward.forward(q, k, v, problem)


@attention_forward.register_fake
def _(q, k, v, *rest):
    return empty_outputs(q, v.shape[-1])


@torch.library.custom_op(f"{LIBRARY}::attention_delta", mutates_args=())
def attention_delta(out: Tensor, d_out: Tensor, d_lse2: Tensor | None) -> Tensor:
    """Return Δ_BHT = rowsum(dO ∘ O), less the logsumexp's own gradient; fp32."""
    from ..triton_backward import delta

    return delta(out, d_out, d_lse2)


@attention_delta.register_fake
def _(out, d_out, d_lse2):
    return out.new_empty(out.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{LIBRARY}::attention_backward", mutates_args=())
def attention_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor, scale: float,
                       causal: bool, window: int | None, dropout_p: float, seed: Tensor | None,
                       cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, longest: int, longest_k: int,
                       softcap: float | None = None, slopes: Tensor | None = None, documents: Tensor | None = None,
                       prefix: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_BHTD, dk_BGSD, dv_BGSV), with the memory layout of q, k and v."""
    from ..triton_backward import backward
    from .tile import Problem, Score

    return backward(d_out, q, k, v, lse2, delta, Problem.of(
        q, k, scale, causal, window, dropout_p, seed, cu_seqlens, cu_seqlens_k, longest, longest_k,
        Score.of(softcap, slopes, documents, prefix)))


@attention_backward.register_fake
def _(d_out, q, k, v, *rest):
    # the layout of q: a transposed one stays transposed
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs, output):
    q, k, v, *options, _, sinks, softcap, slopes, documents, prefix = inputs
    scale, causal, window, dropout_p, seed, cu_seqlens, cu_seqlens_k, *longest = options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks, seed, cu_seqlens, cu_seqlens_k, slopes, documents, prefix)
    ctx.options, ctx.longest, ctx.softcap = (scale, causal, window, dropout_p), longest, softcap


def _differentiate(ctx, d_out, d_lse2):
    q, k, v, out, lse2, sinks, seed, cu_seqlens, cu_seqlens_k, *score = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out  # the logsumexp alone was used
    if max(d_out.stride()[2:]) >= MAX_STRIDE:
        d_out = d_out.contiguous()
    delta = attention_delta(out, d_out, d_lse2)  # an operator of its own, so that trackers see Δ
    d_sinks = None if sinks is None else sink_gradient(sinks, lse2 * math.log(2), delta).to(sinks.dtype)
    return *attention_backward(d_out, q, k, v, lse2, delta, *ctx.options, seed, cu_seqlens, cu_seqlens_k, *ctx.longest,
                               ctx.softcap, *score), *[None] * 10, d_sinks, *[None] * 4


def _refuse(ctx, *gradients):
    refuse_second_derivative("flash_attention")


attention_forward.register_autograd(_differentiate, setup_context=_keep)
attention_delta.register_autograd(_refuse)  # a second derivative would be wrong without a word
attention_backward.register_autograd(_refuse)
