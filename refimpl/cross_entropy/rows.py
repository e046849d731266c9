"""The loss and the gradient of a few rows of logits, in the rows' own memory.

    z = softcap · tanh(logits / softcap)            if there is a softcap, else the logits
    m = max z      Σ = Σ_j exp(z_j − m)      lse = m + log Σ
    loss = lse − (1 − ε) z_t − ε/V Σ_j z_j + λ lse²                              ε label_smoothing, λ z_loss
    gradient of z_j = (1 + 2 λ lse) exp(z_j − m) / Σ − (1 − ε) [j = t] − ε/V
    gradient of logit j = gradient of z_j · (1 − tanh²)                          with a softcap

Label smoothing: "Rethinking the Inception Architecture" (Szegedy et al. 2016), section 7. z-loss: "PaLM" (Chowdhery et
al. 2022), section 5. Softcap: "Gemma 2" (2024), section 2.
"""

import math
from typing import NamedTuple

import torch

from ..comm import CollectiveMismatch
from ..common.nested_tensors import is_dry


class Terms(NamedTuple):
    """What the loss is made of, beside the logits and the targets."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def check(self):
        """Raise ValueError for a number out of its range."""
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing!r}: expected a number from 0 to 1")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss!r}: expected a finite number of at least 0")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap!r}: expected a finite number above 0, or None for no softcap")


class VocabularyColumns(NamedTuple):
    """Which columns of the logits are here: first … first + v − 1 of V. With `comm`, other ranks have the others.

    `comm` is a Communicator: `all_reduce(x, op, out=x, label=…)` with op "sum" and "max", `rank` and `world_size`.
    """

    first: int
    v: int
    V: int
    comm: object = None

    @classmethod
    def of(cls, comm, v, V):
        """Return the columns of this rank. ValueError if v is not the number of rows that rank r of n holds, rows
        r·V//n … (r+1)·V//n − 1, or not all of V without ranks."""
        if comm is None:
            if V not in (None, v):
                raise ValueError(f"vocabulary={V!r} without comm, and weight has {v} rows: expected the Communicator "
                                 "of the ranks that split the vocabulary, or neither")
            return cls(0, v, v)
        if not isinstance(V, int) or V < comm.world_size:
            raise ValueError(f"vocabulary={V!r}: expected the whole vocabulary's size, at least {comm.world_size}, "
                             "when comm is given")
        first, end = (rank * V // comm.world_size for rank in (comm.rank, comm.rank + 1))
        if end - first != v:
            raise ValueError(f"weight has {v} rows on {comm.place}: expected {end - first}, "
                             f"rows {first} … {end - 1} of {V}")
        return cls(first, v, V, comm)

    def reduce(self, x, op, label):
        """Combine x over the ranks, in place."""
        if self.comm is not None:
            self.comm.all_reduce(x, op, out=x, label=label)
        return x

    def find(self, targets):
        """Return (the column of each target here, or some column; whether it is elsewhere)."""
        if self.comm is None:
            return targets.clamp(0, self.v - 1).long(), None  # gather needs a column even of an ignored target
        elsewhere = (targets < self.first) | (targets >= self.first + self.v)
        return (targets - self.first).clamp_(0, self.v - 1).long(), elsewhere


def part_factors(targets, scales, reduction, ignore_index, dtype):
    """Return (what the rows of each part are multiplied by at first (K,), a power of two for the rest, in the end).

    A mean's 1/n would make the gradients of fp16 vanish in forward, where the caller's loss scale is not known yet. So
    its mantissa, 0.5 to 1, comes first, and in backward its power of two, which rounds nothing.
    """
    factors = torch.tensor(scales, dtype=dtype, device=targets[0].device)
    if reduction == "sum":
        return factors, factors.new_ones(())
    counts = torch.stack([(each != ignore_index).sum() for each in targets]).clamp_(min=1)
    most = counts.amax()
    mantissa, exponent = torch.frexp(most.to(dtype).reciprocal_())
    return factors.mul_(most).div_(counts).mul_(mantissa), torch.ldexp(torch.ones_like(mantissa), exponent)


def row_losses(z_RV, targets_R, terms, columns, scale, gradient):
    """Return the rows' losses (R,) times `scale`, 0 where the target is ignored; overwrite the logits.

    `z_RV`: logits, in fp32 or fp64. If `gradient` is true, they become their own gradient, times `scale`, a tensor of
    one number. Else they are of no use afterwards.
    """
    slope_RV = None
    if terms.softcap is not None:
        z_RV.div_(terms.softcap).tanh_()
        slope_RV = z_RV.square().neg_().add_(1) if gradient else None
        z_RV.mul_(terms.softcap)
    ignored_R = targets_R == terms.ignore_index
    column_R, elsewhere_R = columns.find(targets_R)
    m_R = columns.reduce(z_RV.amax(1), "max", "maximum of logits")
    z_RV.sub_(m_R[:, None])
    # one all_reduce for all of these
    sums = z_RV.new_empty((2 + bool(terms.label_smoothing) + (columns.comm is not None), len(z_RV)))
    torch.gather(z_RV, 1, column_R[:, None], out=sums[1][:, None])
    if terms.label_smoothing:
        torch.sum(z_RV, 1, out=sums[2])
    torch.sum(z_RV.exp_(), 1, out=sums[0])  # in place: the logits are of no use any more
    if columns.comm is not None:
        exchange(sums, targets_R, elsewhere_R, ignored_R, columns)
    scale_R = scale.expand(len(z_RV)).masked_fill(ignored_R, 0)
    log_R = sums[0].log()
    loss_R = log_R.sub(sums[1], alpha=1 - terms.label_smoothing)
    if terms.label_smoothing:
        loss_R.sub_(sums[2], alpha=terms.label_smoothing / columns.V)
    if terms.z_loss:
        lse_R = m_R.add_(log_R)
        loss_R.addcmul_(lse_R, lse_R, value=terms.z_loss)
    if gradient:
        _to_gradient(z_RV, slope_RV, sums[0], m_R, column_R, elsewhere_R, scale_R, terms, columns.V)
    # Where the target is ignored the loss may be anything, even NaN.
    return loss_R.mul_(scale_R).masked_fill_(ignored_R, 0)


def _to_gradient(z_RV, slope_RV, sum_R, lse_R, column_R, elsewhere_R, scale_R, terms, V):
    """Turn exp(z − m) into the gradient of the logits, in place."""
    weight_R = torch.div(scale_R, sum_R)
    if terms.z_loss:
        weight_R.mul_(lse_R.mul_(2 * terms.z_loss).add_(1))
    z_RV.mul_(weight_R[:, None])
    if terms.label_smoothing:
        z_RV.sub_(scale_R[:, None], alpha=terms.label_smoothing / V)
    target_R = torch.mul(scale_R, terms.label_smoothing - 1, out=weight_R)
    if elsewhere_R is not None:
        target_R.masked_fill_(elsewhere_R, 0)
    z_RV.scatter_add_(1, column_R[:, None], target_R[:, None])  # no one-hot matrix of (R, V)
    if slope_RV is not None:
        z_RV.mul_(slope_RV)


def exchange(sums, targets_R, elsewhere_R, ignored_R, columns):
    """Sum over the ranks what each found in its columns; the last row tells whether all have the same targets."""
    sums[1].masked_fill_(elsewhere_R, 0)
    sums[-1].copy_(targets_R + 1).masked_fill_(elsewhere_R | ignored_R, 0)  # + 1: a target of 0 must differ from none
    columns.reduce(sums, "sum", "sums of the loss")
    if is_dry(sums) or not columns.comm.has_others:
        return
    same = sums[-1] == (targets_R + 1).masked_fill_(ignored_R, 0)
    if sums.is_cuda:
        torch._assert_async(same.all(), "targets differ between the ranks that split a vocabulary")
    elif not same.all():
        comm, row = columns.comm, int(same.logical_not().nonzero()[0])
        raise CollectiveMismatch(
            f"{comm.place} has other targets than the rest of its group: {int((~same).sum())} rows "
            f"of {len(same)} differ, the first is row {row}. Ranks that split a vocabulary compute with the same "
            "batch: give them the same hidden states and targets", [comm.ranks[comm.rank]])
