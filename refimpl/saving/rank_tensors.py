"""Tensors that belong to one rank alone, such as what it has not sent of compressed gradients: `TrainingState.own`.

They cannot be cut in another way, so they are loaded on as many ranks as have saved them, or left.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..comm.texts import broadcast_text, gather_results
from .coverage import readable
from .manifest import SavedStateError

OWN = "own/"  # before their names in a file


def own_tensors(state):
    """Return {name in a file: tensor} of this rank."""
    return {f"{OWN}{name}": x for name, x in (state.own or {}).items()}


def is_own(name):
    """Tell whether a name in a file is of such a tensor."""
    return name.startswith(OWN)


def names_in(path):
    """Return the names of the tensors in a file. SavedStateError if it is none."""
    with readable(path, lambda error: SavedStateError(f"{path} is no safetensors file: {error}")) as stored:
        return list(stored.keys())


def other_own(state, saved, world_size):
    """Return what is wrong with loading `saved`, what about["own"] said on `world_size` ranks; None if nothing is."""
    here = state.about.get("own")
    if state.own is None or saved == here and (here is None or world_size == state.comm.world_size):
        return None
    return (f"has what each rank keeps for itself of {saved or 'nothing'}, saved on {world_size} ranks; here it is "
            f"{here or 'nothing'}, on {state.comm.world_size}. Load it with the same hook on as many ranks, or leave "
            "what was kept: hook=False")


def gather_own(state):
    """Return {"about", "ranks": [{name: tensor} of each rank]} on rank 0, in host memory; None on the others, and if
    there is none. All ranks call it."""
    host, ranks = state.comm.host(), []
    if not state.own:
        return None
    for rank in range(host.world_size):
        part = {}
        for name, x in state.own.items():
            if host.rank == 0:
                part[name] = host.recv(x.cpu(), rank) if rank else x.cpu().clone()
            elif host.rank == rank:
                host.send(x.cpu(), 0)
        ranks.append(part)
    return {"about": state.about["own"], "ranks": ranks} if host.rank == 0 else None


def scatter_own(state, own, check=False):
    """Give each rank what `gather_own` returned of it; rank 0's `own` counts. All ranks call it. SavedStateError on all
    ranks for that of another hook or of another number of ranks, with `check` before anything is changed."""
    comm, host = state.comm, state.comm.host()

    def wrong():
        if comm.rank:
            return ""
        ranks = own["ranks"] if own else []
        if text := other_own(state, own and own["about"], len(ranks) or comm.world_size):
            return text
        shapes = [{name: list(x.shape) for name, x in each.items()} for each in (*ranks[:1], state.own or {})]
        return "" if not state.own or shapes[0] == shapes[1] else (
            f"has what each rank keeps for itself in shapes {shapes[0]}, here {shapes[1]}: use the same buckets, or "
            "leave what was kept: hook=False")

    if check:
        said = broadcast_text(comm, *gather_results(comm, wrong)[:1])
        if said:
            raise SavedStateError(f"the state_dict {said}")
        return
    mine = {}
    for rank in range(host.world_size if state.own else 0):
        for name, x in state.own.items():
            if host.rank == 0 and rank:
                host.send(own["ranks"][rank][name], rank)
            elif host.rank == rank:
                mine[name] = host.recv(x.cpu(), 0) if rank else own["ranks"][0][name]
    if mine and not any(isinstance(x, FakeTensor) for x in mine.values()):
        with torch.no_grad():
            state.take(mine)
