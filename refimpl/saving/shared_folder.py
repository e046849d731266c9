"""Asks, before training, whether all ranks see one folder, and whether a saved state is there.

    check_shared(comm, folder)      an error on all ranks, before the first step, if a save would fail after the last
    exists(comm, folder)            the same answer on all ranks

A rank that asks its own disk may get another answer than the others. Then some load, which is a collective, and others
train: they would wait for each other, or take each other's tensors.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..comm.texts import gather_results
from . import own_disks
from .durable import make_folder
from .manifest import NAME
from .ranks_by_host import tell

if TYPE_CHECKING:
    from os import PathLike

    from ..comm.communicator import Communicator

WAIT = 10.0  # seconds: a network file system may answer from its cache for so long


def check_shared(comm: "Communicator", folder: "str | PathLike[str]", seconds: float = WAIT) -> None:
    """Raise RuntimeError, the same on all ranks, unless all of them see `folder` and may write there. All ranks call
    it, at the start. It leaves nothing there.

    Rank 0 makes a file, and the folder if it is not there. The others look for that file for up to `seconds`.
    """
    folder, made = Path(folder).absolute(), []
    try:
        name = gather_results(comm, lambda: _make_probe(folder, made) if comm.rank == 0 else None)[0]
        answers = gather_results(comm, lambda: _look(folder / name, seconds))
    finally:
        _remove(made)
    faults = [f"{tell(comm, [rank for rank, each in enumerate(answers) if each == said])} {said}"
              for said in dict.fromkeys(filter(None, answers))]
    if faults:
        raise RuntimeError(
            f"{folder} is not shared by all ranks: {tell(comm, [0])} has made {name} there, and within "
            f"{seconds:g} s {'; '.join(faults)}. Mount one folder on all hosts, and give that; or let each host keep "
            "its ranks' part on its own disk: save(…, shared=False); or keep the model alone: save_weights(path) needs "
            "rank 0's disk alone")


def exists(comm: "Communicator", folder: "str | PathLike[str]", shared: bool = True) -> bool:
    """Tell whether a saved state is in `folder`: what rank 0 finds is the answer on all ranks, which all call it. With
    shared=False it is there if it is on any host, since rank 0's may be a new one."""
    return any(gather_results(comm, lambda: (comm.rank == 0 or not shared) and _is_saved(Path(folder))))


def _is_saved(folder):
    return (folder / NAME).exists() or own_disks.is_there(folder)


def _make_probe(folder, made):
    """Make an empty file and return its name. `made` gets what has to be removed afterwards, the innermost first."""
    made += [each for each in (folder, *folder.parents) if not each.exists()]
    make_folder(folder)
    made.insert(0, folder / f"shared-{os.urandom(4).hex()}")
    os.close(os.open(made[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    return made[0].name


def _remove(made):
    for path in made:
        with contextlib.suppress(OSError):  # somebody else has put something there
            path.rmdir() if path.is_dir() else path.unlink()


def _look(path, seconds):
    """Say what is wrong with a file that another rank has made, or ""."""
    until = time.monotonic() + seconds
    while not _is_listed(path):
        if time.monotonic() > until:
            return "did not see it"
        time.sleep(0.1)
    return "" if os.access(path.parent, os.W_OK) else "may not write there"


def _is_listed(path):
    """Tell whether a file is in its folder. A folder that is opened is asked of the server; a name may be cached."""
    with contextlib.suppress(OSError):
        return path.name in os.listdir(path.parent)
    return False
