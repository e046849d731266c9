"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
import torch.distributed as dist
from exercises_kit import Answers, graded

from exercises import ranks_and_collectives as page
from refimpl.comm import ring_traffic

# --- first -----------------------------------------------------------------------------------------------------------


def predict(collective, nbytes, world_size):
    passes = 2 if collective == "all_reduce" else 1
    return passes * (world_size - 1) * nbytes // world_size


def in_floats(collective, nbytes, world_size):
    share = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
    return share[collective] * (1 - 1 / world_size) * nbytes


def with_fault(collective, nbytes, n, *, of_all_reduce=2, hops=-1, chunk=True):
    return (of_all_reduce if collective == "all_reduce" else 1) * (n + hops) * nbytes // (n if chunk else 1)


# --- second ----------------------------------------------------------------------------------------------------------


def my_reduce_scatter(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    total = chunks[r - 1]
    for step in range(N - 1):
        mine = chunks[r - 2 - step]
        total = mine + comm.send_recv(total, (r + 1) % N, mine, (r - 1) % N)
    return total


def in_a_list(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = list(x.chunk(N))
    for step in range(N - 1):
        give, take = (r - step - 1) % N, (r - step - 2) % N
        chunks[take] = chunks[take] + comm.send_recv(chunks[give], (r + 1) % N, chunks[take], (r - 1) % N)
    return chunks[r]


def to_each_owner(comm, x):
    """No ring: rank r sends its part of chunk c to rank c itself."""
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    parts = [comm.send_recv(chunks[(r + d) % N], (r + d) % N, chunks[r], (r - d) % N) for d in range(1, N)]
    return torch.stack([chunks[r], *parts]).sum(0)


def to_the_left(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = x.view(N, -1, *x.shape[1:])
    total = chunks[(r + 1) % N].clone()
    for step in range(2, N + 1):
        total = comm.send_recv(total, (r - 1) % N, total, (r + 1) % N).add_(chunks[(r + step) % N])
    return total


def whole_tensors(comm, x):
    """Right chunks, of whole tensors that go round."""
    N, r = comm.world_size, comm.rank
    total = going = x
    for _ in range(N - 1):
        going = comm.send_recv(going, (r + 1) % N, going, (r - 1) % N)
        total = total + going
    return total.chunk(N)[r].clone()


def ring_of_the_page(comm, x, *, begin=0, steps=-1, keep=list, give_back=0):
    """The page's ring, which leaves the sum of chunk r+1 on rank r: what readers begin with, and faults of it."""
    N, r = comm.world_size, comm.rank
    chunks = keep(x.chunk(N))
    for step in range(N + steps):
        give, take = (r - begin - step) % N, (r - begin - step - 1) % N
        came = comm.send_recv(chunks[give], (r + 1) % N, chunks[take], (r - 1) % N)
        chunks[take] = chunks[take] + came
    return chunks[(r + give_back) % N]


def in_x(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    for step in range(N - 1):
        chunks[r - step - 2].add_(comm.send_recv(chunks[r - step - 1], (r + 1) % N, chunks[0], (r - 1) % N))
    return chunks[r].clone()


def view_of_a_copy(comm, x):
    total = x.clone()
    in_x(comm, total)
    return total.chunk(comm.world_size)[comm.rank]


def two_ranks_only(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = x.chunk(N)
    return chunks[r] + comm.send_recv(chunks[(r + 1) % N], (r + 1) % N, chunks[r], (r - 1) % N)


# --- third -----------------------------------------------------------------------------------------------------------


def sum_in_place(comm, x):
    return comm.all_reduce(x, out=x)


def in_two_halves(comm, x):
    mine = x.chunk(comm.world_size)[comm.rank]
    comm.reduce_scatter(x, out=mine)
    return comm.all_gather(mine, out=x)


def times_the_mean(comm, x):
    comm.all_reduce(x, "avg", out=x)
    x *= comm.world_size
    return x


def without_comm(comm, x):
    dist.all_reduce(x)
    return x


def returns_the_argument(comm, x):
    comm.all_reduce(x)
    return x


ANSWERS = {
    page.first: Answers(
        right=[predict, in_floats, ring_traffic],
        wrong=[
            (lambda collective, nbytes, n: nbytes, "reduce_scatter of 96 bytes on 2 ranks: you say 96, a rank sends"),
            (partial(with_fault, of_all_reduce=1), "all_reduce of 96 bytes on 2 ranks: you say 48, a rank sends 96"),
            (partial(with_fault, hops=0), "all_reduce of 96 bytes on 2 ranks: you say 192, a rank sends 96"),
            (partial(with_fault, chunk=False), "all_reduce of 96 bytes on 2 ranks: you say 192, a rank sends 96"),
            (lambda collective, *rest: predict("all_reduce", *rest),
             "reduce_scatter of 96 bytes on 2 ranks: you say 96"),
            (lambda collective, nbytes, n: predict(collective, nbytes // 4, n), "you say 24, a rank sends 96"),
            (lambda collective, nbytes, n: predict(collective, nbytes, n) * (n if collective == "all_gather" else 1),
             "all_gather of 96 bytes on 2 ranks: you say 96, a rank sends 48"),
            (lambda collective, nbytes, n: predict(collective, nbytes, n) // (n if collective == "all_to_all" else 1),
             "all_to_all of 96 bytes on 2 ranks: you say 24, a rank sends 48"),
            (lambda collective, nbytes, n: 2 * nbytes // n * (n - 1) if n > 2 else predict(collective, nbytes, n),
             "reduce_scatter of 96 bytes on 3 ranks: you say 128, a rank sends 64"),
            (lambda collective, nbytes, n: predict(collective, nbytes, max(n, 2)),
             "all_reduce of 96 bytes on 1 rank: you say 96, a rank sends 0")],
    ),
    page.second: Answers(
        right=[my_reduce_scatter, in_a_list, to_each_owner, to_the_left],
        wrong=[
            (lambda comm, x: comm.reduce_scatter(x), "rank 0 of 2 sent {'reduce_scatter': 120}; (N-1)/N of the tensor"),
            (lambda comm, x: x, "rank 0 of 2 should have chunk 0 of the sum, (6, 5) in fp32; you return a tensor of "
                                "shape (12, 5)"),
            (lambda comm, x: x.chunk(comm.world_size)[comm.rank], "you return other numbers"),
            (partial(ring_of_the_page, give_back=1), "rank 0 of 2 should have chunk 0 of the sum, (6, 5) in fp32; you "
                                                     "return chunk 1 of it"),
            (ring_of_the_page, "rank 0 of 2 should have chunk 0 of the sum, (6, 5) in fp32; you return other numbers"),
            (partial(ring_of_the_page, begin=1, steps=0), "the chunks are right, but rank 0 of 2 sent {'send': 240}"),
            (partial(ring_of_the_page, begin=1, steps=-2), "you return other numbers"),
            (lambda comm, x: my_reduce_scatter(comm, x) / comm.world_size, "you return other numbers"),
            (lambda comm, x: my_reduce_scatter(comm, x).T.contiguous(), "you return a tensor of shape (5, 6)"),
            (lambda comm, x: my_reduce_scatter(comm, x).flatten(), "you return a tensor of shape (30,)"),
            (in_x, "rank 0 of 2 has the right chunk, but x is not what it was"),
            (two_ranks_only, "rank 0 of 3 should have chunk 0"),
            (view_of_a_copy, "but 240 bytes stay on rank 0 of 2; a chunk is 120")],
        saves_nothing=(whole_tensors, "the chunks are right, but rank 0 of 2 sent {'send': 240}"),
    ),
    page.third: Answers(
        right=[sum_in_place, in_two_halves, times_the_mean],
        wrong=[
            (lambda comm, x: comm.all_reduce(x), "on rank 0 of 2 x is not the sum over ranks but what it was"),
            (lambda comm, x: x, "the tensor that you return is not the sum over ranks but what it was"),
            (returns_the_argument, "the tensor that you return is not the sum over ranks but what it was"),
            (lambda comm, x: comm.all_reduce(x, "avg", out=x),
             "the tensor that you return is not the sum over ranks but their mean"),
            (lambda comm, x: comm.all_reduce(x, "max", out=x), "is not the sum over ranks"),
            (lambda comm, x: x.mul_(comm.world_size), "is not the sum over ranks"),
            (lambda comm, x: [sum_in_place(comm, x), None][1], "not answered yet (or is a `return` missing?"),
            (without_comm, "`comm` of rank 0 of 2 counts 0 bytes; 2(N-1)/N of the tensor is 240, by collectives of"),
            (lambda comm, x: x.add_(comm.all_gather(x[None])[1 - comm.rank]), "480 bytes were taken besides x")],
        saves_nothing=(lambda comm, x: x.copy_(comm.all_reduce(x)), "the sum is right, but 240 bytes were taken"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
