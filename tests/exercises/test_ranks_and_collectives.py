"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import pytest
import torch
from exercises_kit import Answers, graded

from exercises import ranks_and_collectives as page
from refimpl.comm import ring_traffic


def my_reduce_scatter(comm, x):
    N, r = comm.world_size, comm.rank
    chunks = list(x.chunk(N))
    for step in range(N - 1):
        give, take = (r - step - 1) % N, (r - step - 2) % N
        chunks[take] = chunks[take] + comm.send_recv(chunks[give], (r + 1) % N, chunks[take], (r - 1) % N)
    return chunks[r]


def sum_in_place(comm, x):
    return comm.all_reduce(x, out=x)


ANSWERS = {
    page.first: Answers(
        right=[ring_traffic],
        wrong=[
            (lambda collective, nbytes, n: nbytes, "a rank sends")],
    ),
    page.second: Answers(
        right=[my_reduce_scatter],
        wrong=[
            (lambda comm, x: comm.reduce_scatter(x), "all by send_recv"),
            (lambda comm, x: x, "should have")],
    ),
    page.third: Answers(
        right=[sum_in_place],
        wrong=[
            (lambda comm, x: comm.all_reduce(x), "bytes were taken besides x"),
            (lambda comm, x: x, "should return")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_an_error_in_the_answer_is_shown():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        page.third(lambda comm, x: torch.tensor(1 / 0))
