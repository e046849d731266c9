"""What makes a folder of files a saved state: one small file that names them all, and is written last.

    directory/manifest.json                     names the folder below, and the bytes and the hash of each file in it
    directory/step-00000010-5f0c2a91/rank-00000.safetensors, …
    directory/step-00000020-…                   what a save that is running, or was killed, has written so far

The new folder is beside the old one until the manifest has been replaced; then the old one is removed. So the disk
needs room for two. A folder that a whole manifest does not name is left over from a save that was killed: the next save
removes it. Where the manifest is missing or not whole, nothing is removed before the new state is.
"""

import hashlib
import json
import os
import re
import reprlib
import shutil
import stat
import warnings

from ..untrusted.text import one_line, short
from .durable import naming, sha256_of, sync_folder, write_atomically

FORMAT = 2
NAME = "manifest.json"
ROOM = 2**20  # bytes of a manifest, beyond those of the files that it names
HOSTS = 1000  # that have files of one saved state
UNREADABLE = ValueError, KeyError, TypeError, RecursionError  # what junk in place of JSON may raise
FETCHED = "fetched-"  # what a load makes of files from other hosts, and removes
FOLDER = re.compile(r"step-\d{8,}-[0-9a-f]{8}")  # what a save makes and may remove


class SavedStateError(RuntimeError):
    """A saved state cannot be loaded; the message names the file. The engine is unchanged."""

    def __init__(self, message: str) -> None:
        super().__init__(short(one_line(message)))  # names in a file may be anything


def begin(directory, step):
    """Make a new, empty folder in `directory` and return its name. Folders that killed saves have left are removed
    first, to make room, if the manifest that does not name them is whole; else a warning says that they stay. The
    caller holds the lock of `directory`."""
    try:
        apart = [path.parent.name for path in directory.glob(f"step-*/{NAME}")]  # of `own_disks`
        remove_others(directory, read(directory)["folder"], *apart)
    except (SavedStateError, OSError) as error:
        if found := _folders(directory):
            warnings.warn(f"{directory} has {found[0].name}, and no whole manifest ({error}): nothing is removed "
                          "before this save is whole", stacklevel=2)
    folder = new_name(step)
    (directory / folder).mkdir()
    sync_folder(directory)  # else a crash could lose a folder whose files are synced
    return folder


def new_name(step):
    """Return the name of a new folder."""
    return f"step-{step:08d}-{os.urandom(4).hex()}"


def commit(directory, manifest):
    """Make the files that `manifest` names the saved state. They have to be on the disk already: SavedStateError if
    their folder is not there. One that names "hosts" is written beside its files (`own_disks`)."""
    folder = directory / manifest["folder"]
    if not folder.is_dir() or folder.is_symlink():
        raise SavedStateError(f"{folder} has gone: somebody has removed what this save has written")
    path = (folder if "hosts" in manifest else directory) / NAME
    write_atomically(path, json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1))


def remove_others(directory, *keep):
    """Remove the folders of all saves but `keep`, and what killed saves and loads have left."""
    for path in (*_folders(directory), *directory.glob(f"{FETCHED}*")):
        if path.name not in keep:
            shutil.rmtree(path)
    for path in directory.glob(f"{NAME}.*.tmp"):
        path.unlink()


def _folders(directory):
    """Return the folders of saves; a link is none."""
    return [path for path in sorted(directory.iterdir())
            if FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def read(directory):
    """Return the manifest. SavedStateError if there is none, if it is a link, if its format is another, or if it was
    changed."""
    path = directory / NAME
    if path.is_symlink():
        raise SavedStateError(f"{path} is a link to {path.resolve()}: copy the whole saved state, or link its folder")
    if path.exists() and not (path.is_dir() or stat.S_ISREG(path.stat().st_mode)):
        raise SavedStateError(f"{path} is no file")
    try:
        with naming(path):
            # before it is read: a damaged file may have any size
            if (size := path.stat().st_size) > (most := _largest(directory)):
                raise SavedStateError(f"{path} is damaged: it has {size:,} bytes, and the files that it names have "
                                      f"{most - ROOM:,}, whose headers say more than a manifest")
            manifest = json.loads(path.read_bytes())
        found, expected = manifest["format"], manifest.pop("sha256", None)
        digest = _digest(manifest)
    except FileNotFoundError:
        raise SavedStateError(f"{path} is missing: no save has been completed here") from None
    except UNREADABLE:
        raise SavedStateError(f"{path} is damaged: it is not a manifest") from None
    if found != FORMAT:
        raise SavedStateError(f"{path} is of format {reprlib.repr(found)}: expected {FORMAT}; load it with the version "
                              "that saved it")
    if expected != digest:
        raise SavedStateError(f"{path} was changed after it was written: its SHA-256 is {digest}, expected "
                              f"{reprlib.repr(expected)}")
    return manifest


def _largest(directory):
    """Return the most bytes that a manifest can have: of each part of a tensor it says less than the file's header. One
    beside its files says that of all hosts, too."""
    there = [(path, 1) for folder in _folders(directory) for path in folder.glob("rank-*")]
    there += [(path, HOSTS) for path in directory.glob("rank-*")]
    return ROOM + sum(path.stat().st_size * times for path, times in there)


def verify(path, about):
    """Raise SavedStateError unless the file at `path` has the bytes and the hash that the manifest says."""
    if not path.is_file():
        raise SavedStateError(f"{path} is {'no file' if path.exists() else 'missing'}")
    size = path.stat().st_size
    if size != about["bytes"]:
        raise SavedStateError(f"{path} has {size} bytes: expected {about['bytes']}; it was cut short or written to")
    found = sha256_of(path)  # last, as it reads all of the file
    if found != about["sha256"]:
        raise SavedStateError(f"{path} is damaged: its SHA-256 is {found}, expected {about['sha256']}")


def _digest(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
