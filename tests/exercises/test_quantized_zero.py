"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import quantized_zero as page
from refimpl.papers import quantized_zero as paper


def predict(numel, world_size, bits, *, times=3, scale_bytes=4):
    n = numel // world_size
    return times * (world_size - 1) * (n * bits // 8 + scale_bytes * n // 256)


def one_scale(comm, g):
    s = g.abs().max() / 127
    sent = torch.cat([(g / s).round().to(torch.int8).view(comm.world_size, -1).view(torch.uint8),
                      s.view(1).view(torch.uint8).expand(comm.world_size, 4)], 1)
    got = comm.all_to_all(sent.view(-1)).view(comm.world_size, -1)
    return sum(each[:-4].view(torch.int8) * each[-4:].clone().view(torch.float32) for each in got) / comm.world_size


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, scale_bytes=0), "2 ranks, 8 bits: you say 24,576, a rank sends 24,960"),
            (partial(predict, times=2), "you say 16,640")],
    ),
    page.second: Answers(
        right=[paper.reduce],
        wrong=[
            (lambda comm, g: comm.reduce_scatter(g, "avg"), "the numbers are right, but a rank sent"),
            (one_scale, "times as far from the mean as half a step"),
            (lambda comm, g: g, "expected this rank's shard")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
