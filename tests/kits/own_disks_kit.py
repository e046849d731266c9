"""Ranks on hosts of one machine: each host is a name, and a folder in place of its disk."""

import contextlib
import re
import shutil
from unittest import mock

from rank_pool import pooled
from saving_kit import BY_COLUMNS, BY_ROWS, Holder

from refimpl.comm import Communicator
from refimpl.comm.hosts.facts import Hosts

LETTERS = "abcdefgh"
ROWS, COLUMNS = {"dims": BY_ROWS, "tp": 2}, {"dims": BY_COLUMNS, "tp": 2}


def host_of(rank, per_host):
    return f"host{LETTERS[rank // per_host]}"


@contextlib.contextmanager
def on_hosts(comm, per_host, folder):
    """In a rank: so many ranks share a host's name, and a disk. Gives the folder, by the path that it has there."""
    with threads_on_hosts(per_host):
        yield folder / host_of(comm.rank, per_host) / "saved"


@contextlib.contextmanager
def threads_on_hosts(per_host):
    """As `on_hosts`, for ranks that are threads of one process."""
    known = property(lambda comm: Hosts([{"host": host_of(rank, per_host), "address": "?"}
                                         for rank in range(max(comm.ranks) + 1)]))
    with mock.patch.object(Communicator, "hosts", known):
        yield


def saved(comm, per_host, folder, steps=2, shared=False, **how):
    """Train so many steps and save; the state_dict."""
    with on_hosts(comm, per_host, folder) as disk:
        holder = Holder(comm, **how).train(steps)
        holder.save(disk, shared=shared)
        return holder.state_dict()


def loaded(comm, per_host, folder, shared=None, **how):
    """Load into another model; the state_dict, or what was raised, and whether it is as it was."""
    with on_hosts(comm, per_host, folder) as disk:
        holder = Holder(comm, seed=7, **how).train(1)
        before = holder.state_dict()
        try:
            holder.load(disk, shared=shared)
        except Exception as error:
            after = holder.state_dict()
            said = re.sub(rf"{re.escape(str(folder))}/host\w/saved", "DISK", str(error))
            return type(error).__name__, said, repr(after) == repr(before)
        return holder.state_dict()


def refusal(folder, world_size=4, per_host=2, **cut):
    """What all ranks say alike, and are as they were."""
    answers = pooled(lambda comm: loaded(comm, per_host, folder, **cut), world_size)
    assert len(set(answers)) == 1 and answers[0][0] == "SavedStateError" and answers[0][2], answers
    return answers[0][1]


def files(folder):
    """{path below a folder: its bytes}."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def copied(folder, to):
    """Replace a folder by a copy of another."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)


def zeroed(path):
    """Write zeros over all numbers in a file but the state of its generator, as a bad copy has them."""
    with open(path, "r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        file.seek(8 + header)
        file.write(bytes(path.stat().st_size - 8 - header - 5056))
