"""A causal window over ranks: each takes the keys that its queries see from the ranks before it, and no others.

    rank r has tokens rT … (r+1)T − 1, and sees keys from rT − W on: of the rank d places before it the last
    min(T, W − (d−1)T) tokens, and nothing of those further away

So a rank sends W tokens of keys, where a ring sends (N−1)T, and computes T·W pairs. In backward the keys are fetched
again, and the gradients of those that came go back to where they came from.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from ..common.marks import mark
from .inner_attention import compact


def window_attention(q_BHTD, k_BGTD, v_BGTD, comm, pair, window, scale):
    """Return this rank's part of causal attention with a window, in plain order. See `ring_attention`."""
    return _Window.apply(q_BHTD, k_BGTD, v_BGTD, comm, pair, window, scale)


def hops(T, window, N):
    """List how many tokens the rank d places before gives, for d = 1, 2, …"""
    far = min(N - 1, math.ceil(window / T))
    return [min(T, window - d * T) for d in range(far)]


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, pair, window, scale):
        ctx.comm, ctx.pair, ctx.options = comm, pair, {"causal": True, "scale": scale, "window": window}
        with torch.autocast(q.device.type, enabled=False):  # as in a ring
            out, lse = pair.forward(q, *_keys_seen(ctx, k, v), **ctx.options)
        out = out.to(q.dtype)
        ctx.save_for_backward(*compact(q, k, v), out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = ctx.pair.backward(d_out, q, *_keys_seen(ctx, k, v), out, lse, **ctx.options)
            found = _sent_back(ctx, torch.stack((dk, dv)).to(lse.dtype), k.shape[2])
        return dq.to(q.dtype), found[0].to(k.dtype), found[1].to(v.dtype), None, None, None, None


def _keys_seen(ctx, k, v):
    """Return (k, v) of the tokens that this rank's queries see, in order."""
    comm, T = ctx.comm, k.shape[2]
    comm.order.begin("window", k.shape, k.dtype, label=f"keys and values, {ctx.options['window']}")
    own = mark(torch.stack((k, v)), "communication")
    parts, arriving = [own], []
    for back, count in enumerate(hops(T, ctx.options["window"], comm.world_size), 1):
        last = own[..., T - count :, :].contiguous()
        arriving.append(comm.send_recv(last, (comm.rank + back) % comm.world_size, last,
                                       (comm.rank - back) % comm.world_size, async_op=True, label="keys and values"))
    for back, each in enumerate(arriving, 1):
        came = each.wait()
        if back <= comm.rank:  # else it went around: it is of later tokens
            parts.insert(0, came)
    return torch.cat(parts, dim=3).unbind(0)


def _sent_back(ctx, gradients, T):
    """Return dK and dV of this rank's keys, (2, B, G, T, D): of its own queries, and of those behind it. `gradients`:
    of all keys that its queries see."""
    comm = ctx.comm
    total, end, arriving = gradients[..., -T:, :].contiguous(), gradients.shape[3] - T, []
    for back, count in enumerate(hops(T, ctx.options["window"], comm.world_size), 1):
        mine = gradients[..., end - count : end, :] if back <= comm.rank else torch.zeros_like(total[..., :count, :])
        end -= count
        arriving.append((count, comm.send_recv(mine.contiguous(), (comm.rank - back) % comm.world_size, mine,
                                               (comm.rank + back) % comm.world_size, async_op=True,
                                               label="their gradients")))
    for back, (count, each) in enumerate(arriving, 1):
        came = each.wait()
        if comm.rank + back < comm.world_size:
            total[..., T - count :, :] += came
    return total
