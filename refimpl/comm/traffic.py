"""The bytes that a collective sends when it runs as a ring: the closed forms, and the mapping that holds the counts.

N ranks form a ring and each sends to the next. A tensor of B bytes is cut into N chunks. A collective that brings
every chunk to every rank, or every rank's part of a chunk to one rank, takes N−1 hops of one chunk: (N−1)/N · B per
rank. No algorithm sends less per rank (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", theorem 1). all_reduce is both, one after the other: 2(N−1)/N · B.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..common.ledger import Ledger

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")


def chunk_sizes(n, parts):
    """Cut n elements into `parts` chunks as `torch.tensor_split` does: the first n mod parts have one more."""
    return [n // parts + (i < n % parts) for i in range(parts)]


@lru_cache(4096)  # a training step repeats the same calls
def ring_traffic(collective: str, nbytes: int, world_size: int, rank: int = 0, itemsize: int = 1, src: int = 0) -> int:
    """Count the bytes (int, exact) that `rank` of N = `world_size` sends in a collective on B = `nbytes` bytes.

        all_gather, reduce_scatter, all_to_all    (N−1)/N · B
        all_reduce                                2(N−1)/N · B
        broadcast                                 B, and 0 for the last rank of the chain src, src+1, …, src−1
        send                                      B

    B is the full tensor: the result of all_gather, the argument of the others. All but all_reduce need N to divide it.
    all_reduce sends chunks as `chunk_sizes` cuts the B/itemsize elements: all but chunk r+1 while it reduces, all but
    chunk r+2 while it gathers, so the bytes of rank r are 2B less those two chunks. That is 2(N−1)/N · B if N divides
    B/itemsize, and over all ranks always 2(N−1) · B. With N = 1 nothing is sent. ValueError for another collective.
    """
    N = world_size
    if collective not in COLLECTIVES:
        raise ValueError(f"no traffic is known for {collective!r}: expected one of {', '.join(COLLECTIVES)}")
    if N == 1:
        return 0
    if collective == "send":
        return nbytes
    if collective == "broadcast":
        return 0 if rank == (src - 1) % N else nbytes
    if collective == "all_reduce":
        chunks = chunk_sizes(nbytes // itemsize, N)
        return 2 * nbytes - itemsize * (chunks[(rank + 1) % N] + chunks[(rank + 2) % N])
    return nbytes - nbytes // N


class Traffic(Ledger):
    """Maps each collective to the bytes (int) that one rank sent; `.total`. Immutable; prints itself as a table.

    A collective of `COLLECTIVES` that was not used reads 0. Traffics add and subtract: `comm.traffic` after a step
    minus `comm.traffic` before it is the step's.
    """

    def __init__(self, nbytes: Mapping[str, int] | Iterable[tuple[str, int]] = (), **more: int) -> None:
        given = {str(name).replace(" ", "_"): int(count) for name, count in {**dict(nbytes), **more}.items()}
        unknown = set(given).difference(COLLECTIVES)
        if unknown:
            raise ValueError(f"no collective {', '.join(sorted(unknown))}: expected {', '.join(COLLECTIVES)}")
        self._bytes = {name: given[name] for name in COLLECTIVES if given.get(name)}

    def __getitem__(self, name: str) -> int:
        name = str(name).replace(" ", "_")
        if name not in COLLECTIVES:
            raise KeyError(f"no collective {name!r}: expected one of {', '.join(COLLECTIVES)}")
        return self._bytes.get(name, 0)

    def __contains__(self, name: object) -> bool:
        return str(name).replace(" ", "_") in self._bytes

    def __eq__(self, other):
        try:
            return self._bytes == Traffic(other)._bytes
        except (TypeError, ValueError):  # not a mapping of collectives
            return NotImplemented

    __hash__ = Ledger.__hash__

    def __add__(self, other):
        return Traffic({name: self[name] + Traffic(other)[name] for name in COLLECTIVES})

    def __sub__(self, other):
        return Traffic({name: self[name] - Traffic(other)[name] for name in COLLECTIVES})
