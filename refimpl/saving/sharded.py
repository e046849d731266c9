"""Saves the shards that the ranks hold to disk. Any number of ranks, cut in any other way, load them.

    rank-00000.safetensors …  what each rank owns, each tensor flat: parameters (their fp32 masters, if they have any),
                              the optimizer's state, what is not trained; and the states of torch's random number
                              generators on its CPU and GPU
    manifest.json             a description of the model, the optimizer and its param groups, the step, which elements
                              of which tensor are in which file, and the bytes and SHA-256 of each file and of itself

A rank that owns several parts of a tensor, of q, k and v in one layer say, writes each by itself: `qkv.weight`,
`qkv.weight..1`, …

Each element is written once, whoever else holds it: together Ψ · (4 + 8) bytes with Adam in fp32, and headers
(`durable.safetensors_bytes`). Each rank writes its file to a new folder and syncs it and the folder. When all ranks
have, rank 0 writes the manifest under a temporary name, syncs it, and renames it. Then the previous saved state is
removed. So after

    any rank is killed, or the power fails, at any moment    the previous saved state or the new one is whole
    a full disk, or another error on one rank                the previous one is whole; all ranks raise, and can go on
    a flipped bit, a truncated or missing file               `load` names the file before it changes anything
    an error while whole files are read                      all ranks raise; the state is partly loaded: load again

Training continues to the bit after `load`: parameters, masters, the optimizer's state, step and hyper-parameters are
those that were saved, on any number of ranks; random numbers are, on the number of ranks that saved. That holds only if
replicas are equal, so a save compares their SHA-256: a sum could be equal by chance, and a rounding of its own on one
rank is the beginning of two different models. Of buffers the owner's count, as those of batch norm differ anyway.

All ranks have to see one file system, or `own_disks` keeps the files of each host on its own. Each host verifies the
files that its ranks read: what one host reads well may be damaged on another. Nothing is unpickled. One group is loaded
and one tensor read or written at a time, so no copy of everything is made.
"""

import contextlib
import errno
import hashlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..comm.texts import gather_results
from ..sharding import overlaps
from . import fetching, own_disks
from . import manifest as manifests
from . import ranks_by_host as of_ranks
from .coverage import file_of, readable
from .description import describe, piece_of, set_hyperparameters
from .durable import make_folder, raw_bytes, sync_folder, widest_first, write_tensors
from .load_checks import check_files, check_manifest, files_read, names_read, states_in, stored_in
from .lock import only_save
from .manifest import SavedStateError
from .optimizer_state import elements, flat, make_state, state_of, tensors_of
from .raise_on_all import validate_on_all
from .rank_tensors import OWN, own_tensors

if TYPE_CHECKING:
    from os import PathLike

    from .training_state import TrainingState

# --- save ------------------------------------------------------------------------------------------------------------


def save(state: "TrainingState", directory: "str | PathLike[str]", shared: bool = True) -> None:
    """Save a `TrainingState` in `directory`, in place of one that is there. All ranks call it, between steps. With
    shared=False hosts see no common folder: `directory` is on each host's own disk (`own_disks`).

    TypeError for an optimizer whose state cannot be cut into pieces. RuntimeError if ranks disagree: in
    hyper-parameters, in the optimizer's state of a tensor, in the values of replicas. ValueError unless each element is
    one rank's. RuntimeError too if another job saves there. If a rank fails (OSError for a full disk), it raises that,
    and the others a RankError naming it.
    """
    comm, directory, first = state.comm, Path(directory), state.comm.rank == 0
    description, reports = describe(state, saving=True)
    with contextlib.ExitStack() as lock:
        if shared:
            name = gather_results(comm, lambda: _begin(directory, state.step, lock) if first else None)[0]
        else:
            description["hosts"] = hosts = of_ranks.hosts_of(comm)
            name, first = own_disks.begin(comm, hosts, directory, state.step, lock), of_ranks.is_first(hosts, comm.rank)
        _save(state, directory, name, description, reports, first)


def _begin(directory, step, lock):
    make_folder(directory)
    lock.enter_context(only_save(directory))
    return manifests.begin(directory, step)


def _save(state, directory, name, description, reports, first):
    """Write on all ranks; then the `first` rank, with shared=False that of each host, makes it the saved state."""
    comm = state.comm
    written = gather_results(comm, lambda: _write(state, directory / name), "save: files that are written")
    _check_replicas(reports, [hashes for _, hashes in written])  # before the manifest: a wrong save replaces nothing
    files = {file_of(rank): {**about, "pieces": report["pieces"]}
             for rank, ((about, _), report) in enumerate(zip(written, reports, strict=True))}
    gather_results(comm, lambda: _commit(directory, name, description, files) if first else None)
    gather_results(comm, lambda: _end(directory, name) if first else None)  # after all hosts have a whole new one


def _end(directory, name):
    """Remove what was saved before; all of the new state is on the disk."""
    manifests.remove_others(directory, name)
    if (directory / name / manifests.NAME).exists():  # it needs none beside the folder
        (directory / manifests.NAME).unlink(missing_ok=True)


def _write(state, folder):
    """Write and sync this rank's file. Return {"bytes", "sha256"} of it, and {shard: {key: SHA-256}} of replicas."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}, which rank 0 has made, is not there: save to a file system that all ranks "
                                "share; or save(…, shared=False) to a disk of each host, all hosts having other names")
    items = [(shard, key, x.dtype) for shard in state.shards if shard.owned is not None or _is_compared(shard)
             for key, x in tensors_of(state, shard).items()]
    items, generators = widest_first(items, lambda item: item[2]), _generators(state.comm.device)
    own = dict(widest_first(own_tensors(state).items(), lambda item: item[1].dtype))
    written = state.written
    specs = [(name, x.dtype, x.shape) for name, x in own.items()]
    specs += [(f"{key}/{written[shard]}", dtype, (shard.owned.numel,)) for shard, key, dtype in items
              if shard in written]
    specs += [(name, x.dtype, x.shape) for name, x in generators.items()]
    hashes = {_named(shard): {"numbers": state_of(state, shard) if shard.own is not None else None}
              for shard in state.shards if _is_compared(shard)}

    def tensors(load):
        yield from own.values()
        for shard, key, _ in items:
            load(shard.group)
            tensor = tensors_of(state, shard)[key]
            if _is_compared(shard):
                # a sum of values could be equal by chance
                hashes[_named(shard)][key] = hashlib.sha256(raw_bytes(tensor)).hexdigest()
            if shard in written:
                yield elements(tensor, shard)
        yield from generators.values()

    with state.one_group() as load:
        about = write_tensors(folder / file_of(state.comm.rank), specs, tensors(load))
    sync_folder(folder)  # the file's name, too, is on the disk before the manifest says so
    return about, hashes


def compare_values(state, reports):
    """Raise RuntimeError, as a save does, if ranks that hold the same elements have other values in them."""
    def hashed():
        found = {}
        with state.one_group() as load:
            for shard in filter(_is_compared, state.shards):
                load(shard.group)
                values = {"parameters": tensors_of(state, shard)["parameters"]} if shard.own is not None else {}
                found[_named(shard)] = {key: hashlib.sha256(raw_bytes(x)).hexdigest() for key, x in values.items()}
        return found

    _check_replicas(reports, gather_results(state.comm, hashed))


def _is_compared(shard):
    return len(shard.spec.replicas) > 1 and shard.kind != "buffers"


def _named(shard):
    """Return the name of a shard and which elements it has, as a key in JSON."""
    return f"{shard.spec.name} {piece_of(shard.spec)}"


def _check_replicas(reports, hashes):
    """Raise RuntimeError if ranks that hold the same elements have other values in them."""
    for report in reports:
        for name, _, piece, replicas in report["replicas"]:
            said = {rank: hashes[rank].get(f"{name} {piece}", {}) for rank in replicas}
            first = said[replicas[0]]
            if keys := [key for key, each in first.items() if any(said[rank].get(key) != each for rank in replicas)]:
                differ = [rank for rank in replicas if said[rank] != first]
                raise RuntimeError(f"{name} is not the same on ranks {replicas}, its replicas: {', '.join(keys)} on "
                                   f"ranks {differ} differ from rank {replicas[0]}'s. Broadcast it from one of them; "
                                   "did all of them reduce its gradient?")


def _generators(device):
    found = {"rng/cpu": torch.get_rng_state()}
    return found | ({"rng/cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _commit(directory, name, description, files):
    """Write the manifest: what all ranks have written becomes the saved state."""
    manifests.commit(directory, {"format": manifests.FORMAT, "folder": name, **description, "files": files})


# --- load ------------------------------------------------------------------------------------------------------------


def load(state: "TrainingState", directory: "str | PathLike[str]", shared: bool | None = None) -> int:
    """Load what any number of ranks, however they cut the model, saved in `directory`; return the step. All ranks call
    it. Afterwards masters are right, and 16-bit parameters not yet rounded from them.

    The optimizer gets the hyper-parameters and the state that were saved, no more and no less: one made without
    momentum goes on with it, one with momentum loses its buffers if none were saved. An optimizer of another class is
    refused, even if it would find all that it needs (SGD in AdamW's state).

    SavedStateError on all ranks, before anything is changed: for a manifest or a file that is missing, truncated or
    damaged, which it names; for elements that are in no file or in two; for another model, optimizer, param groups or
    format, with what differs. `description` says how parameters of 16 bits are loaded.

    What was saved with shared=False is found by itself; a host copies what it lacks from those that have it. With
    shared=False here it also copies parts of a state that one host alone has, whoever saved it.
    """
    comm, directory, hosts = state.comm, Path(directory), of_ranks.hosts_of(state.comm)
    apart = shared is False or shared is None and any(gather_results(comm, lambda: own_disks.is_there(directory)))
    manifest, holders = own_disks.read(comm, hosts, directory) if apart else (_read(comm, directory, hosts), None)
    here, _ = describe(state)
    path = (directory / manifest["folder"] if apart else directory) / manifests.NAME
    validate_on_all(comm, lambda: check_manifest(state, path, manifest, here))
    reads = files_read(state, manifest, hosts)
    moves = fetching.transfers(hosts, holders, reads) if apart else []
    mine = of_ranks.share(() if apart else manifest["files"], fetching.read_here(hosts, reads, moves), hosts, comm.rank)
    folder = directory / manifest["folder"]
    validate_on_all(comm, lambda: check_files(state, path, folder, manifest, mine, hosts))
    with fetching.fetched(comm, hosts, folder, manifest, moves, lambda files: names_read(state, manifest, files)) as at:
        gather_results(comm, lambda: _restore(state, at, manifest), "load: files that are read")
    return manifest["step"]


def _read(comm, directory, hosts):
    """Read the manifest; all ranks have to read the same one."""
    manifest = None

    def work():
        nonlocal manifest
        with of_ranks.naming_host(hosts, comm.rank):
            manifest = manifests.read(directory)
        return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()

    found = gather_results(comm, (directory / manifests.NAME).exists)
    if any(found) and not all(found):
        lacking = of_ranks.tell(comm, [rank for rank, each in enumerate(found) if not each])
        raise SavedStateError(f"{directory / manifests.NAME} is missing on {lacking}, and there on the others: mount "
                              "one folder on all hosts, or load(…, shared=False), which copies what a host lacks")
    if len(set(validate_on_all(comm, work))) > 1:
        raise SavedStateError(f"ranks read different files at {directory / manifests.NAME}: load from a file system "
                              "that all ranks share, while nobody saves there")
    return manifest


@torch.no_grad()
def _restore(state, folder, manifest):
    """Read what this rank holds: a group at a time, of it a file at a time, and one slice of it."""
    set_hyperparameters(state, manifest["groups"])  # first: a state's device depends on capturable and fused
    stored = stored_in(manifest)
    with state.one_group() as load:
        for group, shards in itertools.groupby(state.shards, key=lambda shard: shard.group):
            load(group)
            files = {}
            for shard in shards:
                # before its values are copied: an optimizer without a step has no tensors yet
                make_state(state, shard, manifest["states"].get(shard.spec.name))
                for file, part, spec in stored.get(shard.spec.name, ()):
                    if views := overlaps(shard.spec, spec):
                        files.setdefault(file, []).append((part, views, shard))
            for file, found in files.items():
                with _open(folder / file) as opened:
                    for part, views, shard in found:
                        _copy(opened, part, views, tensors_of(state, shard))
    if manifest["world_size"] == state.comm.world_size:  # other ranks could not go on with these random numbers
        _restore_generators(state.comm, folder)
    if state.own:
        with _open(folder / file_of(state.comm.rank)) as stored:
            state.take({name: stored.get_tensor(f"{OWN}{name}") for name in state.own})


def _open(path):
    return readable(path, lambda error: OSError(errno.EIO, f"{error}; the state is partly loaded: load again",
                                                str(path)))


def _copy(stored, part, views, tensors):
    """Copy the overlaps of a shard and a stored piece, [(View in the shard, View in the piece)]."""
    for key, tensor in tensors.items():
        with flat(tensor) as target:
            for mine, theirs in views:
                read = stored.get_slice(f"{key}/{part}")[theirs.begin : theirs.end]
                mine.of(target).copy_(read.as_strided(theirs.size, theirs.stride))


def _restore_generators(comm, folder):
    with _open(folder / file_of(comm.rank)) as stored:
        for _, device, state in states_in(stored, comm.device):
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
