"""What the reader builds on the page *Ranks and collectives*: the two halves of an all_reduce, by messages alone."""

import torch

from exercises import close, launch, readable
from exercises.asking import Complaint
from refimpl import memory

from . import blank

HINTS = {
    "reduce_half": [
        "`x.chunk(N)` gives a tuple of N views of x: what you add to a view, after `take = chunks[i]`, stands in x.",
        "Write `dst, src = (r + 1) % N, (r - 1) % N`. The loop has N - 1 steps, each with one call of send_recv.",
        "`take += comm.send_recv(give, dst, take, src)`, where give is chunk r - step, and take is chunk r - step - 1, "
        "both modulo N."],
    "gather_half": [
        "The same loop as in `reduce_half`. What comes now is finished, so it replaces a chunk and is not added to it.",
        "In step 0, rank r gives chunk r + 1, which is its finished one, and takes chunk r. Then both go down by one.",
        "`comm.send_recv(give, dst, take, src, out=take)` writes what comes into the chunk `take`."]}

SHAPE = 24, 5  # 2, 3 and 4 ranks divide 24
UNCHANGED = "what it was"
OF_TUPLE = "`x.chunk(N)` is a tuple of views: take one out, `take = chunks[i]`, then add to it"


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


def _wrong(comm, function, x, expected, mistakes):
    """Return what is wrong with one half on this rank, or None.

    `expected`: {chunk: (what it is in the end, its numbers)}. `mistakes`: {chunk: {what it may be instead: numbers}}.
    """
    N, r = comm.world_size, comm.rank
    where, chunk, before = f"rank {r} of {N}", x.nbytes // N, x.clone().chunk(N)
    mistakes = {number: {UNCHANGED: before[number]} | mistakes[number] for number in expected}
    with memory.track(x) as t:
        try:
            said = function(comm, x)
        except Complaint as complaint:
            of_tuple = "'tuple' object does not support item assignment" in str(complaint)
            raise Complaint(f"{complaint}" + f"\n{OF_TUPLE}" * of_tuple) from None
    taken, sent = t.peak.total - t.start.total, comm.traffic
    of_said, of_x = (_other(each, x.shape, expected, mistakes) for each in (said, x))
    if of_said:
        also = ": write into views of x" * of_said.endswith(UNCHANGED) if of_x else " (x is right: return it)"
        return f"on {where}, {of_said.format('what you return')}{also}"
    if of_x:
        return f"on {where}, {of_x.format('x')} (what you return is right: work in x)"
    if dict(sent) != {"send": (N - 1) * chunk}:
        return (f"the numbers are right, but {where} sent {dict(sent)}: N - 1 chunks are {(N - 1) * chunk} bytes, all "
                "by send_recv")
    if taken > 2 * chunk:  # the one that came before may still have its name
        return f"the numbers are right, but {taken} bytes were taken on {where} besides x: two chunks are {2 * chunk}"
    return None


def _other(tensor, shape, expected, mistakes):
    """Say which chunk of a tensor, {}, is not as expected, and what it is instead; nothing if all are right."""
    if tensor.shape != shape:
        return f"{{}} has the shape {tuple(tensor.shape)}, and x {tuple(shape)}"
    if not readable(tensor):
        return "the storage of {} was freed"
    for number, (right, numbers) in expected.items():
        found = tensor.chunk(len(tensor) // len(numbers))[number]
        if not close(found, numbers):
            what = next((f" but {what}" for what, wrong in mistakes[number].items() if close(found, wrong)), "")
            return f"chunk {number} of {{}} is not {right}{what}"
    return ""


def _reduced(comm, function):
    N, r = comm.world_size, comm.rank
    number, parts = (r + 1) % N, [_part(rank).chunk(N)[(r + 1) % N] for rank in range(N)]
    mistakes = {f"rank {rank}'s own: add what comes": part for rank, part in enumerate(parts) if rank != r}
    mistakes["the mean"] = sum(parts) / N
    return _wrong(comm, function, _part(r), {number: ("the sum over ranks", sum(parts))}, {number: mistakes})


def _gathered(comm, function):
    N, r = comm.world_size, comm.rank
    owned = [_part((number - 1) % N).chunk(N)[number] for number in range(N)]
    added = [part + each for part, each in zip(_part(r).chunk(N), owned, strict=True)]
    expected = {number: (f"rank {(number - 1) % N}'s finished one", each) for number, each in enumerate(owned)}
    mistakes = {number: {f"chunk {other}, finished": each for other, each in enumerate(owned) if other != number}
                | {"its sum with what it was: what comes replaces a chunk": added[number]} for number in expected}
    return _wrong(comm, function, _part(r), expected, mistakes)


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
