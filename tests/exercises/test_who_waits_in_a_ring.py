"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import torch
from exercises_kit import Answers, graded

from exercises import who_waits_in_a_ring as page


def to_heads(comm, x):
    N, H = comm.world_size, x.shape[1]
    parts = comm.all_to_all(x.unflatten(1, (N, H // N)).movedim(1, 0).contiguous())
    return parts.movedim(0, 2).flatten(2, 3)


def to_tokens(comm, x):
    parts = comm.all_to_all(x.unflatten(2, (comm.world_size, -1)).movedim(2, 0).contiguous())
    return parts.movedim(0, 1).flatten(1, 2)


def ulysses(comm, q, k, v, attention):
    return to_tokens(comm, attention(*(to_heads(comm, x) for x in (q, k, v))))


def gathered(comm, q, k, v, attention):
    N, r = comm.world_size, comm.rank
    every = [torch.cat(comm.all_gather(x.contiguous()).chunk(N), 2).chunk(N, 1)[r] for x in (q, k, v)]
    out = comm.all_gather(attention(*every).contiguous())
    return torch.cat(out.chunk(N), 1).chunk(N, 2)[r]


ANSWERS = {
    page.first: Answers(
        right=[ulysses],
        wrong=[
            (lambda comm, q, k, v, attention: attention(q, k, v), "rank 0 of 2: attention was given [[(2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16, 4)]]"),
            (lambda *given: ulysses(*given).flip(1), "rank 0 of 1: the output is not that of the whole sequence"),
            (gathered, "the output is right, but 16,384 bytes were sent; 8,192 are enough"),
            (lambda comm, *qkv: 3, "rank 0 of 1: the output is 3, expected (2, 8, 32, 4)")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
