"""Attention over gathered keys and values: a rank has its queries, and all keys while it computes.

    forward      all_gather k, v        attention of own queries
    backward     all_gather k, v        attention again, its gradients        reduce_scatter dK, dV

Between the two it keeps q, k and v of its own tokens. So any attention function can be used, and its own autograd: what
that would keep of all keys, it keeps for the time of one backward. This is the context parallelism of Llama 3 ("The
Llama 3 Herd of Models", 2024, section 3.3.2), which keeps the gathered keys for backward; here they are gathered again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ..model import softmax_attention
from .inner_attention import call, check_dropout, check_shapes, compact
from .token_order import by_rank, check_order, in_order, spans

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


@torch._disable_dynamo
def gathered_attention(q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, comm: "Communicator", *,
                       causal: bool = False, order: str = "plain",
                       attention: Callable[..., torch.Tensor] = softmax_attention, window: int | None = None,
                       cu_seqlens: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
                       dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
    """Return attention of this rank's T tokens over those of all N ranks, (B, H, T, D).

    - `attention`: any (q, k, v) -> out, with the options that are given. With `causal` it needs an option of that name,
      aligned bottom-right: the last query sees every key. It runs again in backward.
    - `causal`, `order`: which tokens are before which; see `token_order`.
    - `window`: with `causal`, how many tokens before it a token sees, besides itself.
    - `cu_seqlens`: packed sequences, in positions of the whole sequence: a list, 0 and where each one ends.

    - `sinks`: (H,), learned, if the attention has that option: one more input with a gradient, of this rank's tokens.

    A rank sends (N−1)/N of the bytes of all k and v in forward and again in backward, and then (N−1)/N of those of
    their gradients (fp32 or wider). ValueError for dropout, a window that is not causal, and an odd T in zig-zag order.
    """
    check_shapes(q_BHTD, k_BGTD, v_BGTD)
    check_dropout(dropout_p)
    check_order(order)
    if window is not None and not causal:
        raise ValueError(f"window={window!r} without causal=True over gathered keys: a query in the middle would need "
                         "a mask that is aligned to neither end; use ulysses_attention")
    pieces = _pieces(comm, q_BHTD.shape[2], causal, order, window, cu_seqlens)
    return _Gathered.apply(q_BHTD, k_BGTD, v_BGTD, sinks, comm, order, pieces, attention, causal, options)


def _pieces(comm, T, causal, order, window, cu_seqlens):
    """Return [(rows, keys, options), …]: slices of the T queries here and of all keys, each one call of attention."""
    if not causal and cu_seqlens is None:
        return [(slice(0, T), slice(0, T * comm.world_size), {})]
    pieces, row = [], 0
    for first, end in spans(comm.rank, comm.world_size, T, order):
        rows = slice(row, row + end - first)
        row = rows.stop
        begin, options = 0, {}
        if window is not None:
            begin, options = max(0, first - window), {"window": window}
        if cu_seqlens is None:
            pieces.append((rows, slice(begin, end), options))
        else:
            keys, packing = _packing(first, end, cu_seqlens, causal)
            pieces.append((rows, keys, options | packing))
    return pieces


def _packing(first, end, cu_seqlens, causal):
    """Return (keys, options) of queries first … end − 1 of packed sequences: where the sequences that they are of begin
    and end, among these queries and among the keys that they see."""
    ends = [int(each) for each in cu_seqlens]
    here = [(a, b) for a, b in zip(ends, ends[1:], strict=False) if a < end and b > first]
    begin, last = here[0][0], end if causal else here[-1][1]
    queries = [max(a, first) - first for a, _ in here] + [end - first]
    keys = [a - begin for a, _ in here] + [last - begin]
    return slice(begin, last), {"cu_seqlens": queries, "cu_seqlens_k": keys}


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, comm, order, pieces, attention, causal, options):
        ctx.save_for_backward(*compact(q, k, v), *[] if sinks is None else [sinks])
        ctx.given = comm, order, pieces, attention, causal, options
        ctx.autocast = torch.is_autocast_enabled(q.device.type)  # backward computes the forward again, as it was
        return _computed(q, *_gather(k, v, comm, order), sinks, *ctx.given[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        (q, k, v, *sinks), (comm, order, *how) = ctx.saved_tensors, ctx.given
        inputs = [x.detach().requires_grad_() for x in (q, *_gather(k, v, comm, order), *sinks)]
        with torch.enable_grad(), torch.autocast(q.device.type, enabled=ctx.autocast):  # a graph for this one backward
            out = _computed(*inputs, *[] if sinks else [None], *how)
        dq, dk, dv, *d_sinks = torch.autograd.grad(out, inputs, d_out)
        del inputs, out  # all ranks' keys, before the sum needs room
        return dq, *_scatter(dk, dv, comm, order), *(d_sinks or [None]), *[None] * 6


def _computed(q, k, v, sinks, pieces, attention, causal, options):
    """Call the attention for each piece of the queries."""
    options = options if sinks is None else {**options, "sinks": sinks}
    outs = [call(attention, q[:, :, rows], k[:, :, keys], v[:, :, keys], causal, **options, **own)
            for rows, keys, own in pieces]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _gather(k, v, comm, order):
    """Return all ranks' keys and values in the order of the sequence: a view (2, B, G, S, D)."""
    rows = torch.stack((k, v)).permute(3, 0, 1, 2, 4).contiguous()  # (T, 2, B, G, D): tokens first, so that ranks join
    every = in_order(comm.all_gather(rows, label="keys and values"), comm.world_size, order, 0)
    return every.permute(1, 2, 3, 0, 4)


def _scatter(dk, dv, comm, order):
    """Sum the gradients of all keys over ranks; return (dk, dv) of this rank's."""
    wide = torch.promote_types(dk.dtype, torch.float32)  # parts of N ranks are added up: not in 16 bits
    rows = by_rank(torch.stack((dk, dv)).permute(3, 0, 1, 2, 4).to(wide), comm.world_size, order, 0)
    mine = comm.reduce_scatter(rows.contiguous(), label="their gradients")
    return mine.to(dk.dtype).permute(1, 2, 3, 0, 4)
