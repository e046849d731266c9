"""Block-sparse attention as operators of PyTorch: what torch.compile, trackers and autograd see.

    refimpl::sparse_attention_forward     q, k, v, lists → out, lse2
    refimpl::sparse_attention_backward    dO, q, k, v, lse2, Δ, lists → dq, dk, dv

Δ is `attention_delta` of the dense ones. Lists are the BlockLists of a mask, each in one tensor.
"""

import torch
from torch import Tensor

from ..call.arguments import empty_outputs, refuse_second_derivative
from .operators import LIBRARY, MAX_STRIDE, attention_delta, check_interpreter


@torch.library.custom_op(f"{LIBRARY}::sparse_attention_forward", mutates_args=())
def sparse_attention_forward(q: Tensor, k: Tensor, v: Tensor, by_query: Tensor, by_key: Tensor, words: Tensor,
                             block: int, batch: int, heads: int, scale: float,
                             softcap: float | None = None, slopes: Tensor | None = None,
                             documents: Tensor | None = None, prefix: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (out_BHTV, lse2_BHT), laid out by `empty_outputs`; lse2 is the base-2 logsumexp of each row, fp32."""
    from .. import triton_block_sparse

    check_interpreter(q)
    problem = triton_block_sparse.SparseProblem.of(by_query, by_key, words, block, (batch, heads), (
        q.shape[2], k.shape[2]), scale, (softcap, slopes, documents, prefix))
    return triton_block_sparse.forward(q, k, v, problem)


@sparse_attention_forward.register_fake
def _(q, k, v, *rest):
    return empty_outputs(q, v.shape[-1])


@torch.library.custom_op(f"{LIBRARY}::sparse_attention_backward", mutates_args=())
def sparse_attention_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor,
                              by_query: Tensor, by_key: Tensor, words: Tensor, block: int, batch: int, heads: int,
                              scale: float, softcap: float | None = None, slopes: Tensor | None = None,
                              documents: Tensor | None = None,
                              prefix: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_BHTD, dk_BGSD, dv_BGSV), with the memory layout of q, k and v."""
    from .. import triton_block_sparse

    problem = triton_block_sparse.SparseProblem.of(by_query, by_key, words, block, (batch, heads), (
        q.shape[2], k.shape[2]), scale, (softcap, slopes, documents, prefix))
    return triton_block_sparse.backward(d_out, q, k, v, lse2, delta, problem)


@sparse_attention_backward.register_fake
def _(d_out, q, k, v, *rest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs, output):
    q, k, v, by_query, by_key, words, *ctx.options, slopes, documents, prefix = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, by_query, by_key, words, slopes, documents, prefix)


def _differentiate(ctx, d_out, d_lse2):
    q, k, v, out, lse2, *lists, slopes, documents, prefix = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out  # the logsumexp alone was used
    if max(d_out.stride()[2:]) >= MAX_STRIDE:
        d_out = d_out.contiguous()
    delta = attention_delta(out, d_out, d_lse2)
    return *sparse_attention_backward(d_out, q, k, v, lse2, delta, *lists, *ctx.options, slopes, documents,
                                      prefix), *[None] * 11


def _refuse(ctx, *gradients):
    refuse_second_derivative("block_sparse_attention")


sparse_attention_forward.register_autograd(_differentiate, setup_context=_keep)
sparse_attention_backward.register_autograd(_refuse)
