"""On which host each rank runs, and what has to be alike on all of them."""

import functools
import hashlib
import os
import platform
import re
import socket
import sys
import warnings
from pathlib import Path

import torch

from ...ranks.errors import RankError, names

PACKAGE = Path(__file__).resolve().parents[2]
# What ranks have to have in common, with what to do where they have not.
ALIKE = {"world_size": "set the same WORLD_SIZE everywhere (torchrun: the same --nnodes and --nproc-per-node)",
         "python": "functions and results travel as Python's own bytes: install the same version on every host",
         "torch": "install the same version on every host", "refimpl": "install the same version on every host",
         "backend": "give every rank the same device",
         "script": "copy the same file to every host, or run it from a folder that all share"}
RANKS = re.compile(r"\branks? (\[[\d, ]+\]|\d+(?:, \d+)*(?: and \d+)?)(?!\d)")  # as errors name them


def facts_here(rank, world_size, backend, address):
    """Return what this rank tells the others. `address`: of this host, as the others reach it."""
    return {"rank": rank, "host": socket.gethostname(), "address": address, "pid": os.getpid(),
            "world_size": world_size, "ranks_here": int(os.environ.get("LOCAL_WORLD_SIZE", 0)),
            "python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__.partition("+")[0],
            "refimpl": _digest_of_package(), "backend": backend, "script": _digest_of_script(), "named": own_address(),
            "interface": interface_of(address)}


@functools.cache
def _digest_of_package():
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return f"sources {digest.hexdigest()[:8]}"


def _digest_of_script():
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not os.path.isfile(path):
        return "none"
    return f"{os.path.basename(path)} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]}"


def own_address():
    """Return the address that this host's name stands for here, or None if for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


class Hosts:
    """Knows on which host each rank of the world is. `facts`: what each rank has told of itself (`facts_here`).

    - `names`: of hosts, in the order of their first ranks. Two of one name are told apart by their addresses.
    - `several`: whether there is more than one.
    """

    def __init__(self, facts):
        self.facts = tuple(facts)
        places = [(each["host"], each["address"]) for each in self.facts]
        alike = {host for host, _ in places if len({each for each in places if each[0] == host}) > 1}
        self._of = [f"{host} ({address})" if host in alike else host for host, address in places]
        self.names = tuple(dict.fromkeys(self._of))
        self.several = len(self.names) > 1

    @classmethod
    def one(cls, world_size):
        """Return the one host of ranks that `launch` has started."""
        return cls([{"host": socket.gethostname(), "address": "127.0.0.1"}] * world_size)

    def of(self, rank):
        """Return the name of the host of a rank of the world."""
        return self._of[rank]

    def groups(self, ranks=None):
        """Return {host: those of these ranks of the world that are there}, by default of all."""
        found = {}
        for rank in range(len(self._of)) if ranks is None else ranks:
            found.setdefault(self._of[rank], []).append(rank)
        return found

    def format_ranks(self, ranks):
        """Format ranks of the world, with their hosts if there are several: "rank 3 (hostb)"; "ranks 0 and 1 (hosta)
        and rank 3 (hostb)"."""
        if not self.several:
            return names(ranks)
        *most, last = [f"{names(each)} ({host})" for host, each in self.groups(ranks).items()]
        return f"{', '.join(most)} and {last}" if most else last

    def in_text(self, text):
        """Return a message in which each rank that it names has its host behind it."""
        return RANKS.sub(self._named, text) if self.several else text

    def _named(self, match):
        ranks, rest = [int(each) for each in re.findall(r"\d+", match[1])], match.string[match.end():]
        if max(ranks) >= len(self._of) or rest.startswith(tuple(f" ({name}" for name in self.names)):
            return match[0]
        hosts = ", ".join(self.groups(ranks))
        return f"{match[0]} on {hosts}" if rest.startswith(" (") else f"{match[0]} ({hosts})"

    def warn_of_crossing(self, what, groups, advice):
        """Warn if one of the groups, ranks of the world that should have fast links, is on several hosts."""
        if self.several and (crossing := [group for group in groups if len(self.groups(group)) > 1]):
            warnings.warn(f"{what}: {self.format_ranks(crossing[0])} are on several hosts, and exchange over the cable "
                          f"what is meant for the links within one; {advice}", stacklevel=3)

    def check(self):
        """Raise RankError, the same on all ranks, for what differs and must not."""
        for what, advice in ALIKE.items():
            found = {}
            for rank, each in enumerate(self.facts):
                found.setdefault(each[what], []).append(rank)
            if len(found) > 1:
                told = "; ".join(f"{value} on {self.format_ranks(ranks)}" for value, ranks in found.items())
                raise RankError(f"ranks differ in {what.replace('_', ' ')}: {told}. {advice[0].upper()}{advice[1:]}",
                                sum(list(found.values())[1:], []))
        astray = [rank for rank, each in enumerate(self.facts) if (each["named"] or "127.").startswith("127.")]
        if self.several and astray and not os.environ.get("GLOO_SOCKET_IFNAME"):
            first = self.facts[astray[0]]
            raise RankError(
                f"{self.format_ranks(astray)}: there the host's own name stands for {first['named'] or 'no address'}, "
                "which other hosts cannot reach (\"Connection refused\" would follow). Set GLOO_SOCKET_IFNAME to the "
                f"interface that leads to the others ({first['interface']}), or let /etc/hosts say its "
                "address in place of 127.0.1.1", astray)


def interface_of(address):
    """Return the name of this host's interface with an address, or how to find it."""
    import psutil

    found = [name for name, all_of in psutil.net_if_addrs().items() if address in (each.address for each in all_of)]
    return found[0] if found else f"the one with {address}, which `ip addr` shows"
