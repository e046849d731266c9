"""Ulysses: between the projections a rank has some of the tokens, and in attention all tokens of some of the heads.

    q, k, v    (B, H, T/N, D)    all_to_all    (B, H/N, T, D)    attention of whole sequences, any function
    out        (B, H/N, T, D)    all_to_all    (B, H, T/N, D)

Backward exchanges the gradients the other way round. What attention keeps is that of H/N heads. "DeepSpeed Ulysses"
(Jacobs et al. 2023), section 3.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ..model import softmax_attention
from .inner_attention import call, check_dropout, check_shapes

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


@torch._disable_dynamo
def ulysses_attention(q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, comm: "Communicator", *,
                      causal: bool = False, attention: Callable[..., torch.Tensor] = softmax_attention,
                      dropout_p: float = 0.0, sinks: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Return attention of this rank's T tokens over those of all N ranks, (B, H, T, D). Tokens are in plain order: with
    heads apart, causal attention is as much work on every rank.

    - `attention`: any (q, k, v) -> out, with the options that are given: `window`, `cu_seqlens` and others.
    - `sinks`: (H,), of all heads, if the attention has that option; it gets those of this rank's.

    Key heads are repeated until N divides them (`repeats`). A rank sends (N−1)/N of the bytes of its q, k, v and output
    in forward, and as much in backward. ValueError if N does not divide the query heads, and for dropout.
    """
    check_shapes(q_BHTD, k_BGTD, v_BGTD)
    check_dropout(dropout_p)
    H, G, N = q_BHTD.shape[1], k_BGTD.shape[1], comm.world_size
    if sinks is not None:
        # Else `repeats` says what is wrong.
        options["sinks"] = sinks[comm.rank * H // N : (comm.rank + 1) * H // N] if H % N == 0 else sinks
    if N == 1:  # no copy, and any number of heads
        return call(attention, q_BHTD, k_BGTD, v_BGTD, causal, **options)
    times = repeats(H, G, N)
    if times > 1:
        k_BGTD, v_BGTD = (x.repeat_interleave(times, dim=1) for x in (k_BGTD, v_BGTD))
    q_BHSD, k_BGSD, v_BGSD = (_ToHeads.apply(x, comm) for x in (q_BHTD, k_BGTD, v_BGTD))
    return _ToTokens.apply(call(attention, q_BHSD, k_BGSD, v_BGSD, causal, **options), comm)


def repeats(heads, kv_heads, world_size):
    """Return how many times each key head is there, so that N ranks have as many of them, with all their query heads:
    the smallest divisor r of H/G for which N divides r · G. ValueError if N does not divide H."""
    H, G, N = heads, kv_heads, world_size
    if H % N:
        raise ValueError(f"{H} query heads on {N} ranks: expected a multiple of {N}, as many heads for each rank; "
                         "use ring_attention, or a smaller group of ranks")
    return next(r for r in range(1, H // G + 1) if H // G % r == 0 and r * G % N == 0)


def to_heads(x_BHTD, comm):
    """Exchange (B, H, T/N, D) for (B, H/N, T, D)."""
    N, (B, H, T, D) = comm.world_size, x_BHTD.shape
    parts = x_BHTD.unflatten(1, (N, H // N)).permute(1, 0, 2, 3, 4)  # (N, B, H/N, T/N, D): a chunk for each rank
    parts = comm.all_to_all(parts.contiguous(), label="tokens for heads")
    return parts.permute(1, 2, 0, 3, 4).reshape(B, H // N, N * T, D)


def to_tokens(x_BHSD, comm):
    """Exchange (B, H/N, T, D) for (B, H, T/N, D)."""
    N, (B, H, S, D) = comm.world_size, x_BHSD.shape
    parts = x_BHSD.unflatten(2, (N, S // N)).permute(2, 0, 1, 3, 4)  # (N, B, H/N, T/N, D)
    parts = comm.all_to_all(parts.contiguous(), label="heads for tokens")
    return parts.permute(1, 3, 0, 2, 4).reshape(B, S // N, N * H, D).transpose(1, 2)  # heads side by side in memory


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return to_heads(x, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return to_tokens(dx, ctx.comm), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return to_tokens(x, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return to_heads(dx, ctx.comm), None
