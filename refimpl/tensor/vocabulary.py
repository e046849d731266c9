"""The vocabulary split over the ranks of a tensor-parallel group: its parts, logits and cross-entropy.

"Megatron-LM" (Shoeybi et al. 2019), section 3. With a vocabulary of V tokens, the logits of N tokens are (N, V). Rank r
of n holds columns r·V//n … (r+1)·V//n − 1 of them, and the same rows of the embedding (`embedding.py`):

    cross-entropy    loss = log Σ exp(z − m) − (z_t − m), of logits z, their maximum m and the target's z_t. The ranks
                     exchange m, Σ and z_t: a few numbers for each token, instead of V logits

No weight is padded: parts differ by at most one row, so GPT-2's 50,257 = 29 · 1,733 rows fit any number of ranks.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from ..comm.traffic import Traffic, ring_traffic
from .internals.ids import check_columns, check_ids, check_same, local_rows, refuse_again, refuse_second_derivatives

if TYPE_CHECKING:
    from ..comm.communicator import Communicator

CHUNK_BYTES = 64 * 2**20  # of the buffer in which logits are computed in fp32, some rows at a time
REDUCTIONS = ("mean", "sum", "none")


def part(size, comm, name=""):
    """Return (first, end): this rank's part of `size` rows; parts differ by at most one. `comm`: a Communicator, or
    (rank, n). ValueError, with the layer's name, if there are fewer rows than ranks."""
    rank, n = comm if isinstance(comm, tuple) else (comm.rank, comm.world_size)
    if size < n:
        raise ValueError(f"{name and name + ': '}{size} rows cannot be split over {n} ranks: each holds at least one. "
                         "Use fewer ranks")
    return rank * size // n, (rank + 1) * size // n


# --- logits ----------------------------------------------------------------------------------------------------------


def gather_logits(logits, comm, V):
    """Return all logits (…, V) on every rank, from this rank's columns (…, v). ValueError if v is another number.

    Columns travel padded with −inf to the largest part's width. Every rank then computes the same from the result, so
    backward takes this rank's columns of the gradient and communicates nothing.
    """
    check_columns(logits, comm, V, part(V, comm))
    return _GatherLogits.apply(logits, comm, V) if comm.world_size > 1 else logits


class _GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, comm, V):
        ctx.part = part(V, comm)
        return _gathered(logits, comm, V)

    @staticmethod
    def backward(ctx, gradient):
        first, end = ctx.part
        # A copy: a view would keep the gradient of all V.
        return gradient[..., first:end].clone(memory_format=torch.contiguous_format), None, None


def own_features(x, comm):
    """Return this rank's columns of x (…, V), which is the same on all ranks: the conjugate of `gather_logits`."""
    return _OwnFeatures.apply(x, comm) if comm.world_size > 1 else x


class _OwnFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm, ctx.V = comm, x.shape[-1]
        first, end = part(ctx.V, comm)
        return x[..., first:end].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient):
        return _gathered(gradient, ctx.comm, ctx.V), None


def _gathered(columns, comm, V):
    n, widest = comm.world_size, -(-V // comm.world_size)
    padded = F.pad(columns, (0, widest - columns.shape[-1]), value=float("-inf"))  # an all_gather has equal parts
    found = comm.all_gather(padded.unsqueeze(0), label="logits")  # (n, …, widest)
    widths = [end - first for first, end in (part(V, (rank, n)) for rank in range(n))]
    return torch.cat([found[rank, ..., :width] for rank, width in enumerate(widths)], -1)


# --- cross-entropy ---------------------------------------------------------------------------------------------------


@torch._disable_dynamo
def vocabulary_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, comm: "Communicator", V: int, *,
                                      ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
                                      overwrite: bool = False, chunk_bytes: int = CHUNK_BYTES) -> torch.Tensor:
    """Return `F.cross_entropy(all_logits.float(), targets, …)`, on every rank, from this rank's columns (N, v).

        loss = log Σ − (1 − ε) (z_t − m) − ε/V Σ_j (z_j − m),  Σ = Σ_j exp(z_j − m)        ε = label_smoothing
        gradient of z = exp(z − m) / Σ − (1 − ε) onehot − ε/V

    `logits` (N, v): the columns `part(V, comm)`, in fp64, fp32, or a 16-bit type, which is computed in fp32, rows of
    `chunk_bytes` at a time. `targets` (N,): the same on all ranks. The loss is fp32, or fp64; the gradient is of the
    logits' dtype. "mean" divides by the number of targets that are not `ignore_index`. Forward has two all_reduces: m;
    then Σ, z_t − m, the target itself (and the sum of logits if ε > 0) in one. Backward communicates nothing.

    Autograd keeps the caller's logits, m and log Σ: no copy of the logits. Backward takes a gradient as large as the
    logits. `overwrite=True` writes it over the logits, for callers that do not read them later (torch's
    version check raises RuntimeError if an earlier operation saved them).

    Raises IndexError on a CPU for a target outside 0 … V − 1, and CollectiveMismatch if ranks have different targets;
    on a GPU an assertion fails. Raises ValueError for other shapes and options, TypeError for other dtypes, and
    RuntimeError for `create_graph=True`.
    """
    check_columns(logits, comm, V, part(V, comm))
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: expected (N, v) and (N,)")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r}: expected a number from 0 to 1")
    check_ids(targets, V, "targets", ignore_index)
    options = _LossOptions(comm, V, ignore_index, label_smoothing, overwrite, chunk_bytes)
    losses = _SplitCrossEntropy.apply(logits, targets, options)
    if reduction == "none":
        return losses
    return losses.sum() / (targets != ignore_index).sum() if reduction == "mean" else losses.sum()


class _LossOptions(NamedTuple):
    """Holds what the loss is given besides tensors."""

    comm: object
    V: int
    ignore_index: int
    smoothing: float
    overwrite: bool
    chunk_bytes: int

    def onehot(self, targets, dtype):
        """Return (column of each target here, 1 where the target is in this rank's part and counts, what is ignored)"""
        local, elsewhere = local_rows(targets, *part(self.V, self.comm))
        ignored = targets == self.ignore_index
        return local, (elsewhere | ignored).logical_not_().to(dtype), ignored

    def chunks(self, logits, dtype):
        """Yield (first, end) of some rows, and a buffer for these in `dtype`."""
        rows = chunk_rows(*logits.shape, dtype, self.chunk_bytes)
        buffer = logits.new_empty((rows, logits.shape[1]), dtype=dtype)
        for first in range(0, len(logits), rows):
            end = min(first + rows, len(logits))
            yield first, end, buffer[: end - first]


class _SplitCrossEntropy(torch.autograd.Function):
    """Computes the loss of each token, (N,). Ranks sum Σ, z_t − m, t + 1 where column t is, and Σ (z − m) if ε > 0."""

    @staticmethod
    def forward(ctx, logits, targets, plan):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        maximum = logits.amax(1).to(dtype)  # all ranks need one m: their Σ of exp(z − m) are added
        plan.comm.all_reduce(maximum, "max", out=maximum, label="maximum of logits")
        sums = logits.new_zeros((4 if plan.smoothing else 3, len(logits)), dtype=dtype)
        for first, end, z in plan.chunks(logits, dtype):
            torch.sub(logits[first:end], maximum[first:end, None], out=z)
            if plan.smoothing:
                torch.sum(z, 1, out=sums[3, first:end])
            torch.sum(z.exp_(), 1, out=sums[0, first:end])
        z = None  # the buffer is freed, whether there were rows or not
        local, here, ignored = plan.onehot(targets, dtype)
        predicted = logits.gather(1, local.long()[:, None])[:, 0].to(dtype).sub_(maximum)
        sums[1].copy_(predicted.masked_fill_(here == 0, 0))  # one rank has it: the sum over ranks is z_t − m
        torch.mul(here, targets + 1, out=sums[2])  # + 1: token 0 is not taken for no target
        plan.comm.all_reduce(sums, out=sums, label="sums of the loss")
        if plan.comm.has_others:
            check_same(sums[2], (targets + 1).masked_fill_(ignored, 0).to(dtype), plan.comm)
        log_sum = sums[0].log()
        loss = log_sum - (1 - plan.smoothing) * sums[1]
        if plan.smoothing:
            loss.sub_(sums[3], alpha=plan.smoothing / plan.V)
        ctx.plan = plan
        # Softmax is computed from these again: no second (N, v).
        ctx.save_for_backward(logits, targets, maximum, log_sum)
        return loss.masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivatives("vocabulary_parallel_cross_entropy")
        refuse_again(ctx.plan)
        plan, (logits, targets, maximum, log_sum) = ctx.plan, ctx.saved_tensors
        ctx.plan = None if plan.overwrite else plan
        local, here, ignored = plan.onehot(targets, maximum.dtype)
        local, here = local.long(), here.mul_(plan.smoothing - 1)
        scale = gradient.masked_fill(ignored, 0)[:, None]  # an ignored row has loss 0, whatever its logits are
        out = logits.detach() if plan.overwrite else torch.empty_like(logits)
        # In the logits' own dtype it is computed where it stays; a 16-bit gradient in fp32, some rows at a time.
        chunks = [(0, len(out), out)] if out.dtype == maximum.dtype else plan.chunks(logits, maximum.dtype)
        for first, end, z in chunks:
            torch.sub(logits[first:end], maximum[first:end, None], out=z).sub_(log_sum[first:end, None]).exp_()
            # `here` is 0 where another rank has the target.
            z[torch.arange(end - first, device=z.device), local[first:end]] += here[first:end]
            if plan.smoothing:
                z.sub_(plan.smoothing / plan.V)
            z.mul_(scale[first:end])
            if z is not out:
                out[first:end] = z
        return out, None, None


# --- closed forms ----------------------------------------------------------------------------------------------------


class LossBytes(NamedTuple):
    """Bytes above the logits: what autograd keeps for backward, and the peaks of forward and of backward."""

    saved: int
    forward: int
    backward: int


def chunk_rows(N, v, dtype, chunk_bytes=CHUNK_BYTES):
    """Return how many of N rows of v logits are computed at a time."""
    return max(1, min(N, chunk_bytes // (v * dtype.itemsize)))


def vocabulary_loss_bytes(N, v, dtype=torch.float32, *, label_smoothing=0.0, overwrite=False, chunk_bytes=CHUNK_BYTES):
    """Return LossBytes of `vocabulary_parallel_cross_entropy` for N tokens and v columns of logits in `dtype`.

        saved       2Nw                            m and log Σ, w bytes each: 8 of fp64, else 4
        forward     (1 + k)Nw + R·v·w              m, the k = 3 sums (4 with label_smoothing), R rows of logits
        backward    saved + N·v·d + (17 + 2w)N + wR (+ R·v·w if d < w)     the gradient, of d bytes each (0 if
                                                   overwrite); ids and masks; R rows, all N if d = w

    Beside these, a mean's count, loss and gradient are a few bytes. Forward's vectors of ids come after its buffer, and
    are less than it if R·v is more than 12N. F.cross_entropy of all logits takes 2NVw for the same gradient.
    """
    d, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32)
    w, rows = wide.itemsize, chunk_rows(N, v, wide, chunk_bytes)
    saved = 2 * N * w
    forward = (5 if label_smoothing else 4) * N * w + rows * v * w
    backward = saved + (0 if overwrite else N * v * d) + (9 + 2 * w) * N
    backward += (w + 8) * N if d == w else (w + 8) * rows + rows * v * w
    return LossBytes(saved, forward, backward)


def vocabulary_traffic(N, hidden, rank, world_size, *, dtype=torch.float32, label_smoothing=0.0):
    """Return the Traffic (bytes) of `rank` in a step of N tokens: the embedding's all_reduce, N·hidden elements of
    `dtype`, and the loss's two: N maxima, then 3N sums (4N with label_smoothing). Backward sends nothing."""
    w = torch.promote_types(dtype, torch.float32).itemsize
    sizes = [(N * hidden, dtype.itemsize), (N, w), ((4 if label_smoothing else 3) * N, w)]
    return Traffic(all_reduce=sum(ring_traffic("all_reduce", count * each, world_size, rank, each)
                                  for count, each in sizes))
