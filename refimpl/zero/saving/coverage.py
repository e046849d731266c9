"""Checks that a manifest and its files hold each element of everything once, before anything of them is loaded.

The manifest says which parameters there are, what the optimizer keeps of each, and which file has which elements; the
files' headers say what is in them. A file that somebody took out of the manifest, or two that have the same elements,
would otherwise be loaded in part, without a word.
"""

import contextlib

from safetensors import SafetensorError, safe_open

from .description import DTYPES
from .durable import NAMES, naming
from .manifest import FOLDER, NAME, SavedStateError

REST = "rest.safetensors"


def file_of(rank):
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def check_coverage(manifest):
    """Return a sentence on what is missing, twice or out of place in the manifest; None if nothing is."""
    ranks = manifest["world_size"]
    files = {file: about for file, about in manifest["files"].items() if file != REST}
    if FOLDER.fullmatch(manifest["folder"]) is None:
        return f"folder is {manifest['folder']!r}: expected the name of a folder beside it, as a save makes it"
    if wrong := sorted(files.keys() - set(map(file_of, range(min(ranks, len(files)))))):
        return f"files.{wrong[0]} is there: expected {_named(ranks)} and, of what is not trained, {REST}"
    if len(files) < ranks:
        return f"files has {len(files)} of {_named(ranks)}"
    whole = whole_rest(manifest)
    if bool(whole) != (REST in manifest["files"]):
        return f"files.{REST} is {'missing' if whole else 'there, and rest is empty or in shards'}"
    if wrong := [file for file, about in manifest["files"].items() if ("pieces" in about) == (file == REST)]:
        return f"files.{wrong[0]}.pieces is {'there' if wrong[0] == REST else 'missing'}"
    if unknown := [name for name in manifest["states"] if name not in manifest["parameters"]]:
        return f"states.{unknown[0]} is there, and no such parameter"
    described = {**manifest["rest"], **manifest["parameters"]}
    spans = {name: [] for name in described if name not in whole}
    for file, about in sorted(files.items()):
        for name, (first, end) in about["pieces"].items():
            if name not in spans:
                return f"files.{file}.pieces.{name} is there, and no such parameter"
            spans[name].append((first, end, file))
    return next(filter(None, (_gap(name, each, described[name]) for name, each in spans.items())), None)


def whole_rest(manifest):
    """Return {name: …} of what is not trained and in no rank's file, so whole in REST."""
    in_shards = {name for about in manifest["files"].values() for name in about.get("pieces", ())}
    return {name: about for name, about in manifest["rest"].items() if name not in in_shards}


def _named(ranks):
    return f"{file_of(0)} to {file_of(ranks - 1)}"


def _gap(name, spans, parameter):
    """Return a sentence unless `spans`, [(first, end, file)], are each element of the parameter once."""
    reached, before, numel = 0, None, 1
    for size in parameter["shape"]:
        numel *= size
    for first, end, file in sorted(spans):
        if not first < end <= numel:
            return f"files.{file}.pieces.{name} is [{first}, {end}]: expected a part of its {numel} elements"
        if first < reached:
            return f"{name}: elements {first} … {min(end, reached) - 1} are in {before} and in {file}"
        if first > reached:
            break
        reached, before = end, file
    else:
        first = numel
    return f"{name}: elements {reached} … {first - 1} are in no file" if reached < first else None


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
    """Return {name: (name of its dtype, shape)} of the tensors of states and parameters that a file has to have."""
    if file == REST:
        return {name: (about["dtype"], about["shape"]) for name, about in whole_rest(manifest).items()}
    found = {}
    for name, (first, end) in manifest["files"][file]["pieces"].items():
        if name in manifest["rest"]:
            found[f"frozen/{name}"] = manifest["rest"][name]["dtype"], [end - first]
            continue
        found[f"parameters/{name}"] = manifest["parameters"][name]["held"], [end - first]
        for key, kind in manifest["states"].get(name, {}).items():
            if "value" not in kind:
                found[f"optimizer/{key}/{name}"] = kind["dtype"], [end - first]
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
