"""Whether ranks that work on the same rows have the same: a batch cut along the wrong axis trains, and wrongly."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

MISSING = (0, 0)


def check_batch(mesh, tokens, targets):
    """Raise ValueError, on all ranks that differ in tp, cp or pp alone, unless they have the same tokens and targets.

    Each sends 40 bytes: of both tensors the number of elements and a checksum, none for what it was not given.
    """
    group = mesh.get_parallel_group("tp", "cp", "pp")
    if group.world_size == 1:
        return
    mine = [number for x in (tokens, targets) for number in (MISSING if x is None else _sums(x))]
    gathered = group.host().all_gather(torch.tensor([[mesh.comm.rank, *mine]]), label="which batch")
    if isinstance(gathered, FakeTensor):
        return
    gathered = gathered.tolist()
    for what, place in (("tokens", 1), ("targets", 3)):
        given = {each[0]: tuple(each[place : place + 2]) for each in gathered}
        given = {rank: sums for rank, sums in given.items() if sums != MISSING}
        first = min(given, default=None)
        if differ := [rank for rank in given if given[rank] != given[first]]:
            raise ValueError(
                f"{', '.join(map(mesh.describe, differ))} have other {what} than {mesh.describe(first)}, and work on "
                "the same rows, as only dp cuts a batch by rows: batches(…, rank=mesh.here['dp'], world_size=mesh.dp)")


def _sums(x):
    """Return (elements, a checksum that depends on their order)."""
    flat = x.detach().reshape(-1).long()
    # weights: rows that changed places have the same plain sum
    weights = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 % 2**31
    total = (flat * weights).sum()
    return flat.numel(), 0 if isinstance(total, FakeTensor) else int(total)
