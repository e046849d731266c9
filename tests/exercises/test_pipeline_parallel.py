"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import pytest
import torch

from refimpl.exercises import pipeline_parallel as page


def predict(ranks, micro_batches, rank, nbytes):
    neighbours = (rank > 0) + (rank < ranks - 1)
    return (min(micro_batches, ranks - rank), micro_batches * neighbours * nbytes,
            (ranks - 1) / (micro_batches + ranks - 1))


def all_forwards_first(ranks, micro_batches, rank, nbytes):
    return micro_batches, *predict(ranks, micro_batches, rank, nbytes)[1:]


def both_ways(ranks, micro_batches, rank, nbytes):
    held, _, waits = predict(ranks, micro_batches, rank, nbytes)
    return held, 2 * micro_batches * nbytes, waits


def of_the_work(ranks, micro_batches, rank, nbytes):
    return *predict(ranks, micro_batches, rank, nbytes)[:2], (ranks - 1) / micro_batches


def weights(targets):
    counts = [int((each != -100).sum()) for each in targets]
    return [each / sum(counts) for each in counts]


def equal(targets):
    return [1 / len(targets)] * len(targets)


def by_rows(targets):
    return [len(each) / sum(map(len, targets)) for each in targets]


@torch.no_grad()
def evaluate(stage, comm, inputs, targets, loss, like):
    p, r, total = comm.world_size, comm.rank, torch.zeros(())
    sent = []
    for x, y in zip(inputs, targets, strict=True):
        x = stage(x if r == 0 else comm.recv(like, r - 1))
        if r == p - 1:
            total += loss(x, y) / len(inputs)
        else:
            sent.append(comm.send(x, r + 1, async_op=True))
    for handle in sent:
        handle.wait()
    return comm.all_reduce(total)


def with_graph(stage, comm, inputs, targets, loss, like):
    p, r, total = comm.world_size, comm.rank, torch.zeros(())
    kept = []
    for x, y in zip(inputs, targets, strict=True):
        x = stage(x if r == 0 else comm.recv(like, r - 1))
        kept.append(x)
        if r == p - 1:
            total += loss(x, y).detach() / len(inputs)
        else:
            comm.send(x.detach(), r + 1)
    return comm.all_reduce(total)


@torch.no_grad()
def own(stage, comm, inputs, targets, loss, like):
    return sum(loss(stage(x), y) for x, y in zip(inputs, targets, strict=True)) / len(inputs)


def on_the_last(*args):
    comm = args[1]
    total = evaluate(*args)
    return total if comm.rank == comm.world_size - 1 else torch.zeros(())


def twice(stage, comm, inputs, targets, loss, like):
    if comm.rank < comm.world_size - 1:
        comm.send(like, comm.rank + 1, async_op=True)
    if comm.rank:
        comm.recv(like, comm.rank - 1)
    return evaluate(stage, comm, inputs, targets, loss, like)


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, predict), (page.second, weights), (page.third, evaluate)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, all_forwards_first, "4 ranks, 8 micro-batches: you say 8, rank 0 holds 4 micro-batches"),
    (page.first, both_ways, "4 ranks, 8 micro-batches: you say 1600, rank 0 sends 800 bytes"),
    (page.first, of_the_work, "4 ranks, 8 micro-batches: you say 0.375, rank 0 waits 0.2727 of a step"),
    (page.first, lambda *case: 7, "expected three numbers"),
    (page.second, equal, "micro-batches of (2, 2, 1) rows, some targets of none ignored: the batch's mean is"),
    (page.second, by_rows, "micro-batches of (2, 2, 1) rows, some targets of [0] ignored"),
    (page.second, lambda targets: [1], "3 micro-batches, and 1 weights"),
    (page.third, with_graph, "rank 0 of 1: the loss is right, and"),
    (page.third, own, "rank 0 of 2: you return"),
    (page.third, on_the_last, "rank 0 of 2: you return 0.0, the mean loss is"),
    (page.third, twice, "rank 0 of 2: 640 bytes were sent, expected 512, 4 outputs")])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
