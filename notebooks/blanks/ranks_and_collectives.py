"""What the reader builds on the page *Ranks and collectives*: the two halves of an all_reduce, by messages alone."""

import torch

from exercises import close, launch, readable
from refimpl import memory

from . import blank

HINTS = {
    "reduce_half": [
        "`x.chunk(N)` gives N views of x: what you write to a view stands in x.",
        "Write `to, source = (r + 1) % N, (r - 1) % N`. The loop has N - 1 steps, each with one call of send_recv.",
        "`take += comm.send_recv(give, to, take, source)`, where give is chunk r - step, and take is chunk r - step - "
        "1, both modulo N."],
    "gather_half": [
        "The same loop as in `reduce_half`. What comes now is finished, so it replaces a chunk and is not added to it.",
        "In step 0, rank r gives chunk r + 1, which is its finished one, and takes chunk r. Then both go down by one.",
        "`comm.send_recv(give, to, take, source, out=take)` writes what comes into the chunk `take`."]}

SHAPE = 24, 5  # 2, 3 and 4 ranks divide 24


def reduce_half(comm, x):
    """Sum x over the N ranks, in place, and return x: rank r ends with the sum of
    chunk r + 1. Its other chunks do not matter.

    In step s = 0, 1, … N - 2, rank r sends chunk r - s to rank r + 1, and adds what
    comes from rank r - 1 to its own chunk r - s - 1. All numbers are modulo N, and N
    divides the length of x.
    """
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)  # views of x
    for step in range(N - 1):
        give, take = chunks[(r - step) % N], chunks[(r - step - 1) % N]
        take += comm.send_recv(give, (r + 1) % N, take, (r - 1) % N)
    return x


def gather_half(comm, x):
    """Pass finished chunks round, in place, and return x: rank r begins with chunk
    r + 1 finished, and ends with all N.

    In step s = 0, 1, … N - 2, rank r sends chunk r + 1 - s to rank r + 1, and what
    comes from rank r - 1 becomes its chunk r - s, modulo N.
    """
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    for step in range(N - 1):
        give, take = chunks[(r + 1 - step) % N], chunks[(r - step) % N]
        comm.send_recv(give, (r + 1) % N, take, (r - 1) % N, out=take)
    return x


def _part(rank):
    """Return the tensor of one rank."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def _wrong(comm, function, x, rows, expected):
    """Return what is wrong with one half on this rank, or None. `rows`: those of x that are right in the end."""
    N, r = comm.world_size, comm.rank
    where, chunk = f"rank {r} of {N}", x.nbytes // N
    with memory.track(x) as t:
        said = function(comm, x)
    taken, sent = t.peak.total - t.start.total, comm.traffic
    right = [each.shape == x.shape and readable(each) and close(each[rows], expected) for each in (said, x)]
    if right != [True, True]:
        name = "x" if right[0] else "what you return"
        also = f" ({'what you return is right: work in x' if right[0] else 'x is right: return it'})" * any(right)
        return f"on {where}, rows {rows.start} to {rows.stop - 1} of {name} are not what they should be{also}"
    if dict(sent) != {"send": (N - 1) * chunk}:
        return (f"the numbers are right, but {where} sent {dict(sent)}: N - 1 chunks are {(N - 1) * chunk} bytes, all "
                "by send_recv")
    if taken > 2 * chunk:  # the one that came before may still have its name
        return f"the numbers are right, but {taken} bytes were taken on {where} besides x: two chunks are {2 * chunk}"
    return None


def _reduced(comm, function):
    N, r = comm.world_size, comm.rank
    total, size = sum(map(_part, range(N))), SHAPE[0] // N
    rows = slice((r + 1) % N * size, ((r + 1) % N + 1) * size)
    return _wrong(comm, function, _part(r), rows, total[rows])


def _gathered(comm, function):
    N, r = comm.world_size, comm.rank
    whole = torch.cat([_part((chunk - 1) % N).chunk(N)[chunk] for chunk in range(N)])  # of each, its owner's
    return _wrong(comm, function, _part(r), slice(0, SHAPE[0]), whole)


def _on_ranks(body, function):
    return next((wrong for N in (2, 3, 4) for wrong in launch(body, N, function, device="cpu") if wrong), None)


@blank(reduce_half, "parity and bytes", torch.Tensor, process="ranks")
def check_reduce_half(reduce_half):
    """Check `reduce_half`: the sum in chunk r + 1, N - 1 chunks sent, at most two more in memory."""
    return _on_ranks(_reduced, reduce_half)


@blank(gather_half, "parity and bytes", torch.Tensor, process="ranks")
def check_gather_half(gather_half):
    """Check `gather_half`: every chunk is its owner's, N - 1 chunks sent, at most two more in memory."""
    return _on_ranks(_gathered, gather_half)
