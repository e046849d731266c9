"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import pytest
import torch

from refimpl.exercises import quantized_zero as page
from refimpl.zero.quantized import paper


def predict(numel, world_size, bits):
    n = numel // world_size
    return 3 * (world_size - 1) * (n * bits // 8 + 4 * n // 256)


def without_scales(numel, world_size, bits):
    return 3 * (world_size - 1) * numel // world_size * bits // 8


def gathered_once(numel, world_size, bits):
    return predict(numel, world_size, bits) * 2 // 3


def whole(comm, g):
    return comm.reduce_scatter(g, "avg")


def one_scale(comm, g):
    s = g.abs().max() / 127
    sent = torch.cat([(g / s).round().to(torch.int8).view(comm.world_size, -1).view(torch.uint8),
                      s.view(1).view(torch.uint8).expand(comm.world_size, 4)], 1)
    got = comm.all_to_all(sent.view(-1)).view(comm.world_size, -1)
    return sum(each[:-4].view(torch.int8) * each[-4:].clone().view(torch.float32) for each in got) / comm.world_size


def another_shape(comm, g):
    return g


@pytest.mark.parametrize(("exercise", "answer"), [(page.first, predict), (page.second, paper.reduce)])
def test_right(said, exercise, answer):
    assert said(exercise, answer).endswith("exercise: right, on parity and on bytes\n")


@pytest.mark.parametrize(("exercise", "answer", "words"), [
    (page.first, without_scales, "2 ranks, 8 bits: you say 24,576, a rank sends 24,960"),
    (page.first, gathered_once, "you say 16,640"), (page.second, whole, "the numbers are right, but a rank sent"),
    (page.second, one_scale, "times as far from the mean as half a step"),
    (page.second, another_shape, "expected this rank's shard"), (page.second, lambda comm, g: None, "not answered yet"),
    (page.first, lambda *case: ..., "not answered yet")])
def test_wrong(said, exercise, answer, words):
    assert words in said(exercise, answer)
