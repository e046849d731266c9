"""Right answers pass, wrong and unanswered ones do not; norms on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import three_dimensions as page


def predict(x, parameters, layers, micro_batches, tp, dp, *, collectives=4, neighbours=2, dp_every_time=False):
    return (2 * collectives * (tp - 1) * x // tp * layers * micro_batches, neighbours * x * micro_batches,
            2 * (dp - 1) * parameters // dp * (micro_batches if dp_every_time else 1))


def squares(parameters, counts=lambda p: True):
    return sum(p.grad.square().sum() for p in parameters if counts(p))


def global_norm(comm, parameters, copies_count=False):
    first = squares(parameters, lambda p: copies_count or comm.rank == min(p.shard_spec.replicas or (comm.rank,)))
    return comm.all_reduce(first).sqrt()


def of_this_rank(comm, parameters):
    return squares(parameters).sqrt().item()


def seconds(traffic, mesh, per_node, inside, between, by_size=False):
    last = {axis: mesh.sizes[axis] - 1 if by_size else max(mesh.ranks(axis, rank=0)) for axis in traffic}
    return {axis: nbytes / (inside if last[axis] < per_node else between) for axis, nbytes in traffic.items()}


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, dp_every_time=True), "over dp, a rank sends"),
            (partial(predict, collectives=2), "over tp, a rank sends"),
            (partial(predict, neighbours=1), "over pp, a rank sends 32,768"),
            (lambda *case: 3, "expected three numbers of bytes, over tp, pp and dp; you say 3")],
    ),
    page.second: Answers(
        right=[global_norm],
        wrong=[
            (of_this_rank, "rank 0 of 2: you say"),
            (of_this_rank, "other ranks have gradients, too"),
            (partial(global_norm, copies_count=True), "what several ranks hold counts once"),
            (lambda *_: "n", "rank 0 of 2: expected one number; you say 'n'")],
    ),
    page.third: Answers(
        right=[seconds],
        wrong=[
            (partial(seconds, by_size=True), "Mesh(dp=2, tp=4, pp=2) on nodes of 4: you say 0.003 s for pp, it takes 0.020"),
            (lambda *_: {}, "expected {axis: seconds} of tp, pp, dp; you say {}")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_gradients_are_those_of_the_whole_model():
    whole = page._gradients(page.GPT(page.CONFIG))
    assert torch.isfinite(squares(whole.parameters()))
