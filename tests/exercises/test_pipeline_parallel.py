"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import pipeline_parallel as page


def predict(ranks, micro_batches, rank, nbytes, *, all_forwards_first=False, both_ways=False, of_the_work=False):
    held = micro_batches if all_forwards_first else min(micro_batches, ranks - rank)
    neighbours = 2 if both_ways else (rank > 0) + (rank < ranks - 1)
    return held, micro_batches * neighbours * nbytes, (ranks - 1) / (micro_batches + (0 if of_the_work else ranks - 1))


def weights(targets):
    counts = [int((each != -100).sum()) for each in targets]
    return [each / sum(counts) for each in counts]


def evaluate(stage, comm, inputs, targets, loss, like, graph=False):
    p, r, total = comm.world_size, comm.rank, torch.zeros(())
    sent, kept = [], []
    for x, y in zip(inputs, targets, strict=True):
        with torch.set_grad_enabled(graph):
            x = stage(x if r == 0 else comm.recv(like, r - 1))
        kept += [x] * graph
        if r == p - 1:
            total += loss(x, y).detach() / len(inputs)
        else:
            sent.append(comm.send(x.detach(), r + 1, async_op=True))
    for handle in sent:
        handle.wait()
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


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, all_forwards_first=True), "4 ranks, 8 micro-batches: you say 8, rank 0 holds 4 micro-batches"),
            (partial(predict, both_ways=True), "4 ranks, 8 micro-batches: you say 1600, rank 0 sends 800 bytes"),
            (partial(predict, of_the_work=True), "4 ranks, 8 micro-batches: you say 0.375, rank 0 waits 0.2727 of a step"),
            (lambda *case: 7, "expected three numbers")],
    ),
    page.second: Answers(
        right=[weights],
        wrong=[
            (lambda targets: [1 / len(targets)] * len(targets), "micro-batches of (2, 2, 1) rows, some targets of none ignored: the batch's mean is"),
            (lambda targets: [len(each) / sum(map(len, targets)) for each in targets], "micro-batches of (2, 2, 1) rows, some targets of [0] ignored"),
            (lambda targets: [1], "3 micro-batches, and 1 weights")],
    ),
    page.third: Answers(
        right=[evaluate],
        wrong=[
            (partial(evaluate, graph=True), "rank 0 of 1: the loss is right, and"),
            (own, "rank 0 of 2: you return"),
            (on_the_last, "rank 0 of 2: you return 0.0, the mean loss is"),
            (twice, "rank 0 of 2: 640 bytes were sent, expected 512, 4 outputs")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
