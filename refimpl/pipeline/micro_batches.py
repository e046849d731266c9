"""A batch on its way into a pipeline: cut into micro-batches, weighted by their targets, the same on all ranks."""

import hashlib
import math

import torch


def tensors_of(batch):
    """Return a batch, a tensor or several, as a tuple. TypeError or ValueError for anything else."""
    tensors = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"the batch holds {type(x).__name__}: expected tensors, with the rows in dim 0")
    if not tensors or any(x.dim() == 0 or x.shape[0] != tensors[0].shape[0] for x in tensors):
        raise ValueError(f"tensors of shapes {', '.join(str(tuple(x.shape)) for x in tensors) or 'none'}: expected one "
                         "number of rows in all, dim 0")
    return tensors


def cut(batch, m):
    """Cut a batch into m micro-batches, tuples of views: of ⌈rows/m⌉ rows first, then one row fewer."""
    return list(zip(*(x.tensor_split(m) for x in tensors_of(batch)), strict=True))


def count_targets(*targets, ignore_index=-100):
    """Count the terms of a micro-batch's mean loss: integers other than `ignore_index`, or all floating-point numbers
    of the last tensor."""
    last = targets[-1]
    return last.numel() if last.is_floating_point() else int((last != ignore_index).sum())


def weights_of(targets, count=None, total=None):
    """Return [n_k / n of each micro-batch]. ValueError if no target counts.

    `total`: a function from the number of this rank's targets to n, by default the same number. Where gradients are
    averaged over N ranks of other rows or tokens, n is the number of all their targets, divided by N.
    """
    counts = [(count or count_targets)(*each) for each in targets]
    n = sum(counts) if total is None else total(sum(counts))
    if not n or not all(0 <= each < math.inf for each in counts):
        raise ValueError(f"micro-batches have {counts} targets: expected one or more in the batch; those of −100 do "
                         "not count")
    return [each / n for each in counts]


def check_batch(comm, schedule, first, last, inputs, targets):
    """Return a key of this step's shapes, after all ranks have told each other theirs: 24 bytes from each.

    `first`, `last`: whether this rank has the first stage, and the last. Raises ValueError on all ranks if a batch that
    is needed is missing, if ranks have different numbers of rows, or fewer than micro-batches.
    """
    rows, texts = [], []
    for needed, batch in ((first, inputs), (last, targets)):
        found = tensors_of(batch) if batch is not None else ()
        missing = 0 if needed else -1
        rows.append(found[0].shape[0] if found else missing)
        texts += [f"{tuple(x.shape)} {x.dtype} {x.requires_grad}" for x in found]
    digest = int.from_bytes(hashlib.sha256("\n".join(texts).encode()).digest()[:7], "big")  # 7 bytes fit an int64
    mine = torch.tensor([[*rows, digest]])
    everyones = comm.host().all_gather(mine, label="the shapes of a batch")
    if not comm.has_others:  # a rank alone, in a dry run
        return (digest,)
    everyones = everyones.tolist()
    _check_rows(dict(zip(comm.ranks, (each[:2] for each in everyones), strict=True)), schedule)
    return tuple(each[2] for each in everyones)


def _check_rows(everyones, schedule):
    for rank, each in everyones.items():
        for what, rows in zip(("inputs", "targets"), each, strict=True):
            if rows == 0:
                raise ValueError(f"rank {rank} has no {what}, and has the {'first' if what == 'inputs' else 'last'} "
                                 f"stage: give it train_step({what}=…), with at least one row")
    found = {rank: max(each) for rank, each in everyones.items()}
    numbers = {rows for each in everyones.values() for rows in each if rows > 0}
    if len(numbers) > 1:
        raise ValueError(f"ranks have batches of different numbers of rows, {found} (−1: none): expected one batch, "
                         "the same on all ranks")
    if min(numbers) < schedule.micro_batches:
        raise ValueError(f"{min(numbers)} rows for {schedule.micro_batches} micro-batches: expected one row or more in "
                         "each; use a schedule with fewer micro-batches")
