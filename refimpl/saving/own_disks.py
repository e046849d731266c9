"""Keeps a saved state on disks that hosts do not share: each host has the files of its own ranks, and a manifest.

    hosta: directory/step-00000010-5f0c2a91/rank-00000.safetensors, rank-00001.safetensors, manifest.json
    hostb: directory/step-00000010-5f0c2a91/rank-00002.safetensors, rank-00003.safetensors, manifest.json

The manifest is the same on all hosts: the bytes and SHA-256 of all ranks' files, and each rank's host. Its own SHA-256
tells the parts of one save from those of another, of the same step, too.

A save writes all files, then the manifest on each host, and when all hosts have theirs, each host removes the old
state. A state is whole if hosts that have its manifest have all its files: until the last manifest is written that is
the old one, and from then on the new one. A load takes the newest that is whole.

`fetching` brings what a host's ranks read, and it has not, from the others.
"""

import hashlib
import json

from ..comm.texts import broadcast_text, gather_results
from . import manifest as manifests
from .description import listed
from .durable import make_folder, sync_folder
from .lock import only_save
from .manifest import NAME, SavedStateError
from .ranks_by_host import is_first
from .schema import MANIFEST, mismatch


def is_there(directory):
    """Tell whether such a state, or a part of it, is in `directory`."""
    return any(directory.glob(f"step-*/{NAME}"))


def begin(comm, hosts, directory, step, lock):
    """Make a new, empty folder on each host, and return its name, the same on all. `lock`: an ExitStack, which then
    holds each host's lock. RuntimeError if two hosts see one folder.

    Other folders are removed first, to make room, if one of them is a whole state, but for that one.
    """
    newest, _, _ = _newest(comm, hosts, directory)
    name = broadcast_text(comm, manifests.new_name(step))

    def work():
        make_folder(directory)
        try:
            (directory / name).mkdir()
        except FileExistsError:
            raise RuntimeError(f"{directory} is one folder on several hosts: save there without shared=False") from None
        lock.enter_context(only_save(directory))
        if newest:
            manifests.remove_others(directory, newest[1], name)
        sync_folder(directory)

    gather_results(comm, lambda: work() if is_first(hosts, comm.rank) else None)
    return name


def read(comm, hosts, directory):
    """Return the manifest of the newest state that is whole, and {file: [the first ranks of the hosts that have it]}.
    SavedStateError on all ranks if none is, with what is missing."""
    newest, found, wrong = _newest(comm, hosts, directory)
    if newest is None:
        raise SavedStateError(f"{directory} has no whole saved state on {', '.join(dict.fromkeys(hosts))}: "
                              f"{listed(_missing(found) + wrong) or 'no save has been completed here'}")
    holders, text = found[newest]["files"], []
    source = min(rank for ranks in holders.values() for rank in ranks)

    def work():
        folder = directory / newest[1]
        text.append(json.dumps(manifests.read(folder if (folder / NAME).exists() else directory)))

    gather_results(comm, lambda: work() if comm.rank == source else None)
    return json.loads(broadcast_text(comm, *text, src=source)), holders


# --- which states there are ------------------------------------------------------------------------------------------


def _newest(comm, hosts, directory):
    """Return the key (step, folder, SHA-256) of the newest whole state, or None; {key: {"files", "hosts"}} of all
    states; sentences on manifests that cannot be read. "files" is {file: [the first ranks of hosts that have it]}."""
    offers = gather_results(comm, lambda: _offers(directory, hosts[comm.rank]) if is_first(hosts, comm.rank) else
                            ([], []))
    found, wrong = {}, [each for _, said in offers for each in said]
    for rank, (here, _) in enumerate(offers):
        for key, files, saved_on in here:
            about = found.setdefault(tuple(key), {"files": {file: [] for file in files}, "hosts": saved_on})
            for file in filter(files.get, files):
                about["files"][file].append(rank)
    whole = [key for key, about in found.items() if all(about["files"].values())]
    return max(whole, default=None), found, wrong


def _offers(directory, host):
    """Return ([(key, {file: is it here}, hosts of the ranks that saved)], [what is wrong with other manifests])."""
    found, wrong = [], []
    for path in sorted([*directory.glob(NAME), *directory.glob(f"step-*/{NAME}")]):
        try:
            manifest = manifests.read(path.parent)
            if said := mismatch(manifest, MANIFEST):
                raise SavedStateError(f"{path} is damaged: {said}")
        except SavedStateError as error:
            wrong.append(f"on {host}: {error}")
            continue
        digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
        here = {file: (directory / manifest["folder"] / file).is_file() for file in manifest["files"]}
        found.append(((manifest["step"], manifest["folder"], digest), here, manifest.get("hosts", [])))
    return found, wrong


def _missing(found):
    """Say of each state, the newest first, which files are on no host."""
    said = []
    for (step, folder, digest), about in sorted(found.items(), reverse=True):
        files = sorted(about["files"])
        gone = [file for file in files if not about["files"][file]]
        by = dict.fromkeys(about["hosts"][files.index(file)] for file in gone if len(about["hosts"]) == len(files))
        said.append(f"of step {step} ({folder}, {digest[:8]}) {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} "
                    f"missing, saved on {', '.join(by) or 'one host'}")
    return said
