"""Right answers pass, wrong and unanswered ones do not; norms on real ranks."""

import pytest
import torch

from refimpl.exercises import three_dimensions as page


def predict(x, parameters, layers, micro_batches, tp, dp):
    return (8 * (tp - 1) * x // tp * layers * micro_batches, 2 * x * micro_batches, 2 * (dp - 1) * parameters // dp)


def dp_in_every_micro_batch(*case):
    return *predict(*case)[:2], predict(*case)[2] * case[3]


def forward_alone(*case):
    return predict(*case)[0] // 2, *predict(*case)[1:]


def one_neighbour(*case):
    return predict(*case)[0], predict(*case)[1] // 2, predict(*case)[2]


def squares(parameters, counts=lambda p: True):
    return sum(p.grad.square().sum() for p in parameters if counts(p))


def global_norm(comm, parameters):
    first = squares(parameters, lambda p: comm.rank == min(p.shard_spec.replicas or (comm.rank,)))
    return comm.all_reduce(first).sqrt()


def of_this_rank(comm, parameters):
    return squares(parameters).sqrt().item()


def copies_count(comm, parameters):
    return comm.all_reduce(squares(parameters)).sqrt()


def seconds(traffic, mesh, per_node, inside, between):
    groups = {axis: mesh.ranks(axis, rank=0) for axis in traffic}
    return {axis: nbytes / (inside if max(groups[axis]) < per_node else between) for axis, nbytes in traffic.items()}


def by_size(traffic, mesh, per_node, inside, between):
    return {axis: nbytes / (inside if mesh.sizes[axis] <= per_node else between) for axis, nbytes in traffic.items()}


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, predict), (page.second, global_norm), (page.third, seconds)])
def test_right_answers(said, exercise, answer):
    assert "right" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, dp_in_every_micro_batch, "over dp, a rank sends"),
    (page.first, forward_alone, "over tp, a rank sends"),
    (page.first, one_neighbour, "over pp, a rank sends 32,768"),
    (page.first, lambda *case: 3, "expected three numbers of bytes, over tp, pp and dp; you say 3"),
    (page.second, of_this_rank, "rank 0 of 2: you say"), (page.second, of_this_rank, "other ranks have gradients, too"),
    (page.second, copies_count, "what several ranks hold counts once"),
    (page.second, lambda *_: "n", "rank 0 of 2: expected one number; you say 'n'"),
    (page.third, by_size, "Mesh(dp=2, tp=4, pp=2) on nodes of 4: you say 0.003 s for pp, it takes 0.020"),
    (page.third, lambda *_: {}, "expected {axis: seconds} of tp, pp, dp; you say {}")])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)


def test_gradients_are_those_of_the_whole_model():
    whole = page._gradients(page.GPT(page.CONFIG))
    assert torch.isfinite(squares(whole.parameters()))
