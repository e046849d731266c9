"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from exercises import pipeline_parallel as page
from refimpl.pipeline.named_schedules import schedule
from refimpl.pipeline.step_simulation import Costs, simulate

# --- first -----------------------------------------------------------------------------------------------------------


def predict(ranks, micro_batches, rank, nbytes):
    held = min(micro_batches, ranks - rank)
    neighbours = (rank > 0) + (rank < ranks - 1)
    return held, micro_batches * neighbours * nbytes, (ranks - 1) / (micro_batches + ranks - 1)


def by_cases(ranks, micro_batches, rank, nbytes):
    if ranks == 1:
        return 1, 0, 0.0
    held = ranks - rank if micro_batches > ranks - rank else micro_batches
    sent = micro_batches * nbytes if rank in (0, ranks - 1) else 2 * micro_batches * nbytes
    work, step = 3 * micro_batches, 3 * (micro_batches + ranks - 1)
    return [held, sent, 1 - work / step]


def by_replay(ranks, micro_batches, rank, nbytes):
    built, held, most, sent = schedule("1f1b", ranks, micro_batches), 0, 0, 0
    for kind, stage, _ in built.ranks[rank]:
        held += 1 if kind == "F" else -1
        most = max(most, held)
        sent += nbytes * (stage < ranks - 1 if kind == "F" else stage > 0)
    step = simulate(built, Costs(1, 1, 1))
    return most, sent, float(step.idle[0] / step.step_time)


def with_fault(ranks, micro_batches, rank, nbytes, *, all_first=False, any_number=False, both_ways=False, alone=False,
               of_the_work=False):
    held = micro_batches if all_first else ranks - rank if any_number else min(micro_batches, ranks - rank)
    neighbours = 2 if both_ways else max((rank > 0) + (rank < ranks - 1), int(alone))
    return held, micro_batches * neighbours * nbytes, (ranks - 1) / (micro_batches + (0 if of_the_work else ranks - 1))


# --- second ----------------------------------------------------------------------------------------------------------


def weights(targets):
    counts = [int((each != -100).sum()) for each in targets]
    return [count / sum(counts) for count in counts]


def in_fp32(targets):
    counts = torch.stack([(each >= 0).sum() for each in targets]).float()
    return list(counts / counts.sum())


def by_gradients(targets):
    """The share is what a micro-batch's mean has to do with the mean of all."""
    whole = torch.cat([each.flatten() for each in targets])
    shares, at = [], 0
    for each in targets:
        inside = torch.zeros(len(whole)).index_fill(0, torch.arange(at, at + each.numel()), 1.0)
        shares.append(float(inside[whole != -100].double().mean()))
        at += each.numel()
    return tuple(shares)


def of_counts(count):
    return lambda targets: [float(count(each) / sum(map(count, targets))) for each in targets]


# --- third -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(stage, comm, inputs, targets, loss, like):
    total, sent = torch.zeros(()), []
    for x, y in zip(inputs, targets, strict=True):
        output = stage(x if comm.rank == 0 else comm.recv(like, comm.rank - 1))
        if comm.rank == comm.world_size - 1:
            total += loss(output, y) / len(inputs)
        else:
            sent.append(comm.send(output, comm.rank + 1, async_op=True))
    for handle in sent:
        handle.wait()
    return comm.all_reduce(total)


def one_after_the_other(stage, comm, inputs, targets, loss, like):
    """Each send is waited for, and the last rank tells the others."""
    losses = []
    with torch.inference_mode():
        for x, y in zip(inputs, targets, strict=True):
            output = stage(comm.recv(like, comm.rank - 1) if comm.rank else x)
            if comm.rank < comm.world_size - 1:
                comm.send(output, comm.rank + 1)
            else:
                losses.append(loss(output, y))
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        return comm.broadcast(mean, comm.world_size - 1)


def in_two_loops(stage, comm, inputs, targets, loss, like):
    """First all outputs, then all losses; a float is returned."""
    p, r, outputs = comm.world_size, comm.rank, []
    for x in inputs:
        with torch.no_grad():
            outputs.append(stage(x if r == 0 else comm.recv(like, r - 1)))
        if r < p - 1:
            comm.send(outputs.pop(), r + 1)
    mean = loss(torch.stack(outputs), torch.stack(targets)) if outputs else torch.tensor(0.0)
    return comm.all_gather(mean)[-1].item()


def faulty(stage, comm, inputs, targets, loss, like, *, graph=False, scale=True, micro_batches=None, whole=False):
    p, r, total, outputs = comm.world_size, comm.rank, torch.zeros(()), []
    for x, y in zip(inputs[:micro_batches], targets[:micro_batches], strict=True):
        with torch.set_grad_enabled(graph):
            output = stage(x if r == 0 else comm.recv(like, r - 1))
        outputs.append(output)
        if r < p - 1:
            comm.send(output.detach(), r + 1)
        else:
            total += loss(output, y).detach() / (len(inputs) if scale else 1)
    if whole:
        comm.broadcast(torch.stack(outputs), p - 1)
    return comm.all_reduce(total)


def with_a_loss(mine):
    return lambda stage, comm, inputs, targets, loss, like: evaluate(stage, comm, inputs, targets, mine, like)


@torch.no_grad()
def own(stage, comm, inputs, targets, loss, like):
    return sum(loss(stage(x), y) for x, y in zip(inputs, targets, strict=True)) / len(inputs)


def freed(*args):
    total = evaluate(*args)
    total.untyped_storage().resize_(0)
    return total


@torch.no_grad()
def averaged(*args):
    return evaluate(*args) / args[1].world_size


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
        right=[predict, by_cases, by_replay],
        wrong=[
            (partial(with_fault, all_first=True),
             "4 ranks, 8 micro-batches: you say that rank 0 holds 8 micro-batches, it holds 4"),
            (partial(with_fault, any_number=True),
             "4 ranks, 2 micro-batches: you say that rank 0 holds 4 micro-batches, it holds 2"),
            (lambda p, m, rank, nbytes: (min(m, p), *predict(p, m, rank, nbytes)[1:]),
             "4 ranks, 8 micro-batches: you say that rank 3 holds 4 micro-batches, it holds 1"),
            (lambda p, m, rank, nbytes: (min(m, p - rank - 1), *predict(p, m, rank, nbytes)[1:]),
             "you say that rank 0 holds 3 micro-batches, it holds 4"),
            (partial(with_fault, both_ways=True),
             "4 ranks, 8 micro-batches of 100 bytes: you say that rank 0 sends 1600 bytes, it sends 800"),
            (partial(with_fault, alone=True),
             "1 ranks, 4 micro-batches of 100 bytes: you say that rank 0 sends 400 bytes, it sends 0"),
            (lambda p, m, rank, nbytes: predict(p, m, rank, 100), "of 60 bytes: you say that rank 2 sends 1600 bytes"),
            (partial(with_fault, of_the_work=True), "you say that rank 0 waits for 0.375000 of a step, it waits for "
                                                    "0.272727"),
            (lambda p, m, rank, nbytes: (*predict(p, m, rank, nbytes)[:2], (p - 1) // (m + p - 1)),
             "you say that rank 0 waits for 0.000000 of a step"),
            (lambda *case: (*predict(*case)[:2], float("nan")), "you say that rank 0 waits for nan of a step"),
            (lambda *case: predict(*case)[:2], "expected 3 values")],
        same=("micro_batches, ranks - rank → ranks - rank, micro_batches",),
    ),
    page.second: Answers(
        right=[weights, in_fp32, by_gradients],
        wrong=[
            (lambda targets: [1 / len(targets)] * len(targets), "of micro-batches with (8, 8, 4) targets that count, "
             "number 0 has a share of 0.400000; you multiply its loss by 0.333333"),
            (of_counts(len), "of micro-batches with (5, 8, 4) targets that count, number 0"),
            (of_counts(torch.numel), "(5, 8, 4) targets that count, number 0"),
            (of_counts(lambda y: (y != -100).all(-1).sum()), "(5, 8, 4) targets that count, number 0"),
            (of_counts(lambda y: (y > 0).sum()), "(8, 8, 8) targets that count, number 0"),
            (of_counts(lambda y: (y != -100).sum().clamp(1)), "(7, 0, 2, 1) targets that count, number 0"),
            (lambda targets: [int((y != -100).sum()) for y in targets], "you multiply its loss by 8.000000"),
            (lambda targets: [w * len(targets) for w in weights(targets)], "you multiply its loss by 1.000000"),
            (lambda targets: [round(w, 4) for w in weights(targets)], "0.333333; you multiply its loss by 0.333300"),
            (lambda targets: weights(targets)[::-1], "(8, 8, 4) targets that count, number 0"),
            (lambda targets: [float("nan")] * len(targets), "you multiply its loss by nan"),
            (lambda targets: [1], "3 micro-batches, and 1 weights"),
            (lambda targets: torch.tensor(weights(targets)), "expected a list")],
    ),
    page.third: Answers(
        right=[evaluate, one_after_the_other, in_two_loops],
        wrong=[
            (own, "rank 0 of 2: you return"),
            (on_the_last, "rank 0 of 2: you return 0.000000, the mean loss is"),
            (averaged, "rank 0 of 2: you return"),
            (freed, "rank 0 of 1: you return nan"),
            (partial(faulty, scale=False), "rank 0 of 1: you return"),
            (partial(faulty, micro_batches=-1), "rank 0 of 1: you return"),
            (partial(faulty, micro_batches=4), "rank 0 of 4: you return"),
            (with_a_loss(F.mse_loss), "rank 0 of 2: you return"),
            (lambda *given: float("nan"), "rank 0 of 1: you return nan"),
            (twice, "rank 0 of 2: the loss is right, but 512 bytes were sent, expected 384: 3 outputs"),
            (partial(faulty, whole=True), "rank 1 of 2: the loss is right, but collectives sent")],
        saves_nothing=(partial(faulty, graph=True), "rank 0 of 1: the loss is right, and"),
        same=("handle.wait() → pass",),  # the sum over ranks ends after every send
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
