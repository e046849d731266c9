"""What readers build in place of ours is told right from wrong, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from blanks import ranks_and_collectives as page

# --- reduce_half -----------------------------------------------------------------------------------------------------


def with_async_messages(comm, x):
    N, r = comm.world_size, comm.rank
    for step in range(N - 1):
        take = x.chunk(N)[(r - step - 1) % N]
        sending = comm.send(x.chunk(N)[(r - step) % N], (r + 1) % N, async_op=True)
        came = comm.recv(take, (r - 1) % N)
        sending.wait()
        take.add_(came)
    return x


def by_index(comm, x):
    N, r = comm.world_size, comm.rank
    rows = x.view(N, -1, *x.shape[1:])
    for give in range(r, r - N + 1, -1):
        rows[give - 1 if give > 0 else give % N - 1].add_(
            comm.send_recv(rows[give % N], (r + 1) % N, rows[0], (r + N - 1) % N))
    return x


def reduce_with_fault(comm, x, *, first=0, steps=-1, add=True, left=False, mean=False, copies=False, chunk=True):
    N, r = comm.world_size, comm.rank
    chunks = list(x.clone().chunk(N)) if copies else x.chunk(N)
    to, source = ((r - 1) % N, (r + 1) % N) if left else ((r + 1) % N, (r - 1) % N)
    for step in range(N + steps):
        give, take = chunks[(r - step + first) % N], chunks[(r - step - 1 + first) % N]
        came = comm.send_recv(give, to, take, source)
        take.add_(came) if add else take.copy_(came)
    if mean:
        x /= N
    return x if chunk else chunks[(r + 1) % N]


def whole_each_time(comm, x):
    """The sum in all chunks, of whole tensors that go round."""
    N, r = comm.world_size, comm.rank
    going = x.clone()
    for _ in range(N - 1):
        going = comm.send_recv(going, (r + 1) % N, going, (r - 1) % N)
        x += going
    return x


def in_copies(comm, x):
    """Right numbers, of chunks beside x."""
    N, r = comm.world_size, comm.rank
    chunks = list(x.clone().chunk(N))
    for step in range(N - 1):
        give, take = chunks[(r - step) % N], chunks[(r - step - 1) % N]
        take.add_(comm.send_recv(give, (r + 1) % N, take, (r - 1) % N))
    return x.copy_(torch.cat(chunks))


def in_a_new_tensor(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = list(x.chunk(N))
    for step in range(N - 1):
        give, take = chunks[(r - step) % N], chunks[(r - step - 1) % N]
        chunks[(r - step - 1) % N] = take + comm.send_recv(give, (r + 1) % N, take, (r - 1) % N)
    return torch.cat(chunks)


def into_a_tuple(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    for step in range(N - 1):
        give, take = (r - step) % N, (r - step - 1) % N
        chunks[take] += comm.send_recv(chunks[give], (r + 1) % N, chunks[take], (r - 1) % N)
    return x


def into_a_buffer(comm, x):
    """Takes the third argument of send_recv for what it writes to."""
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    for step in range(N - 1):
        came = torch.zeros_like(chunks[0])
        comm.send_recv(chunks[(r - step) % N], (r + 1) % N, came, (r - 1) % N)
        chunks[(r - step - 1) % N].add_(came)
    return x


def in_a_list(comm, x):
    in_a_new_tensor(comm, x)
    return x


def freed(comm, x):
    kept = x.clone()
    kept.untyped_storage().resize_(0)
    return kept


# --- gather_half -----------------------------------------------------------------------------------------------------


def gather_by_copy(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    for step in range(N - 1):
        chunks[r - step].copy_(comm.send_recv(chunks[(r + 1 - step) % N], (r + 1) % N, chunks[0], (r - 1) % N))
    return x


def gather_from_owners(comm, x):
    """No ring: each owner sends its chunk to all others."""
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    for d in range(1, N):
        comm.send_recv(chunks[(r + 1) % N], (r + d) % N, chunks[0], (r - d) % N, out=chunks[(r - d + 1) % N])
    return x


def gather_with_fault(comm, x, *, first=1, steps=-1, add=False, left=False, out=True, chunk=True):
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    to, source = ((r - 1) % N, (r + 1) % N) if left else ((r + 1) % N, (r - 1) % N)
    for step in range(N + steps):
        give, take = chunks[(r + first - step) % N], chunks[(r + first - 1 - step) % N]
        came = comm.send_recv(give, to, take, source, **({"out": take} if out and not add else {}))
        if add:
            take += came
    return x if chunk else chunks[(r + 1) % N]


def by_a_collective(comm, x):
    r, N = comm.rank, comm.world_size
    return x.copy_(comm.all_gather(x.chunk(N)[(r + 1) % N].clone()).roll(len(x) // N, 0))


def gather_in_a_list(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = list(x.clone().chunk(N))
    for step in range(N - 1):
        take = (r - step) % N
        chunks[take] = comm.send_recv(chunks[(r + 1 - step) % N], (r + 1) % N, chunks[take], (r - 1) % N)
    return x.copy_(torch.cat(chunks))


ANSWERS = {
    page.check_reduce_half: Answers(
        right=[page.reduce_half, with_async_messages, by_index],
        wrong=[
            (partial(reduce_with_fault, first=-1), "on rank 0 of 2, chunk 1 of what you return is not the sum over"),
            (partial(reduce_with_fault, steps=-2), "is not the sum over ranks but what it was: write into views of x"),
            (partial(reduce_with_fault, steps=0), "the numbers are right, but rank 0 of 2 sent {'send': 480}"),
            (partial(reduce_with_fault, add=False), "is not the sum over ranks but rank 1's own: add what comes"),
            (partial(reduce_with_fault, left=True), "on rank 0 of 3, chunk 1 of what you return is not the sum over"),
            (partial(reduce_with_fault, mean=True), "is not the sum over ranks but the mean"),
            (partial(reduce_with_fault, copies=True), "is not the sum over ranks but what it was: write into views"),
            (partial(reduce_with_fault, chunk=False), "(x is right: return it)"),
            (lambda comm, x: comm.all_reduce(x, out=x), "rank 0 of 2 sent {'all_reduce': 480}: N - 1 chunks are 240"),
            (lambda comm, x: x, "on rank 0 of 2, chunk 1 of what you return is not the sum over ranks but what it was"),
            (lambda comm, x: comm.reduce_scatter(x), "what you return has the shape (12, 5), and x (24, 5)"),
            (into_a_tuple, "`x.chunk(N)` is a tuple of views: take one out, `take = chunks[i]`, then add to it"),
            (into_a_buffer, "is not the sum over ranks but what it was: write into views of x"),
            (in_a_list, "is not the sum over ranks but what it was: write into views of x"),
            (in_a_new_tensor,
             "chunk 1 of x is not the sum over ranks but what it was (what you return is right: work in x)"),
            (freed, "on rank 0 of 2, the storage of what you return was freed"),
            (in_copies, "bytes were taken on rank 0 of 2 besides x: two chunks are 480")],
        saves_nothing=(whole_each_time, "the numbers are right, but rank 0 of 2 sent {'send': 480}"),
    ),
    page.check_gather_half: Answers(
        right=[page.gather_half, gather_by_copy, gather_from_owners],
        wrong=[
            (partial(gather_with_fault, first=0), "is not rank 1's finished one but what it was: write into views"),
            (partial(gather_with_fault, steps=-2), "chunk 0 of what you return is not rank 1's finished one but what"),
            (partial(gather_with_fault, steps=0), "the numbers are right, but rank 0 of 2 sent {'send': 480}"),
            (partial(gather_with_fault, add=True), "but its sum with what it was: what comes replaces a chunk"),
            (partial(gather_with_fault, left=True), "on rank 0 of 3, chunk 0 of what you return is not rank 2's"),
            (partial(gather_with_fault, out=False), "is not rank 1's finished one but what it was: write into views"),
            (lambda comm, x: comm.all_gather(x.chunk(comm.world_size)[(comm.rank + 1) % comm.world_size]),
             "chunk 0 of what you return is not rank 1's finished one but chunk 1, finished"),
            (partial(gather_with_fault, chunk=False), "(x is right: return it)"),
            (by_a_collective, "rank 0 of 2 sent {'all_gather': 240}: N - 1 chunks are 240 bytes, all by send_recv"),
            (lambda comm, x: x, "on rank 0 of 2, chunk 0 of what you return is not rank 1's finished one"),
            (page.reduce_half, "on rank 0 of 2, chunk 0 of what you return is not rank 1's finished one")],
        saves_nothing=(gather_in_a_list, "bytes were taken on rank 0 of 2 besides x: two chunks are 480"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
