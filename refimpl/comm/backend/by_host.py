"""all_gather and reduce_scatter over gloo where several ranks share a host: each chunk goes once to each host.

    r0 r1 on host a, r2 r3 on host b            pairwise, each rank sends to each other       S·(N−S)/N · B a host
    r0's chunk → r2 → r3, r1's → r3 → r2        by host                                       (R−1)/R · B a host

With N = S·R ranks, S on each of R hosts, and a tensor of B bytes in all. A relay on each host takes a chunk from the
cable and hands it to the others there. In a reduce_scatter it adds up what they have of a chunk, and sends the sum. So
sums are of hosts' sums, each in the order of ranks.

A relay goes on while its rank computes, in a thread: others may wait for it.
"""

import itertools
import queue
import threading

import torch
import torch.distributed as dist

from .pairwise import ADD, _rows
from .torch_internals import unseen

FIRST_TAG, TAGS = 16, 2**15  # each collective has tags of its own, as a relay's messages may come late


def cable_bytes(collective, nbytes, here, world_size, hosts):
    """Count the bytes that leave a host with `here` of the ranks, in a collective on a tensor of `nbytes` in all:
    all_gather sends its chunks to each other host, reduce_scatter a sum of each chunk of theirs."""
    chunk = nbytes // world_size
    return chunk * (here * (hosts - 1) if collective == "all_gather" else world_size - here)


class ByHost:
    """Runs collectives of one group. `places`: the ranks of the group on each host."""

    def __init__(self, places):
        self.places = places
        self._here = {rank: ranks for ranks in places for rank in ranks}
        self._numbers, self._relays, self._thread = itertools.count(), queue.SimpleQueue(), None

    @classmethod
    def of(cls, comm):
        """Return what serves a communicator; None if its hosts have one rank each, or it has one host."""
        places = list(comm.hosts.groups(comm.ranks).values())
        if len(places) in (1, comm.world_size):
            return None
        return cls([[comm.ranks.index(rank) for rank in ranks] for ranks in places])

    def relay(self, chunk, ranks):
        """Return which of a host's ranks takes a chunk for them: its own, or one in turn."""
        return chunk if chunk in ranks else ranks[chunk % len(ranks)]

    def all_gather(self, landing, source, group, later):
        """Copy each rank's `source` to its place in every `landing`. Returns a Relayed if `later`."""
        if not source.numel():
            return self._run(Relayed((), list, ()), later)
        with unseen():
            group = group or dist.group.WORLD
            rows, (rank, here, siblings, others, tag) = _rows(landing, group), self._begin(group)
            if rows[rank].data_ptr() != source.data_ptr():
                rows[rank].copy_(source.reshape(-1))
            mine = [chunk for chunk in range(len(rows)) if chunk not in here and self.relay(chunk, here) == rank]
            taken = [group.recv([rows[chunk]], chunk, tag) for chunk in mine]
            rest = [group.recv([rows[chunk]], each, tag) for each in siblings for chunk in range(len(rows))
                    if self.relay(chunk, here) == each]
            rest += [group.send([rows[rank]], self.relay(rank, ranks), tag) for ranks in others]

            def hand_on():
                return [group.send([rows[chunk]], each, tag) for each in siblings for chunk in sorted([rank, *mine])]

            return self._run(Relayed(taken, hand_on, rest), later)

    def reduce_scatter(self, landing, source, op, group, later):
        """Write chunk r of the sum over ranks of `source` to `landing`, on rank r. Returns a Relayed if `later`."""
        if not source.numel():
            return self._run(Relayed((), list, ()), later)
        with unseen():
            group = group or dist.group.WORLD
            chunks, (rank, here, siblings, others, tag) = _rows(source, group), self._begin(group)
            mine = [chunk for chunk in range(len(chunks)) if self.relay(chunk, here) == rank]
            parts = {(chunk, each): chunks[chunk] if each == rank else torch.empty_like(chunks[chunk])
                     for chunk in mine for each in here}
            sums = {ranks[0]: torch.empty_like(chunks[rank]) for ranks in self.places}
            taken = [group.recv([parts[chunk, each]], each, tag) for each in siblings for chunk in mine]
            rest = [group.recv([sums[ranks[0]]], self.relay(rank, ranks), tag) for ranks in others]
            rest += [group.send([chunks[chunk]], each, tag) for each in siblings for chunk in range(len(chunks))
                     if self.relay(chunk, here) == each]

            def add_up():
                sent = []
                for chunk in mine:
                    into = sums[here[0]] if chunk == rank else torch.empty_like(chunks[chunk])
                    _fold([parts[chunk, each] for each in here], into, op)
                    sent += [] if chunk == rank else [group.send([into], chunk, tag)]
                return sent

            def last():
                _fold([sums[ranks[0]] for ranks in self.places], landing.reshape(-1), op)
                if op == dist.ReduceOp.AVG:
                    landing.div_(len(chunks))

            return self._run(Relayed(taken, add_up, rest, last), later)

    def _begin(self, group):
        """Return this rank, the ranks of its host, those but itself, the ranks of each other host, and a new tag."""
        rank, tag = group.rank(), FIRST_TAG + next(self._numbers) % TAGS
        here = self._here[rank]
        return rank, here, [each for each in here if each != rank], [each for each in self.places if each != here], tag

    def _run(self, relayed, later):
        if not later:
            return relayed.run()
        if self._thread is None:
            self._thread = threading.Thread(target=self._relay, name="refimpl relay", daemon=True)
            self._thread.start()
        self._relays.put(relayed)
        return relayed

    def _relay(self):
        """Run collectives in the order in which they have begun, which is the same on all ranks."""
        while True:
            relayed = self._relays.get()
            try:
                with unseen():
                    relayed.run()
            except Exception as error:
                relayed.error = error
            relayed.ended.set()
            del relayed


class Relayed:
    """Holds a collective under way, with the methods of torch's works. When `taken` has come, `then()` sends what
    follows; when all else has come, too, `last()` completes it."""

    def __init__(self, taken, then, rest, last=None):
        self._taken, self._then, self._rest, self._last = taken, then, rest, last
        self.ended, self.error = threading.Event(), None

    def run(self):
        for work in self._taken:
            work.wait()
        for work in (*self._then(), *self._rest):
            work.wait()
        if self._last is not None:
            self._last()
        self._taken = self._then = self._rest = self._last = None

    def wait(self):
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.ended.is_set()


def _fold(parts, into, op):
    """Compute parts[0] op parts[1] op … into `into`, which is none of them."""
    into.copy_(parts[0])
    for part in parts[1:]:
        ADD[op](into, part)
