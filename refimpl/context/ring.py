"""Ring attention: keys and values go around behind the computation; outputs of blocks are merged by their logsumexp.

What `papers/ring_attention` does, for any attention with a pair (forward → out and logsumexp; backward for a given
logsumexp), for grouped heads, 16-bit tensors, and attention that is not causal. Outputs and gradients are summed in
fp32 or wider.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable

from ..common.marks import mark
from ..common.nested_tensors import is_dry
from .blockwise_pair import dense_pair
from .inner_attention import check_dropout, check_shapes, compact
from .neighbours import window_attention
from .token_order import check_order

if TYPE_CHECKING:
    from ..comm.communicator import Communicator
    from ..common.attention_pair import AttentionPair


@torch._disable_dynamo
def ring_attention(q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, comm: "Communicator", *,
                   causal: bool = False, order: str = "plain", scale: float | None = None,
                   attention: "AttentionPair" = dense_pair, window: int | None = None,
                   cu_seqlens: torch.Tensor | None = None, softcap: float | None = None,
                   sinks: torch.Tensor | None = None, dropout_p: float = 0.0) -> torch.Tensor:
    """Return attention of this rank's T tokens over those of all N ranks, (B, H, T, D) in q's dtype.

    - `causal`, `order`: which tokens are before which; see `token_order`. In zig-zag order T is even.
    - `attention`: an `AttentionPair`. The default has the T × T matrix of a block in memory.
    - `window`: a token sees so many before it. Then only neighbours send, and `window` tokens alone; see `neighbours`.

    Autograd keeps q, k, v, the output and a logsumexp for each row, of this rank's tokens alone. A rank sends N−1 times
    the bytes of k and v in forward, and in backward; there also N times those of their gradients (fp32 or wider).

    Every rank calls it with as many rows and tokens: one with others is named, as it is for other collectives.
    ValueError for `cu_seqlens`, `softcap` and `sinks`, dropout, a window that is not causal or not in plain order, and
    an odd T in zig-zag order. Liu et al. 2023, section 3.
    """
    if softcap is not None or sinks is not None:
        what = f"softcap={softcap!r}" if softcap is not None else "sinks"
        raise ValueError(f"{what} in ring attention: its pair of functions knows no such option; use "
                         "gathered_attention or ulysses_attention")
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens, packed sequences, in ring attention: a rank has one block of keys at a time, and "
                         "of a pair of blocks it knows only whether one is before the other; use gathered_attention or "
                         "ulysses_attention")
    check_shapes(q_BHTD, k_BGTD, v_BGTD)
    check_dropout(dropout_p)
    check_order(order)
    if window is not None:
        if type(window) is not int or window < 0:
            raise ValueError(f"window={window!r}: expected an int of at least 0, tokens that one sees before it")
        if not causal or order != "plain":
            raise ValueError(f"window={window!r} in ring attention with causal={causal} and order={order!r}: expected "
                             "causal=True and order='plain', in which the keys that a rank sees are its neighbours'; "
                             "use gathered_attention or ulysses_attention")
        return window_attention(q_BHTD, k_BGTD, v_BGTD, comm, attention, window, scale)
    if order == "zig-zag" and q_BHTD.shape[2] % 2:
        raise ValueError(f"{q_BHTD.shape[2]} tokens on a rank in zig-zag order: expected an even number, two chunks")
    return _Ring.apply(q_BHTD, k_BGTD, v_BGTD, comm, attention, {"causal": causal, "scale": scale}, order)


def blocks_seen(r, s, T, causal, order):
    """Return (rows, keys, causal): which of rank r's T queries see which keys of rank s, as slices; None if none does.

    `causal` of the three: whether row i sees keys 0 … i alone, which is so for r = s.
    """
    everything = slice(0, T)
    if not causal or r == s:
        return everything, everything, causal
    if order == "plain":
        return (everything, everything, False) if s < r else None  # later ranks have later tokens alone
    # Chunk s is before r and 2N−1−r, chunk 2N−1−s after both; for s > r chunk 2N−1−r is after both of s.
    return (everything, slice(0, T // 2), False) if s < r else (slice(T // 2, T), everything, False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, pair, options, order):
        ctx.comm, ctx.pair, ctx.options, ctx.order = comm, pair, options, order
        B, H, T, D = q.shape
        out = q.new_zeros(B, T, H, D, dtype=torch.promote_types(q.dtype, torch.float32))
        out = out.transpose(1, 2)  # so that heads are side by side in memory, as the next layer wants them
        lse = out.new_full((B, H, T), -math.inf)  # no key seen yet; the own block comes first, and has one
        with torch.autocast(q.device.type, enabled=False):  # it would round the sums to 16 bits
            for (rows, keys, causal), (k_here, v_here) in _each_block(ctx, q, k, v):
                block = pair.forward(q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys], causal=causal,
                                     scale=options["scale"])
                _merge(out[:, :, rows], lse[:, :, rows], *block)
                del block, k_here, v_here  # before the next keys begin to arrive
        out = out.to(q.dtype)
        ctx.save_for_backward(*compact(q, k, v), out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        travelling = _TravellingGradients(ctx.comm)
        with torch.autocast(q.device.type, enabled=False):
            # Gradients travel N steps, seen or not.
            for seen, (k_here, v_here) in _each_block(ctx, q, k, v, every=True):
                found = None
                if seen is not None:
                    rows, keys, causal = seen
                    found = ctx.pair.backward(d_out[:, :, rows], q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys],
                                              out[:, :, rows], lse[:, :, rows], causal=causal,
                                              scale=ctx.options["scale"])
                    dq[:, :, rows] += found[0]  # dq stays: only keys, and their gradients, go around
                travelling.add(k.shape, lse.dtype, found and (keys, *found[1:]), k.device)
                del found, k_here, v_here
        dk, dv = travelling.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _each_block(ctx, q, k, v, every=False):
    """Yield (what is seen, (k, v)) of each rank's keys and values: first those of this rank, then of the one before,
    and so on. While they are used here, they are on their way to the next rank. `every`: also those that no query
    sees, as (None, (k, v)). In a dry run one of each shape is computed: the others would take the same memory again."""
    done = set() if is_dry(q) else None
    comm, N, r = ctx.comm, ctx.comm.world_size, ctx.comm.rank
    if N > 1:
        comm.order.begin("ring", k.shape, k.dtype, label="keys and values")  # messages alone are not in the order
    kv, arriving = mark(torch.stack((k, v)), "communication") if N > 1 else (k, v), None
    for step in range(N):
        if step < N - 1:
            arriving = _pass_on(comm, kv, "keys and values")
        seen = blocks_seen(r, (r - step) % N, q.shape[2], ctx.options["causal"], ctx.order)
        if done is not None:
            seen = None if repr(seen) in done else seen
            done.add(repr(seen))
        if seen is not None or every:
            yield seen, kv
        kv = None
        kv = arriving.wait() if step < N - 1 else None


def _pass_on(comm, x, label):
    """Begin to send x to the next rank, and to receive as much from the one before. Returns a Handle."""
    N, r = comm.world_size, comm.rank
    return comm.send_recv(x, (r + 1) % N, x, (r - 1) % N, async_op=True, label=label)


def _merge(out, lse, block_out, block_lse):
    """Merge attention over a block of keys into that over others, in place:

        L = ln(e^L_a + e^L_b)        O = e^(L_a − L) O_a + e^(L_b − L) O_b
    """
    new = torch.logaddexp(lse, block_lse)  # no e^L by itself: it overflows
    out.mul_((lse - new).exp_().unsqueeze(-1))
    out.add_(block_out.to(out.dtype).mul_((block_lse - new).exp_().unsqueeze(-1)))
    lse.copy_(new)


class _TravellingGradients:
    """Sums dK and dV of the keys that are here. The sum travels with its keys from rank to rank, and each rank adds its
    part. After N steps the sum is at the rank that has the keys. It travels while the next part is computed."""

    def __init__(self, comm):
        self.comm, self.arriving = comm, None

    def add(self, shape, dtype, part, device):
        """Add (slice of the keys, dk, dv), or nothing if `part` is None, to what has arrived; pass it on."""
        if self.arriving is None:
            total = mark(torch.zeros(2, *shape, dtype=dtype, device=device), "communication")
        else:
            total = self.arriving.wait()
        if part is not None:
            keys, dk, dv = part
            total[0][:, :, keys] += dk
            total[1][:, :, keys] += dv
        self.arriving = _pass_on(self.comm, total, "their gradients") if self.comm.world_size > 1 else _Delivered(total)

    def wait(self):
        """Return (dk, dv) of this rank's keys."""
        return self.arriving.wait()


class _Delivered:
    """Stands for a message from this rank to itself, which has arrived."""

    def __init__(self, x):
        self.x = x

    def wait(self):
        return self.x
