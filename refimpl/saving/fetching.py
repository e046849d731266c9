"""Copies what a host's ranks read, and its own disk has not, from the hosts that have it, for the time of a load.

Rank 0's file has what all ranks read, such as buffers; under another mesh, or on a new host, all may be on other disks.

    directory/fetched-9e107d9d/rank-00000.safetensors     of the same size as on its host: its header, and the tensors
                                                          that are read; the rest of it is a hole that takes no room
    directory/fetched-9e107d9d/rank-00002.safetensors     a link to the file that is on this disk

CHUNK bytes a rank are in memory on their way, at most. The sender's host has verified the file.
"""

import contextlib
import errno
import json
import os
import shutil
from collections import defaultdict

import torch

from ..comm.texts import broadcast_text, gather_results
from .durable import make_folder, naming
from .manifest import FETCHED
from .ranks_by_host import is_first, on_host

CHUNK = 2**24  # bytes


def transfers(hosts, holders, reads):
    """Return [(file, rank that sends, rank that writes)], in the same order on all ranks. `holders`: {file: [a rank of
    each host that has it]}; `reads`: [files that each rank reads]. Ranks of a host take turns."""
    found = []
    for host in dict.fromkeys(hosts):
        here = on_host(hosts, host)
        lacking = [file for file in sorted(set().union(*(reads[rank] for rank in here)))
                   if host not in (hosts[rank] for rank in holders[file])]
        for number, file in enumerate(lacking):
            there = on_host(hosts, hosts[holders[file][number % len(holders[file])]])
            found.append((file, there[number % len(there)], here[number % len(here)]))
    return found


def read_here(hosts, reads, moves):
    """Return [files that each rank reads on its own host, for itself or to send them]. `moves`: of `transfers`."""
    brought = {(file, hosts[dst]) for file, _, dst in moves}
    return [[file for file in files if (file, hosts[rank]) not in brought] +
            [file for file, src, _ in moves if src == rank] for rank, files in enumerate(reads)]


@contextlib.contextmanager
def fetched(comm, hosts, folder, manifest, moves, wanted):
    """Give a folder in which this host's ranks find all that they read; it is `folder`, or has gone in the end.
    `wanted(files)` returns {file: names of the tensors that this rank reads of it}."""
    if not moves:
        yield folder
        return
    view = folder.parent / f"{FETCHED}{broadcast_text(comm, os.urandom(4).hex())}"
    lacking = [file for file, _, dst in moves if hosts[dst] == hosts[comm.rank]]
    makes, was_there = lacking and is_first(hosts, comm.rank), folder.parent.exists()
    names = gather_results(comm, lambda: wanted(lacking))
    try:
        gather_results(comm, lambda: _make_view(view, folder) if makes else None)
        ranges = gather_results(comm, lambda: [
            _ranges(folder / file, set().union(*(names[rank].get(file, ()) for rank in on_host(hosts, hosts[dst]))))
            for file, src, dst in moves if src == comm.rank])
        gather_results(comm, lambda: _move(comm, folder, view, manifest, moves, ranges))
        yield view if lacking else folder
    finally:
        if makes:
            shutil.rmtree(view, ignore_errors=True)
            if not was_there:
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()


def _make_view(view, folder):
    """Make a folder in which the files that are on this host seem to be."""
    make_folder(view)
    for path in folder.glob("rank-*"):
        (view / path.name).symlink_to(path.absolute())


def _ranges(path, names):
    """Return [[first byte, end]] of a file's header and of these tensors; those that touch are one."""
    with naming(path), open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(header))
    found = [[0, 8 + header]]
    for begin, end in sorted(entries[name]["data_offsets"] for name in names & entries.keys()):
        if found[-1][1] < 8 + header + begin:
            found.append([8 + header + begin, 0])
        found[-1][1] = 8 + header + end
    return found


def _move(comm, folder, view, manifest, moves, ranges):
    """Send and receive ranges of files. After an error a rank goes on, since others wait for it; then it raises."""
    errors, host, told = [], comm.host(), defaultdict(int)
    for file, src, dst in moves:
        of_file, told[src] = ranges[src][told[src]], told[src] + 1
        if comm.rank not in (src, dst):
            continue
        if comm.rank == dst:
            _try(errors, _make_hole, view / file, manifest["files"][file]["bytes"])
        for first, end in of_file:
            for at in range(first, end, CHUNK):
                data = torch.zeros(min(CHUNK, end - at), dtype=torch.uint8)
                if comm.rank == src:
                    _try(errors, _read, folder / file, at, data)
                    host.send(data, dst)
                else:
                    _try(errors, _write, view / file, at, host.recv(data, src))
    if errors:
        raise errors[0]


def _try(errors, work, *args):
    """Call `work` unless there was an error; note its own."""
    if not errors:
        try:
            work(*args)
        except OSError as error:
            errors.append(error)


def _make_hole(path, size):
    with naming(path), open(path, "xb") as file:
        file.truncate(size)


def _read(path, at, data):
    with naming(path), open(path, "rb") as file:
        file.seek(at)
        if file.readinto(data.numpy()) < len(data):
            raise OSError(errno.EIO, "cut short", str(path))


def _write(path, at, data):
    with naming(path), open(path, "r+b") as file:
        file.seek(at)
        file.write(data.numpy())
