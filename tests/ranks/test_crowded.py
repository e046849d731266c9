"""Launches on a machine that is full: too few open files, no room in /dev/shm or in the folder of temporary files."""

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from rank_pool import failure

from refimpl.comm import launch
from refimpl.ranks import World, forkserver, run
from refimpl.ranks.crowded import more_open_files

SOFT, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.fixture
def open_files():
    """Set the limit of open files; afterwards it is as before."""
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, HARD))
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))


@pytest.mark.parametrize("where", ["at once", "among the ranks"])
def test_too_few_open_files_are_told_with_what_to_do(where, open_files, processes_left):
    few = 16 if where == "at once" else len(os.listdir("/dev/fd")) + 12
    open_files(few)
    with pytest.raises(OSError) as caught:
        launch(print, 8)
    open_files(SOFT)
    assert caught.value.strerror == (
        f"Too many open files: a launch of 8 ranks opens about 44 more in its caller, and a process may have {few} "
        f"files open here: raise that with ulimit -n {HARD} in the shell, or with "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({HARD}, {HARD})) before the launch")
    assert processes_left() == [] and launch(lambda comm: comm.rank, 2) == [0, 1]


def test_ranks_have_the_limit_that_the_caller_has_now(open_files):
    open_files(500)
    assert launch(lambda comm: resource.getrlimit(resource.RLIMIT_NOFILE), 2) == [(500, HARD)] * 2


def test_of_a_rank_too():
    def fn(comm):
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, HARD))
        return [open(os.devnull) for _ in range(16)]

    error = failure("rank 0 raised OSError: .Errno 24. Too many open files", fn, 1)
    assert f"\n{more_open_files()}\n" in str(error)


def test_who_may_not_have_more_is_told_who_can_give_them(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert more_open_files() == "a process may have 64 files open here: who runs this machine can raise that " \
                                "(limits.conf; docker run --ulimit nofile=65536)"


def full(folder):
    """Fill a small file system at this folder, which this process and those that it starts see there, and no other.
    Return whether the system allows that."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        return False
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]):
        if subprocess.run(["mount", *command], capture_output=True).returncode:
            return False
    with open(f"{folder}/full", "wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    return True


def launched(rank, folder, temporary):
    """What a launch from this rank gives, where that folder is full, or the error in words; None if it cannot be."""
    forkserver.PRELOADED, forkserver._current, forkserver._imported_by_caller = ("torch",), None, set
    try:
        if not full(folder):
            return None
    except OSError:  # the last page
        pass
    tempfile.tempdir = temporary
    try:
        return launch(lambda comm: comm.all_reduce(torch.ones(1000)).sum().item(), 2)
    except OSError as error:
        return error.strerror


def where_full(folder, temporary):
    if not sys.platform.startswith("linux"):
        pytest.skip("a file system of one process is Linux's")
    told, = run(launched, World(1), (str(folder), str(temporary)))
    if told is None:
        pytest.skip("mounts a small file system, which needs root's rights")
    return told


def test_a_full_dev_shm_is_no_matter(own_temporary_folder):
    assert where_full("/dev/shm", own_temporary_folder) == [2000.0, 2000.0]


def test_a_full_folder_of_temporary_files_is_named(tmp_path):
    told = where_full(tmp_path, tmp_path)
    assert told.startswith(f"No space left on device in {tmp_path}, where ranks read the function and its arguments, ")
    assert told.endswith("bytes: free some, or set TMPDIR to a folder with more before Python starts")
    assert list(Path(tmp_path).iterdir()) == []
