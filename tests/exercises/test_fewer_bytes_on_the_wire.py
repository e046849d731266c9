"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import functools

import torch
from exercises_kit import Answers, graded

from exercises import fewer_bytes_on_the_wire as page


def predict(numel, ratio, world_size, *, index_bytes=4, least=1):
    return (world_size - 1) * (4 + index_bytes) * max(least, round(ratio * numel))


def make(comm, ratio, keep=True, dense=False):
    residual = 0

    def average(gradient):
        nonlocal residual
        x = gradient + residual
        k = round(ratio * len(x))
        places = x.abs().topk(k).indices
        payload = torch.cat([places.int().view(torch.uint8), x[places].view(torch.uint8)])
        residual = x.index_fill(0, places, 0) if keep else 0
        if dense:
            return comm.all_reduce(x - x.index_fill(0, places, 0), "avg")
        total = torch.zeros_like(x)
        for sent in comm.all_gather(payload).view(comm.world_size, -1):
            total.index_add_(0, sent[: 4 * k].view(torch.int32), sent[4 * k :].view(torch.float32))
        return total / comm.world_size

    return average


def reduce(intra, inter, x):
    return intra.all_gather(inter.all_reduce(intra.reduce_scatter(x)))


def all_within(intra, inter, x):
    shard = intra.all_reduce(x).chunk(intra.world_size)[intra.rank]
    return intra.all_gather(inter.all_reduce(shard))


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (functools.partial(predict, index_bytes=8), "10,000 numbers, ratio 0.01, 2 ranks: you say 1,200, a rank sends 800"),
            (functools.partial(predict, least=0), "100 numbers, ratio 0.001, 2 ranks: you say 0, a rank sends 8")],
    ),
    page.second: Answers(
        right=[make],
        wrong=[
            (functools.partial(make, keep=False), "another average in step 1: is what was not sent kept"),
            (functools.partial(make, dense=True), "the averages are right, but rank 0 sent")],
    ),
    page.third: Answers(
        right=[reduce],
        wrong=[
            (lambda intra, inter, x: intra.all_reduce(x), "rank 0 of 4 does not have the sum of all ranks"),
            (lambda intra, inter, x: inter.all_reduce(intra.all_reduce(x)), "bytes between machines; 1,600 are enough"),
            (all_within, "bytes within its machine; 3,200 are enough")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
