"""Checks all that a load is going to read, before anything is changed: the manifest, and the files, each by the hosts
whose ranks read it."""

import torch

from ..comm.texts import gather_results
from ..sharding import overlaps
from . import manifest as manifests
from .coverage import check_coverage, check_header, check_inside, expected_in, file_of, readable
from .description import differences, listed, located
from .dtype_names import name_of
from .manifest import SavedStateError
from .rank_tensors import is_own, names_in, other_own, own_tensors
from .ranks_by_host import naming_host
from .schema import MANIFEST, mismatch
from .validity import faults


def check_manifest(state, path, manifest, here):
    """Check that the manifest is whole and the model the same."""
    if wrong := mismatch(manifest, MANIFEST) or check_coverage(manifest):
        raise SavedStateError(f"{path} is damaged: {wrong}")
    if found := differences(manifest, here):
        raise SavedStateError(f"{path} does not fit what is trained here: {listed(found)}")
    if wrong := other_own(state, manifest["about"].get("own"), manifest["world_size"]):
        raise SavedStateError(f"{path} {wrong}")


def files_read(state, manifest, hosts):
    """Return [the files that each rank reads]. On one host all are verified, whoever reads them."""
    if len(set(hosts)) == 1:
        return [list(manifest["files"])] * len(hosts)
    return gather_results(state.comm, lambda: sorted(_parts_read(state, manifest)))


def names_read(state, manifest, files):
    """Return {file: names of the tensors in it that this rank reads} of some files."""
    found = {}
    for file, parts in _parts_read(state, manifest).items():
        if file in files:
            pieces = {part: piece for part, piece in manifest["files"][file]["pieces"].items() if part in parts}
            found[file] = [*expected_in({**manifest, "files": {file: {"pieces": pieces}}}, file)]
            if file == file_of(state.comm.rank):
                found[file] += ["rng/cpu", "rng/cuda", *own_tensors(state)]
    return found


def _parts_read(state, manifest):
    """Return {file: {parts of tensors in it that this rank reads}}."""
    stored, found = stored_in(manifest), {}
    for shard in state.shards:
        for file, part, spec in stored.get(shard.spec.name, ()):
            if overlaps(shard.spec, spec):
                found.setdefault(file, set()).add(part)
    if state.own or manifest["world_size"] == state.comm.world_size:
        found.setdefault(file_of(state.comm.rank), set())
    return found


def stored_in(manifest):
    """Return {name: [(file, name of a part, its ShardSpec)]} of what files have."""
    return located({**manifest["rest"], **manifest["parameters"]},
                   {file: about["pieces"] for file, about in manifest["files"].items()})


def check_files(state, path, folder, manifest, mine, hosts):
    """Check that files in `folder` are as they were written: each rank those of `mine`, on its host. Then that the
    optimizer can have what is in them. `path`: of the manifest."""
    with naming_host(hosts, state.comm.rank):
        for file in mine:
            check_inside(folder.parent, folder / file)
            _check_file(state, folder / file, manifest)
    if found := faults(state.optimizer, manifest):
        raise SavedStateError(f"{path} does not fit what is trained here: {listed(found)}")


def _check_file(state, path, manifest):
    manifests.verify(path, manifest["files"][path.name])
    expected, may_have = expected_in(manifest, path.name), {"rng/cpu", "rng/cuda"}
    expected |= {name: (name_of(x.dtype), x.shape) for name, x in own_tensors(state).items()}
    may_have |= {name for name in names_in(path) if is_own(name) and state.own is None}
    if manifest["world_size"] == state.comm.world_size:  # then they are loaded
        expected["rng/cpu"] = "uint8", torch.get_rng_state().shape
    check_header(path, expected, may_have - expected.keys())
    if manifest["world_size"] == state.comm.world_size:
        _check_generators(state.comm, path)


def states_in(stored, device):
    """Yield (name, device, state) of the generators in a file, as far as this rank has them."""
    for each in dict.fromkeys((torch.device("cpu"), device)):
        if (name := f"rng/{each.type}") in stored.keys():
            yield name, each, stored.get_tensor(name)


def _check_generators(comm, path):
    """Try the states in a file with generators of their own. SavedStateError if one cannot be."""
    with readable(path, lambda error: SavedStateError(f"{path} is no safetensors file: {error}")) as stored:
        for name, device, state in states_in(stored, comm.device):
            try:
                torch.Generator(device).set_state(state)
            except (RuntimeError, TypeError) as error:
                raise SavedStateError(f"{path} has {name}, which no generator can have: {error}") from None
