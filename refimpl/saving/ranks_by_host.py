"""Says which ranks are on one host, and so see the same files."""

import contextlib

from .manifest import SavedStateError


def hosts_of(comm):
    """Return [the name of each rank's host], with its address where two have one name."""
    return [comm.hosts.of(rank) for rank in comm.ranks]


def on_host(hosts, host):
    """Return the ranks on a host."""
    return [rank for rank, each in enumerate(hosts) if each == host]


def is_first(hosts, rank):
    """Tell whether this is the first rank of its host."""
    return hosts.index(hosts[rank]) == rank


def tell(comm, ranks):
    """Return ranks of a communicator for an error, by their numbers in the world, with their hosts."""
    return comm.hosts.format_ranks([comm.ranks[rank] for rank in ranks])


@contextlib.contextmanager
def naming_host(hosts, rank):
    """Name this rank's host in a SavedStateError, if there are several hosts."""
    try:
        yield
    except SavedStateError as error:
        raise SavedStateError(f"on {hosts[rank]}: {error}" if len(set(hosts)) > 1 else str(error)) from None


def share(files, reads, hosts, rank):
    """Return the files that this rank verifies. Each host verifies what its ranks read there, `reads[rank]`, split over
    them; the first host also what is in `files` and nobody reads."""
    ranks = on_host(hosts, hosts[rank])
    wanted = set().union(*(reads[each] for each in ranks))
    if ranks[0] == 0:
        wanted |= set(files).difference(*reads)
    return sorted(wanted)[ranks.index(rank) :: len(ranks)]
