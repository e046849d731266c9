"""Checks that a manifest and its files hold each element of everything once, before anything of them is loaded.

The manifest says which parameters there are, what the optimizer keeps of each, and which file has which elements; the
files' headers say what is in them. A file that somebody took out of the manifest, or two that have the same elements,
would otherwise be loaded in part, without a word.
"""

import contextlib
import math

from safetensors import SafetensorError, safe_open

from ..sharding import coverage_fault
from .description import spec_from
from .dtype_names import DTYPES, tensor_of
from .durable import NAMES, naming
from .manifest import FOLDER, NAME, SavedStateError
from .optimizer_state import NUMBERS


def file_of(rank):
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def check_coverage(manifest):
    """Return a sentence on what is missing, twice or out of place in the manifest; None if nothing is."""
    ranks, files = manifest["world_size"], manifest["files"]
    named = f"{file_of(0)} to {file_of(ranks - 1)}"
    if FOLDER.fullmatch(manifest["folder"]) is None:
        return f"folder is {manifest['folder']!r}: expected the name of a folder beside it, as a save makes it"
    if wrong := sorted(files.keys() - set(map(file_of, range(min(ranks, len(files)))))):
        return f"files.{wrong[0]} is there: expected {named}"
    if len(files) < ranks:
        return f"files has {len(files)} of {named}"
    if unknown := [name for name in manifest["states"] if name not in manifest["parameters"]]:
        return f"states.{unknown[0]} is there, and no such parameter"
    for name, kinds in manifest["states"].items():
        if wrong := [key for key in NUMBERS if "value" not in kinds.get(key, {"value": None})]:
            return f"states.{name}.{wrong[0]} has no 'value': expected one number for the whole tensor"
    described = {**manifest["rest"], **manifest["parameters"]}
    pieces = {name: [] for name in described}
    for file, about in sorted(files.items()):
        for part, piece in about["pieces"].items():
            if (name := tensor_of(part)) not in described:
                return f"files.{file}.pieces.{part} is there, and no such parameter"
            shape, spec = described[name]["shape"], None
            with contextlib.suppress(ValueError):
                spec = spec_from(name, shape, piece)
            if spec is None or not spec.numel:
                return (f"files.{file}.pieces.{part} is {piece}: expected a part of its {math.prod(shape)} elements, "
                        f"of shape {shape}")
            pieces[name].append((spec, f"in {file}"))
    return next(filter(None, (coverage_fault(name, described[name]["shape"], each, "in no file")
                              for name, each in pieces.items())), None)


# --- files -----------------------------------------------------------------------------------------------------------


def check_inside(directory, path):
    """Raise SavedStateError if `path`, a part of the saved state in `directory`, is a link to somewhere else."""
    if not path.resolve().is_relative_to(directory.resolve()):
        raise SavedStateError(f"{path} is a link to {path.resolve()}, which is not in {directory}: copy it there")


def check_header(path, expected, may_have=()):
    """Raise SavedStateError unless the file at `path` has the tensors `expected`, {name: (name of its dtype, shape)},
    and no others but those named by `may_have`."""
    with readable(path, lambda error: SavedStateError(f"{path} is no safetensors file: {error}")) as stored:
        if odd := sorted((set(stored.keys()) ^ expected.keys()) - set(may_have)):
            raise SavedStateError(f"{path} has {'no ' if odd[0] in expected else ''}{odd[0]}: {NAME} says otherwise")
        for name, (dtype, shape) in expected.items():
            found = stored.get_slice(name)
            if (found.get_dtype(), list(found.get_shape())) != (NAMES.get(DTYPES[dtype]), list(shape)):
                raise SavedStateError(f"{path} has {name} as {found.get_dtype()} {found.get_shape()}: expected {dtype} "
                                      f"{list(shape)}, as {NAME} says")


def expected_in(manifest, file):
    """Return {name: (name of its dtype, shape)} of the tensors, but for generators, that a file has to have."""
    found = {}
    for part, (first, end, *_) in manifest["files"][file]["pieces"].items():
        if (name := tensor_of(part)) in manifest["rest"]:
            found[f"rest/{part}"] = manifest["rest"][name]["dtype"], [end - first]
            continue
        found[f"parameters/{part}"] = manifest["parameters"][name]["held"], [end - first]
        for key, kind in manifest["states"].get(name, {}).items():
            if "value" not in kind:
                found[f"optimizer/{key}/{part}"] = kind["dtype"], [end - first]
    return found


@contextlib.contextmanager
def readable(path, wrong):
    """Open a safetensors file to be read. What the library raises about it becomes `wrong(error)`; an OSError names
    it."""
    try:
        with naming(path), safe_open(path, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise wrong(error) from None
