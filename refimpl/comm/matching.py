"""Debug mode: before each collective the ranks exchange and compare descriptions of what they are about to do.

When sizes differ across ranks, torch hangs, aborts or returns garbage. One small all_gather before every collective
detects that; it costs one more round trip, so it is off by default.
"""

import hashlib
from collections import Counter

import torch
import torch.distributed as dist

from .backend.torch_internals import all_gather_single, unseen
from .errors import CollectiveMismatch

HEADER = 256  # bytes of a description; a longer one ends in its hash
TAG = 1  # of headers between two ranks; the tensors that they describe have tag 0


def check_match(comm, collective, x=None, op=None, src=None):
    """Raise CollectiveMismatch on every rank of `comm` unless all ranks make the same call."""
    with unseen():
        mine = _encode(described(collective, x, op, src if collective == "broadcast" else None))
        headers = torch.empty(comm.world_size * HEADER, dtype=torch.uint8)
        all_gather_single(headers, mine, group=comm._group)
        calls = {comm.ranks[i]: _decode(header) for i, header in enumerate(headers.split(HEADER))}
    if len(set(calls.values())) > 1:
        raise mismatch(calls)


def send_header(comm, x, dst):
    """Send the description of x ahead of x. Returns torch's work, to be waited for later."""
    with unseen():
        return dist.isend(_encode(described("send", x)), group=comm._group, group_dst=dst, tag=TAG)


class CheckedReceive:
    """Receives, but compares the header first; a work to wait for. `wait` raises CollectiveMismatch if x does not
    fit.

    The header may come late, so it is read in `wait`; the receives from one rank begin in the order in which they were
    called.
    """

    def __init__(self, comm, like, src, landing):
        self._comm, self._like, self._src, self._landing = comm, like, src, landing
        with unseen():
            self._header = torch.empty(HEADER, dtype=torch.uint8)
            self._reading = dist.irecv(self._header, group=comm._group, group_src=src, tag=TAG)
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
        if (sent := _decode(self._header)) != described("send", self._like):
            me, them = self._comm.ranks[self._comm.rank], self._comm.ranks[self._src]
            raise CollectiveMismatch(f"ranks {them} and {me} do not match:\n  rank {them}: {sent}\n"
                                     f"  rank {me}: {described('recv', self._like)}", (them, me))
        # A batch of one, because the send is one: NCCL uses other connections for batches than for single messages.
        self._works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, self._landing, group=self._comm._group,
                                                         group_peer=self._src)])


def described(collective, x=None, op=None, src=None):
    """Return the text of what a rank is about to do."""
    parts = [collective]
    if x is not None:
        parts.append(f"of shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')} on {x.device.type}")
    parts += [f"op {op}"] if op else []
    parts += [f"from rank {src}"] if src is not None else []
    return ", ".join(parts).replace(", of", " of", 1)


def _encode(text):
    raw = text.encode()
    if len(raw) > HEADER:
        raw = raw[: HEADER - 20] + b"... " + hashlib.sha256(raw).hexdigest()[:16].encode()
    return torch.frombuffer(bytearray(raw.ljust(HEADER)), dtype=torch.uint8)


def _decode(header):
    return bytes(header.tolist()).decode(errors="replace").rstrip()


def mismatch(calls):
    """Return the CollectiveMismatch of {rank: what it is about to do}, which are not the same."""
    usual, count = Counter(calls.values()).most_common(1)[0]
    if 2 * count <= len(calls):  # no majority: compare with the lowest rank
        usual = calls[min(calls)]
    differ = [rank for rank, text in calls.items() if text != usual]
    by_text = {}
    for rank, text in calls.items():
        by_text.setdefault(text, []).append(rank)
    lines = [f"  rank{'s' * (len(ranks) > 1)} {_and(ranks)}: {text}" for text, ranks in by_text.items()]
    return CollectiveMismatch(f"rank{'s' * (len(differ) > 1)} {_and(differ)} differ{'s' * (len(differ) == 1)} in a "
                              "collective:\n" + "\n".join(lines), differ)


def _and(ranks):
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last
