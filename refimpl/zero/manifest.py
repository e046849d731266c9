"""What makes a folder of files a checkpoint: one small file that names them all, and comes last.

    directory/manifest.json                     names the folder below, and the bytes and the hash of each file in it
    directory/step-00000010-5f0c2a91/rank-00000.safetensors, …
    directory/step-00000020-…                   what a save that is under way, or was killed, has written so far

The new folder is there beside the old one until the manifest is replaced; the old one goes after that. So the disk
needs room for two. A folder that the manifest does not name is nobody's: the next save removes it.
"""

import hashlib
import json
import os
import re
import shutil

from .durable import make_folder, sha256_of, sync_folder, write_at_once

FORMAT = 1
NAME = "manifest.json"
FOLDER = re.compile(r"step-\d{8,}-[0-9a-f]{8}")  # what a save makes and may remove


class CheckpointError(RuntimeError):
    """A checkpoint cannot be loaded; the message names the file. Nothing has been changed."""


def begin(directory, step):
    """The name of a new, empty folder in `directory`, which is made if need be. What a save that was killed left there
    is removed first: it takes room."""
    make_folder(directory)
    if not (directory / NAME).exists():
        remove_others(directory, None)
    elif (named := _folder_named(directory)) is not None:
        remove_others(directory, named)
    folder = f"step-{step:08d}-{os.urandom(4).hex()}"
    (directory / folder).mkdir()
    sync_folder(directory)
    return folder


def commit(directory, manifest):
    """From here on the checkpoint is this one: its files have to be on the disk already."""
    write_at_once(directory / NAME, json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1))


def remove_others(directory, keep):
    """Remove the folders of all saves but one."""
    for path in sorted(directory.iterdir()):
        if FOLDER.fullmatch(path.name) and path.name != keep:
            shutil.rmtree(path)


def read(directory):
    """The manifest. CheckpointError if there is none, of another format, or not as it was written."""
    path = directory / NAME
    try:
        manifest = json.loads(path.read_bytes())
        found = manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: no save has been completed here") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is no manifest any more") from None
    if found != FORMAT:
        raise CheckpointError(f"{path} is of format {found!r}: expected {FORMAT}; load it with the version that saved "
                              "it")
    told = manifest.pop("sha256", None)
    if told != _digest(manifest):
        raise CheckpointError(f"{path} was changed after it was written: its SHA-256 is {_digest(manifest)}, and it "
                              f"says {told}")
    return manifest


def verify(path, about):
    """CheckpointError unless the file at `path` has the bytes and the hash that the manifest tells of it."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != about["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes: expected {about['bytes']}; it was cut short or written to")
    found = sha256_of(path)
    if found != about["sha256"]:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is {found}, expected {about['sha256']}")


def _folder_named(directory):
    """The folder of the current checkpoint; None if the manifest cannot be read: then nothing may be removed."""
    try:
        return json.loads((directory / NAME).read_bytes())["folder"]
    except (ValueError, KeyError, TypeError):
        return None


def _digest(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
