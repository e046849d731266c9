"""The conjugate functions: what goes between ranks where a split computation begins and where it ends.

    where               forward          backward
    enter               identity         all_reduce        f of Megatron-LM: every rank needs x, and has a part of dx
    leave               all_reduce       identity          f̄: every rank has a part of y
    enter_sequence      all_gather       reduce_scatter    g of Korthikanti et al.: as f, of x that is cut by tokens
    leave_sequence      reduce_scatter   all_gather        ḡ: as f̄, and y is cut by tokens

The two of a pair are conjugate: the backward of one is the forward of the other. An all_reduce is a reduce_scatter and
an all_gather, so a pair sends as many bytes with sequence parallelism as without: forward and backward together, each
rank sends 4 · (N−1)/N times the bytes of x.

"Megatron-LM" (Shoeybi et al. 2019), section 3; "Reducing Activation Recomputation in Large Transformer Models"
(Korthikanti et al. 2022), section 4.2.2.
"""

import torch
from torch.autograd.function import once_differentiable


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)  # no copy: every rank has x

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return ctx.comm.all_reduce(dx), None  # not in place: autograd may add this dx to another


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, comm):
        ctx.mark_dirty(y)  # the sum may go over y: backward of the product that made it reads its inputs alone
        return comm.all_reduce(y, out=y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return dy, None


class _EnterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, tokens):
        ctx.comm, ctx.shape = comm, x.shape
        return whole_sequence(x, comm, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return sequence_sum(dx, ctx.comm).view(ctx.shape), None, None


class _LeaveSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, comm):
        ctx.comm, ctx.tokens = comm, y.shape[:-1]
        return sequence_sum(y, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return whole_sequence(dy, ctx.comm, ctx.tokens), None


def enter(x, comm):
    """Return x, which is the same on all ranks, for each rank's part of a computation. Any shape."""
    return _Enter.apply(x, comm)


def leave(y, comm):
    """Return the sum of y over the ranks, in y's own memory. Any shape."""
    return _Leave.apply(y, comm)


def enter_sequence(x, comm, tokens):
    """Return the tokens of all ranks, (*tokens, C), from this rank's rows x, (1, n, C); see `rows_of`."""
    return _EnterSequence.apply(x, comm, tokens)


def leave_sequence(y, comm):
    """Return this rank's rows, (1, n, C), of the sum of y, (…, C), over the ranks."""
    return _LeaveSequence.apply(y, comm)


# --- tokens in rows ------------------------------------------------------------------------------------------------


def rows_of(tokens, world_size):
    """Count the rows of a rank: all tokens (B, T) one after the other, cut in N equal parts, the last one padded."""
    return -(-tokens.numel() // world_size)


def whole_sequence(x, comm, tokens, **options):
    """Gather rows (1, n, C) to (*tokens, C). With async_op=True return a function that waits for them."""
    shape = (*tokens, x.shape[-1])
    handle = comm.all_gather(x.reshape(-1, x.shape[-1]), **options)

    def landed(rows):
        return rows[: tokens.numel()].view(shape)  # without what pads the last rank

    if options.get("async_op"):
        return lambda: landed(handle.wait())
    return landed(handle)


def sequence_sum(y, comm, **options):
    """Sum y (…, C) over the ranks, and return this rank's rows (1, n, C). With async_op=True return a function that
    waits for them."""
    rows, C = y.reshape(-1, y.shape[-1]), y.shape[-1]
    missing = rows_of(y.shape[:-1], comm.world_size) * comm.world_size - len(rows)
    if missing:
        # Chunks of a reduce_scatter are equal; zeros change no sum.
        rows = torch.cat([rows, rows.new_zeros(missing, C)])
    mine = rows.new_empty(1, len(rows) // comm.world_size, C)
    handle = comm.reduce_scatter(rows, out=mine[0], **options)

    def wait():
        handle.wait()
        return mine

    return wait if options.get("async_op") else mine


def own_rows(x, comm):
    """Return this rank's rows (1, n, C) of tokens (…, C) that all ranks have: a copy, as a view would keep them all."""
    rows, n = x.reshape(-1, x.shape[-1]), rows_of(x.shape[:-1], comm.world_size)
    mine = rows[comm.rank * n : (comm.rank + 1) * n]
    return torch.cat([mine, mine.new_zeros(n - len(mine), x.shape[-1])]).unsqueeze(0)
