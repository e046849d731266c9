"""Saves the shards that the ranks hold to disk; any stage on any number of ranks loads them.

    rank-00000.safetensors …  each rank's shards: pieces of parameters (of their fp32 masters, if they have any) and of
                              the optimizer's state, each flat: elements first … end − 1; and the states of torch's
                              random number generators on its CPU and GPU
    rest.safetensors          rank 0's buffers and whole frozen parameters, if there are any; at stage 3 frozen
                              parameters are in shards, and in the ranks' files
    manifest.json             a description of the model, the optimizer and its param groups, the step, which elements
                              of which parameter are in which file, and the bytes and SHA-256 of each file and of itself

Together they have Ψ · (4 + 8) bytes with Adam in fp32, at every stage and on any number of ranks, and headers;
`closed_forms.saved_bytes` counts those, too.

Each rank writes its files to a new folder and syncs them and the folder. When all ranks have, rank 0 writes the
manifest under a temporary name, syncs it, and renames it. Then the previous saved state is removed. So after

    any rank is killed, or the power fails, at any moment    the previous saved state or the new one is whole
    a full disk, or another error on one rank                the previous one is whole; all ranks raise, and can go on
    a flipped bit, a truncated or missing file               `load` names the file before it changes anything
    an error while whole files are read                      all ranks raise; the engine is partly loaded: load again

Training continues to the bit after `load`: parameters, masters, the optimizer's state, step and hyper-parameters are
those that were saved, on any number of ranks; random numbers are, on the number of ranks that saved. All ranks have to
see one file system. Nothing is unpickled. One piece is read or written at a time, so no copy of everything is made.
"""

import errno
import hashlib
import json
from pathlib import Path

import torch

from ...comm.texts import gather_results
from ..internals.consistency import check_phase
from . import manifest as manifests
from .coverage import REST, check_coverage, check_header, check_inside, expected_in, file_of, readable
from .description import describe, differences, listed, set_hyperparameters
from .durable import sync_folder, widest_first, write_tensors
from .form import MANIFEST, mismatch
from .manifest import SavedStateError
from .optimizer_state import elements, load_targets, merge_states, state_of, states_of
from .rest import frozen_pieces, rest_of, rest_targets

# --- save ------------------------------------------------------------------------------------------------------------


def save(engine, directory):
    """Save the state of `engine` in `directory`, in place of one that is there. All ranks call it, between steps.

    RuntimeError on all ranks if there are gradients: they would be lost. TypeError for an optimizer whose state cannot
    be cut into pieces. If a rank fails (OSError for a full disk), it raises that, and the others a RankError naming it.
    """
    comm, directory = engine.comm, Path(directory)
    check_phase(comm, "save", engine._steps, engine._micro_batches)
    first = comm.rank == 0
    check_no_gradients(engine, "save")
    states = merge_states(gather_results(comm, lambda: describe(engine) and states_of(engine)))
    name = gather_results(comm, lambda: manifests.begin(directory, engine._steps) if first else None)[0]
    files = gather_results(comm, lambda: _write(engine, directory / name))
    gather_results(comm, lambda: _commit(engine, directory, name, states, files) if first else None)
    gather_results(comm, lambda: manifests.remove_others(directory, name) if first else None)


def check_no_gradients(engine, doing):
    """Raise RuntimeError on all ranks if one has gradients; `doing` names the caller for the message."""
    def check():
        if engine._micro_batches or engine._gradients:
            raise RuntimeError(f"{doing} after {engine._micro_batches} micro-batches of a step, and their gradients "
                               "would be lost: call engine.step() or engine.zero_grad() first")
    gather_results(engine.comm, check)


def _write(engine, folder):
    """Write and sync this rank's files; return {name: {"bytes", "sha256"}}."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}, which rank 0 has made, is not there: save to a file system that all ranks "
                                "share")
    named = list(_pieces(engine)) + list(_generators(engine.comm.device).items())
    about = {file_of(engine.comm.rank): _write_named(folder / file_of(engine.comm.rank), named)}
    if engine.comm.rank == 0 and (rest := rest_of(engine)):
        about[REST] = _write_named(folder / REST, rest.items())
    sync_folder(folder)
    return about


def _write_named(path, named):
    named = widest_first(named, lambda item: item[1].dtype)
    return write_tensors(path, [(name, x.dtype, x.shape) for name, x in named], (x for _, x in named))


def _pieces(engine):
    """Yield (name, flat tensor) of each piece that this rank saves: of the parameter, and of its optimizer state."""
    for pairs in engine._owned_pieces().values():
        for piece, own in pairs:
            yield f"parameters/{piece.slot.name}", elements(own, own, piece)
            for key, kind in state_of(engine, piece, own).items():
                if "value" not in kind:
                    yield f"optimizer/{key}/{piece.slot.name}", elements(engine.optimizer.state[own][key], own, piece)
    for piece, part in frozen_pieces(engine):
        yield f"frozen/{piece.slot.name}", part


def _generators(device):
    found = {"rng/cpu": torch.get_rng_state()}
    return found | ({"rng/cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _commit(engine, directory, name, states, written):
    """Write the manifest, on rank 0: what all ranks have `written` becomes the saved state."""
    files = {file: about for each in written for file, about in each.items()}
    for rank in range(engine.comm.world_size):
        files[file_of(rank)]["pieces"] = {piece.slot.name: [piece.first, piece.end]
                                          for bucket in (*engine.buckets, *engine.frozen_buckets)
                                          for piece in bucket.pieces(rank)}
    manifests.commit(directory, {"format": manifests.FORMAT, "folder": name, **describe(engine), "states": states,
                                 "files": files})


# --- load ------------------------------------------------------------------------------------------------------------


def load(engine, directory):
    """Load what an engine of any stage, on any number of ranks, with any buckets saved in `directory`. Gradients are
    dropped.

    The optimizer gets the hyper-parameters and the state that were saved, no more and no less: one made without
    momentum goes on with it, one with momentum loses its buffers if none were saved. An optimizer of another class is
    refused, even if it would find all that it needs (SGD in AdamW's state).

    SavedStateError on all ranks, before anything is changed: for a manifest or a file that is missing, truncated or
    damaged, which it names; for elements that are in no file or in two; for another model, optimizer, param groups or
    format, with what differs. `description` says how parameters of 16 bits are loaded.
    """
    comm, directory = engine.comm, Path(directory)
    check_phase(comm, "load", engine._steps, engine._micro_batches)
    manifest = _read(comm, directory)
    validate_on_all(comm, lambda: _check(engine, directory, manifest))
    engine.zero_grad()
    gather_results(comm, lambda: _restore(engine, directory / manifest["folder"], manifest))
    engine._steps = manifest["step"]
    engine._after_load()


def _read(comm, directory):
    """Read the manifest; all ranks have to read the same one."""
    manifest = None

    def work():
        nonlocal manifest
        manifest = manifests.read(directory)
        return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()

    if len(set(validate_on_all(comm, work))) > 1:
        raise SavedStateError(f"ranks read different files at {directory / manifests.NAME}: load from a file system "
                              "that all ranks share, while nobody saves there")
    return manifest


def validate_on_all(comm, check):
    """Call `check()` on each rank and return [its result on each rank]. If it raises SavedStateError on one rank, all
    ranks raise that."""
    def work():
        try:
            return None, check()
        except SavedStateError as error:
            return str(error), None
    answers = gather_results(comm, work)
    for error, _ in answers:
        if error:
            raise SavedStateError(error)
    return [answer for _, answer in answers]


def _check(engine, directory, manifest):
    """Check that the manifest is whole, the model the same, and the files as they were written. Each rank checks a part
    of the files."""
    path = directory / manifests.NAME
    if wrong := mismatch(manifest, MANIFEST) or check_coverage(manifest):
        raise SavedStateError(f"{path} is damaged: {wrong}")
    folder = directory / manifest["folder"]
    if found := differences(manifest, describe(engine)):
        raise SavedStateError(f"{path} does not fit this engine: {listed(found)}")
    generators = _generators(engine.comm.device)
    for number, (file, about) in enumerate(sorted(manifest["files"].items())):
        if number % engine.comm.world_size == engine.comm.rank:
            check_inside(directory, folder / file)
            manifests.verify(folder / file, about)
            expected, may_have = expected_in(manifest, file), set() if file == REST else {"rng/cpu", "rng/cuda"}
            if may_have and manifest["world_size"] == engine.comm.world_size:  # then they are loaded
                expected["rng/cpu"] = "uint8", generators["rng/cpu"].shape
            check_header(folder / file, expected, may_have - expected.keys())


@torch.no_grad()
def _restore(engine, folder, manifest):
    """Read the pieces that this rank holds, one slice of one file at a time."""
    set_hyperparameters(engine, manifest["groups"])
    wanted = load_targets(engine, manifest["states"])
    rest = rest_of(engine)
    wanted |= rest_targets(engine, rest)
    for file, about in manifest["files"].items():
        pieces = {name: span for name, span in about.get("pieces", {}).items() if name in wanted}
        with _open(folder / file) as stored:
            for name, (begin, end) in pieces.items():
                _copy(stored, name, begin, end, *wanted[name])
            for name in stored.keys() if file == REST else ():
                piece, targets = wanted[name]
                for target in targets.values():
                    target.copy_(stored.get_tensor(name).reshape(-1)[piece.first : piece.end])
    for name, tensor in rest.items():
        if not tensor.is_contiguous():  # its target was a copy
            tensor.copy_(wanted[name][1]["frozen"].view(tensor.shape))
    if manifest["world_size"] == engine.comm.world_size:
        _restore_generators(engine.comm, folder)


def _open(path):
    return readable(path, lambda error: OSError(errno.EIO, f"{error}; the engine is partly loaded: load again",
                                                str(path)))


def _copy(stored, name, begin, end, piece, targets):
    """Copy from a stored piece, elements begin … end − 1 of a parameter, the elements that belong to `piece`."""
    first, last = max(begin, piece.first), min(end, piece.end)
    if first < last:
        for key, target in targets.items():
            target[first - piece.first : last - piece.first].copy_(
                stored.get_slice(f"{key}/{name}")[first - begin : last - begin])


def _restore_generators(comm, folder):
    with _open(folder / file_of(comm.rank)) as stored:
        torch.set_rng_state(stored.get_tensor("rng/cpu"))
        if comm.device.type == "cuda" and "rng/cuda" in stored.keys():
            torch.cuda.set_rng_state(stored.get_tensor("rng/cuda"), comm.device)
