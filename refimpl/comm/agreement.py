"""Debug mode: before each collective the ranks tell each other what they are about to do, and compare.

torch would hang, end the process or return rubbish when sizes differ across ranks. One small all_gather before every
collective finds it out, at the price of one more round trip; so it is on only when asked for.
"""

import hashlib
from collections import Counter

import torch
import torch.distributed as dist

from .errors import CollectiveMismatch
from .versions import all_gather_single, unseen

CARD = 256  # bytes; what does not fit ends in a hash
TAG = 1  # of cards between two ranks, so that they are not taken for what they announce, whose tag is 0


def check_agreement(comm, collective, x=None, op=None, src=0):
    """Raise CollectiveMismatch on every rank of `comm` unless all are about to do the same."""
    with unseen():
        mine = _card(_describe(collective, x, op, src if collective == "broadcast" else None))
        cards = torch.empty(comm.world_size * CARD, dtype=torch.uint8)
        all_gather_single(cards, mine, group=comm._group)
        said = {comm.ranks[i]: _read(card) for i, card in enumerate(cards.split(CARD))}
    if len(set(said.values())) > 1:
        raise _mismatch(said)


def announce(comm, x, dst):
    """Send a card ahead of x. Returns the work to wait for, later."""
    with unseen():
        return dist.isend(_card(_describe("send", x)), group=comm._group, group_dst=dst, tag=TAG)


class CheckedReceive:
    """A receive that first reads the card, as a work to wait for. CollectiveMismatch from `wait` if x will not fit.

    Nobody can know how long the card takes, so it is read when it is waited for; and receives from one rank, in the
    order in which they were asked for.
    """

    def __init__(self, comm, like, src, landing):
        self._comm, self._like, self._src, self._landing = comm, like, src, landing
        with unseen():
            self._card = torch.empty(CARD, dtype=torch.uint8)
            self._reading = dist.irecv(self._card, group=comm._group, group_src=src, tag=TAG)
        self._works = None
        self._queue = comm._receives.setdefault(src, [])
        self._queue.append(self)

    def wait(self):
        while self._works is None:
            self._queue.pop(0)._begin()
        for work in self._works:
            work.wait()

    def is_completed(self):
        return self._works is not None and all(work.is_completed() for work in self._works)

    def _begin(self):
        self._reading.wait()
        if _read(self._card) != _describe("send", self._like):
            me, them = self._comm.ranks[self._comm.rank], self._comm.ranks[self._src]
            raise CollectiveMismatch(f"ranks {them} and {me} do not agree:\n  rank {them}: {_read(self._card)}\n"
                                     f"  rank {me}: {_describe('recv', self._like)}", (them, me))
        # A batch of one, as the send is: NCCL connects two ranks for a send alone, and a group for batches.
        self._works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, self._landing, group=self._comm._group,
                                                         group_peer=self._src)])


def _describe(collective, x=None, op=None, src=None):
    parts = [collective]
    if x is not None:
        parts.append(f"of shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')} on {x.device.type}")
    parts += [f"op {op}"] if op else []
    parts += [f"from rank {src}"] if src is not None else []
    return ", ".join(parts).replace(", of", " of", 1)


def _card(text):
    raw = text.encode()
    if len(raw) > CARD:
        raw = raw[: CARD - 20] + b"... " + hashlib.sha256(raw).hexdigest()[:16].encode()
    return torch.frombuffer(bytearray(raw.ljust(CARD)), dtype=torch.uint8)


def _read(card):
    return bytes(card.tolist()).decode(errors="replace").rstrip()


def _mismatch(said):
    most, count = Counter(said.values()).most_common(1)[0]
    if 2 * count <= len(said):  # no majority: the lowest rank is the measure
        most = said[min(said)]
    differ = [rank for rank, text in said.items() if text != most]
    by_text = {}
    for rank, text in said.items():
        by_text.setdefault(text, []).append(rank)
    lines = [f"  rank{'s' * (len(ranks) > 1)} {_and(ranks)}: {text}" for text, ranks in by_text.items()]
    return CollectiveMismatch(f"rank{'s' * (len(differ) > 1)} {_and(differ)} differ{'s' * (len(differ) == 1)} in a "
                              "collective:\n" + "\n".join(lines), differ)


def _and(ranks):
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last
