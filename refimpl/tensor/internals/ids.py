"""Checks of token ids: inside the vocabulary, and the same on all ranks. A CPU raises at once. A GPU is not waited for:
a wrong id ends its program with an assertion, as an index out of bounds does in torch's own kernels. And which rows and
columns a rank has."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...comm import CollectiveMismatch

INTEGERS = (torch.int64, torch.int32)


def check_ids(ids, V, what, ignore_index=None):
    """Raise IndexError, by name, for an id outside 0 … V − 1 that is not `ignore_index`; TypeError for other dtypes."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in INTEGERS:
        raise TypeError(f"{what} are {getattr(ids, 'dtype', type(ids).__name__)}: expected a tensor of ids in int64 or "
                        "int32")
    inside = (ids >= 0) & (ids < V)
    if ignore_index is not None:
        inside |= ids == ignore_index
    if not _all(inside, f"{what}: an id is outside the vocabulary of {V}"):
        apart = "" if ignore_index is None else f", or ignore_index={ignore_index}"
        raise IndexError(f"{what} hold {ids[~inside][0].item()}: the vocabulary is 0…{V - 1}{apart}")


def check_same(found, expected, comm):
    """Raise CollectiveMismatch if `found`, the target + 1 that the owner of each target sent, is not `expected`, this
    rank's own. If ranks have different targets, at least one of them sees it."""
    same = found == expected
    if not _all(same, "targets differ between the ranks of a tensor-parallel group"):
        row = int(same.logical_not().nonzero()[0])
        raise CollectiveMismatch(
            f"{comm.place} has other targets than the rest of its group: {int((~same).sum())} rows "
            f"of {len(same)} differ, the first is row {row}. Ranks that split a vocabulary compute with the same "
            "batch: give them the same tokens and targets", [comm.ranks[comm.rank]])


def local_rows(ids, first, end):
    """Return (the row of each id in the part first … end − 1, or some row of it; whether the id is elsewhere)."""
    elsewhere = (ids < first) | (ids >= end)
    return (ids - first).clamp_(0, end - first - 1), elsewhere  # some row that is there: the caller masks what it gives


def check_columns(logits, comm, V, part):
    """Raise TypeError or ValueError unless `logits` have the columns of this rank's part, (first, end)."""
    first, end = part
    if not logits.is_floating_point():
        raise TypeError(f"logits are {logits.dtype}: expected a floating-point dtype")
    if logits.dim() == 0 or logits.shape[-1] != end - first:
        raise ValueError(f"logits {tuple(logits.shape)}: expected {end - first} columns, {first} … {end - 1} of {V}, "
                         f"on {comm.place}")


def refuse_second_derivatives(what):
    """Raise RuntimeError in a backward under `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"create_graph=True for {what}: its gradients have no graph. For second derivatives, "
                           "compute with the whole vocabulary on each rank")


def refuse_again(plan):
    """Raise RuntimeError if there is no plan any more: a first backward has overwritten the logits."""
    if plan is None:
        raise RuntimeError("backward a second time through a loss whose first gradient was written over its logits "
                           "(overwrite=True, as a GPT's): compute the loss again, or from the logits")


def _all(holds, message):
    """Return whether all of `holds` is true. On a GPU return True: the GPU asserts it when it gets there."""
    if isinstance(holds, FakeTensor) or holds.is_meta:
        return True
    if holds.is_cuda:
        torch._assert_async(holds.all(), message)
        return True
    return bool(holds.all())
