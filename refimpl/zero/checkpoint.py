"""Checkpoints on disk: written in the shards that the ranks hold, read by any stage on any number of ranks.

    rank-00000.safetensors …  of each rank its share: pieces of parameters (of their fp32 masters, if they have any) and
                              of the optimizer's state, each flat: elements first … end − 1; and the state of its
                              random number generators, torch's of the CPU and of its GPU
    rest.safetensors          frozen parameters and buffers, rank 0's, if there are any
    manifest.json             what the model, the optimizer and its param groups are, the step, and which elements of
                              which parameter are in which file; bytes and SHA-256 of each file, and its own

Bytes of all of them with Adam in fp32: Ψ · (4 + 8) at every stage and on any number of ranks, and headers;
`closed_forms.checkpoint_bytes` counts those, too.

What survives what. A file is written under a name that nobody knows yet, and synced, and its folder, too; when all
files of all ranks are, rank 0 writes the manifest to a temporary name, syncs it, and renames it. The checkpoint before
is removed after that. So

    any rank killed, or the power gone, at any moment     the previous checkpoint or the new one, whole
    a full disk, or another error on one rank             the previous one; all ranks raise, and can go on
    a bit that flips, a file cut short or gone            found before anything is loaded, and the file is named
    an error while files that are whole are read          all ranks raise; the engine is partly loaded: load again

`load` continues to the bit: parameters, masters, the optimizer's state, step and hyper-parameters are those that were
saved, on any number of ranks; the random numbers, too, on as many ranks as saved it. The file system has to be one that
all ranks see. Nothing is unpickled. One piece is on its way at a time: no copy of everything, on either side.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from . import manifest as manifests
from .agreement import agreed, check_phase
from .durable import sync_folder, widest_first, write_tensors
from .manifest import CheckpointError
from .recipe import describe, differences, listed, rest_of, set_hyperparameters
from .states import elements, merged, places, state_of, states_of

REST = "rest.safetensors"


def file_of(rank):
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"


# --- save ------------------------------------------------------------------------------------------------------------


def save(engine, directory):
    """Make `directory` a checkpoint of `engine`; one that is there is replaced. All ranks call it, between steps.

    RuntimeError on all ranks if there are gradients: they would be lost. TypeError for an optimizer whose state cannot
    be cut into pieces. If a rank fails (OSError for a full disk), it raises that, and the others RankError naming it.
    """
    comm, directory = engine.comm, Path(directory)
    check_phase(comm, "save", engine._steps, engine._micro_batches)
    first = comm.rank == 0
    check_no_gradients(engine, "save")
    states = merged(agreed(comm, lambda: describe(engine) and states_of(engine)))
    name = agreed(comm, lambda: manifests.begin(directory, engine._steps) if first else None)[0]
    files = agreed(comm, lambda: _write(engine, directory / name))
    agreed(comm, lambda: _commit(engine, directory, name, states, files) if first else None)
    agreed(comm, lambda: manifests.remove_others(directory, name) if first else None)


def check_no_gradients(engine, doing):
    """RuntimeError on all ranks if one has gradients."""
    def check():
        if engine._micro_batches or engine._gradients:
            raise RuntimeError(f"{doing} after {engine._micro_batches} micro-batches of a step, and their gradients "
                               "would be lost: call engine.step() or engine.zero_grad() first")
    agreed(engine.comm, check)


def _write(engine, folder):
    """This rank's files: {name: bytes and hash}, synced."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}, which rank 0 has made, is not there: save to a file system that all ranks "
                                "share")
    named = list(_share(engine)) + list(_generators(engine.comm.device).items())
    about = {file_of(engine.comm.rank): _write_named(folder / file_of(engine.comm.rank), named)}
    if engine.comm.rank == 0 and (rest := rest_of(engine)):
        about[REST] = _write_named(folder / REST, rest.items())
    sync_folder(folder)
    return about


def _write_named(path, named):
    named = widest_first(named, lambda item: item[1].dtype)
    return write_tensors(path, [(name, x.dtype, x.shape) for name, x in named], (x for _, x in named))


def _share(engine):
    """(name, flat tensor): of each of this rank's pieces the parameter, and the state that is as long."""
    for pairs in engine._shared_out().values():
        for piece, own in pairs:
            yield f"parameters/{piece.slot.name}", elements(own, own, piece)
            for key, kind in state_of(engine, piece, own).items():
                if "value" not in kind:
                    yield f"optimizer/{key}/{piece.slot.name}", elements(engine.optimizer.state[own][key], own, piece)


def _generators(device):
    found = {"rng/cpu": torch.get_rng_state()}
    return found | ({"rng/cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _commit(engine, directory, name, states, written):
    """Rank 0 makes what all ranks have `written` the checkpoint."""
    files = {file: about for each in written for file, about in each.items()}
    for rank in range(engine.comm.world_size):
        files[file_of(rank)]["pieces"] = {piece.slot.name: [piece.first, piece.end] for bucket in engine.buckets
                                          for piece in bucket.pieces(rank)}
    manifests.commit(directory, {"format": manifests.FORMAT, "folder": name, **describe(engine), "states": states,
                                 "files": files})


# --- load ------------------------------------------------------------------------------------------------------------


def load(engine, directory):
    """Make `engine` what was saved in `directory`: any stage, any number of ranks, any sizes of buckets; gradients go.

    An optimizer of the same class has the hyper-parameters and the state that were saved, no more and no less: one made
    without momentum goes on with it, one with momentum loses its buffers to a checkpoint that has none. Of another
    class it is refused, also where it keeps less (SGD for AdamW's): it would go on, but as nothing that was trained.

    CheckpointError on all ranks, before anything is changed, for a manifest or a file that is missing, cut short or
    damaged, naming it; for another model, optimizer, param groups or format, naming what differs. See the head of
    `recipe` for parameters of 16 bits.
    """
    comm, directory = engine.comm, Path(directory)
    check_phase(comm, "load", engine._steps, engine._micro_batches)
    manifest = _read(comm, directory)
    folder = directory / manifest["folder"]
    accepted(comm, lambda: _check(engine, directory, manifest))
    engine.zero_grad()
    agreed(comm, lambda: _restore(engine, folder, manifest))
    engine._steps = manifest["step"]
    engine._loaded()


def _read(comm, directory):
    """The manifest, the same on all ranks."""
    manifest = None

    def work():
        nonlocal manifest
        manifest = manifests.read(directory)
        return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()

    if len(set(accepted(comm, work))) > 1:
        raise CheckpointError(f"ranks read different files at {directory / manifests.NAME}: load from a file system "
                              "that all ranks share, while nobody saves there")
    return manifest


def accepted(comm, check):
    """`agreed`, where a CheckpointError of one rank is one of all."""
    def work():
        try:
            return None, check()
        except CheckpointError as error:
            return str(error), None
    told = agreed(comm, work)
    for error, _ in told:
        if error:
            raise CheckpointError(error)
    return [answer for _, answer in told]


def _check(engine, directory, manifest):
    """Is it this model's, and are its files as they were written? Each rank reads some of them, together all."""
    path, folder = directory / manifests.NAME, directory / manifest["folder"]
    if found := differences(manifest, describe(engine)):
        raise CheckpointError(f"{path} is of something else: {listed(found)}")
    for number, (file, about) in enumerate(sorted(manifest["files"].items())):
        if number % engine.comm.world_size == engine.comm.rank:
            manifests.verify(folder / file, about)
            try:
                with safe_open(folder / file, framework="pt"):
                    pass
            except SafetensorError as error:
                raise CheckpointError(f"{folder / file} is no safetensors file: {error}") from None


@torch.no_grad()
def _restore(engine, folder, manifest):
    """Read what this rank holds, a file and a slice of it at a time."""
    set_hyperparameters(engine, manifest["groups"])
    wanted = places(engine, manifest["states"])
    for file, about in manifest["files"].items():
        pieces = {name: span for name, span in about.get("pieces", {}).items() if name in wanted}
        with safe_open(folder / file, framework="pt") as stored:
            for name, (begin, end) in pieces.items():
                _copy(stored, name, begin, end, *wanted[name])
            if file == REST:
                for name, tensor in rest_of(engine).items():
                    tensor.copy_(stored.get_tensor(name))
    if manifest["world_size"] == engine.comm.world_size:
        _restore_generators(engine.comm, folder)


def _copy(stored, name, begin, end, piece, targets):
    """Of a stored piece, elements begin … end − 1, what belongs to `piece`."""
    first, last = max(begin, piece.first), min(end, piece.end)
    if first < last:
        for key, target in targets.items():
            target[first - piece.first : last - piece.first].copy_(
                stored.get_slice(f"{key}/{name}")[first - begin : last - begin])


def _restore_generators(comm, folder):
    with safe_open(folder / file_of(comm.rank), framework="pt") as stored:
        torch.set_rng_state(stored.get_tensor("rng/cpu"))
        if comm.device.type == "cuda" and "rng/cuda" in stored.keys():
            torch.cuda.set_rng_state(stored.get_tensor("rng/cuda"), comm.device)
