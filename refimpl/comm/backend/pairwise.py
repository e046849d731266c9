"""reduce_scatter and all_gather over gloo, as messages between each two ranks.

gloo has no reduce_scatter of its own: torch all_reduces a copy of the whole tensor, twice the bytes on the wire. And
its all_gather writes to a second tensor of the size of the result. Messages need neither: a rank sends each other rank
one chunk, N−1 chunks of the N, as many bytes as a ring sends, and receives in place. A reduce_scatter receives N−1
chunks in memory of their own and adds them up in the order of ranks, so that a sum does not depend on the rank that
adds it up.
"""

import torch
import torch.distributed as dist

from .torch_internals import unseen

ADD = {dist.ReduceOp.SUM: torch.Tensor.add_, dist.ReduceOp.AVG: torch.Tensor.add_,
       dist.ReduceOp.PRODUCT: torch.Tensor.mul_, dist.ReduceOp.MAX: lambda x, y: torch.maximum(x, y, out=x),
       dist.ReduceOp.MIN: lambda x, y: torch.minimum(x, y, out=x)}
TAG = 2  # of these messages; `send` uses tag 0 for tensors and tag 1 for headers, `wire` 3 and 4


class Messages:
    """Messages under way, with the methods of torch's works: `wait` completes them, then calls `last`."""

    def __init__(self, sends, receives, last=None):
        self._sends, self._receives, self._last = sends, receives, last

    def wait(self):
        for work in (*self._receives, *self._sends):
            work.wait()
        if self._last is not None:
            self._last()
        self._sends = self._receives = ()
        self._last = None

    def is_completed(self):
        return all(work.is_completed() for work in self._receives)  # gloo cannot tell for sends


def all_gather(landing, source, group, later, tag=TAG):
    """Copy each rank's `source` to its place in every `landing`. Returns Messages if `later`."""
    with unseen():
        group = group or dist.group.WORLD
        rank, places = group.rank(), _rows(landing, group)
        if places[rank].data_ptr() != source.data_ptr():
            places[rank].copy_(source.reshape(-1))
        return _exchange([places[rank]] * len(places), places, rank, group, later, tag=tag)


def reduce_scatter(landing, source, op, group, later):
    """Write chunk r of the sum over ranks of `source` to `landing`, on rank r. Returns Messages if `later`."""
    with unseen():  # hides the N−1 chunks from trackers, not from `memory.measure`
        group = group or dist.group.WORLD
        rank, chunks = group.rank(), _rows(source, group)
        parts = [chunk if peer == rank else torch.empty_like(chunk) for peer, chunk in enumerate(chunks)]
        return _exchange(chunks, parts, rank, group, later, lambda: _reduce(parts, landing.reshape(-1), rank, op))


def _exchange(given, taken, rank, group, later, last=None, tag=TAG):
    """Send given[p] to each other rank p, and receive from p into taken[p]."""
    peers = [(rank + i) % len(taken) for i in range(1, len(taken)) if taken[rank].numel()]  # not all start with rank 0
    receives = [group.recv([taken[peer]], peer, tag) for peer in peers]  # dist.irecv without its 10 µs of checks
    sends = [group.send([given[peer]], peer, tag) for peer in peers]
    messages = Messages(sends, receives, last)
    return messages if later else messages.wait()


def _reduce(parts, landing, rank, op):
    """Compute parts[0] op parts[1] op …, in this order, into `landing`, which may be parts[rank]."""
    total = parts[0]
    if rank == 0:  # parts[0] is then the caller's own tensor, which must not be written to
        total = landing if total.data_ptr() == landing.data_ptr() else landing.copy_(total)
    for part in parts[1:]:
        ADD[op](total, part)
    if op == dist.ReduceOp.AVG:
        total.div_(len(parts))
    if rank:
        landing.copy_(total)


def _rows(tensor, group):
    """Split a tensor into one flat chunk for each rank."""
    return tensor.reshape(group.size(), tensor.numel() // group.size()).unbind()
