"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import re
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import data_parallel as page
from refimpl.comm import ring_traffic
from refimpl.zero import closed_forms

# --- first -----------------------------------------------------------------------------------------------------------


def predict(parameters, world_size, micro_batches, no_sync):
    states = (4 + 4 + 8) * parameters  # parameter, gradient, two moments
    averages = 1 if no_sync else micro_batches
    return states, averages * 2 * (world_size - 1) / world_size * 4 * parameters


def by_closed_forms(parameters, world_size, micro_batches, no_sync):
    layer = torch.nn.Linear(parameters, 1, bias=False, device="meta")
    once = ring_traffic("all_reduce", layer.weight.nbytes, world_size, 0, 4)
    states = closed_forms.model_state_bytes(layer, world_size, 0)
    return states.total, once * (1 if no_sync else micro_batches)


def by_hops(parameters, world_size, micro_batches, no_sync):
    sent, chunk = 0, 4 * parameters // world_size
    for micro_batch in range(micro_batches):
        if not no_sync or micro_batch == micro_batches - 1:
            sent += (world_size - 1) * chunk  # reduce_scatter
            sent += (world_size - 1) * chunk  # all_gather
    return 16 * parameters, sent


def with_states(states):
    return lambda parameters, n, *given: (states(parameters, n), predict(parameters, n, *given)[1])


def with_sent(sent):
    return lambda *given: (predict(*given)[0], sent(*given))


# --- second ----------------------------------------------------------------------------------------------------------


def uneven_backward(comm, model, tokens, targets):
    count = comm.all_reduce((targets != -100).sum())
    loss = model(tokens, targets, reduction="sum") / count
    loss.backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, out=parameter.grad)
    return True


def one_bucket(comm, model, tokens, targets):
    model(tokens, targets, reduction="sum").backward()
    count = comm.all_reduce(torch.tensor([(targets != -100).sum().item()]))
    parameters = list(model.parameters())
    flat = comm.all_reduce(torch.cat([p.grad.flatten() for p in parameters])) / count
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    return True


def weighted_means(comm, model, tokens, targets):
    """Weight this rank's mean by N n_r / n, as the page says, and average."""
    own = (targets != -100).sum()
    weight = comm.world_size * own / comm.all_reduce(own)
    loss = model(tokens, targets, reduction="sum") / own.clamp(min=1)
    (weight * loss).backward()
    for p in model.parameters():
        mine = comm.reduce_scatter(pad(p.grad.flatten(), comm.world_size), "avg")
        p.grad.copy_(comm.all_gather(mine)[: p.numel()].view_as(p))
    return True


def pad(x, n):
    return torch.cat([x, x.new_zeros(-len(x) % n)])


def with_fault(comm, model, tokens, targets, *, counted=lambda targets: (targets != -100).sum(), count="all", op="sum",
               gather=False, average=True):
    own = counted(targets)
    n = {"all": comm.all_reduce(own), "own": own.clamp(min=1), "none": 1}[count]
    (model(tokens, targets, reduction="sum") / n).backward()
    for parameter in model.parameters() if average else ():
        mine = parameter.grad
        parameter.grad = comm.all_gather(mine[None]).sum(0) if gather else comm.all_reduce(mine, op, out=mine)
    return True


def mean_of_losses(comm, model, tokens, targets):
    """Divide by zero on the rank that has no target."""
    model(tokens, targets, reduction="sum").div((targets != -100).sum()).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, "avg", out=parameter.grad)
    return True


def mean_of_ranks_with_targets(comm, model, tokens, targets):
    own = (targets != -100).sum()
    ranks = comm.all_reduce((own > 0).long())
    (model(tokens, targets, reduction="sum") / own.clamp(min=1) / ranks).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, out=parameter.grad)
    return True


def all_but_the_last(comm, model, tokens, targets):
    count = comm.all_reduce((targets != -100).sum())
    (model(tokens, targets, reduction="sum") / count).backward()
    for parameter in list(model.parameters())[:-1]:
        comm.all_reduce(parameter.grad, out=parameter.grad)
    return True


def that_drop_gradients(comm, model, tokens, targets):
    uneven_backward(comm, model, tokens, targets)
    for parameter in model.parameters():
        parameter.grad.untyped_storage().resize_(0)
    return True


ANSWERS = {
    page.first: Answers(
        right=[predict, by_closed_forms, by_hops],
        wrong=[
            (with_states(lambda parameters, n: 16 * parameters // n), "2 ranks, 1 micro-batch: you say 524,288, a rank "
             "holds 1,048,5"),
            (with_states(lambda parameters, n: 12 * parameters), "1 rank, 1 micro-batch: you say 786,432, a rank"),
            (with_states(lambda parameters, n: 8 * parameters), "1 rank, 1 micro-batch: you say 524,288, a rank"),
            (with_states(lambda parameters, n: 20 * parameters), "1 rank, 1 micro-batch: you say 1,310,720"),
            (with_states(lambda parameters, n: 2**20), "147,456 parameters, 4 ranks, 3 micro-batches: you say 1,048,5"),
            (with_sent(lambda parameters, n, m, no_sync: 8 * parameters), "1 rank, 1 micro-batch: you say 524,288, a "
             "rank sends 0 bytes"),
            (with_sent(lambda parameters, n, m, no_sync: 8 * (n - 1) / n * parameters),
             "4 ranks, 3 micro-batches: you say 884,736.0, a rank sends 2,654,2"),
            (with_sent(lambda parameters, n, m, no_sync: m * 8 * (n - 1) / n * parameters),
             "3 micro-batches, no_sync: you say 2,654,208.0, a rank sends 884,7"),
            (with_sent(lambda parameters, n, m, no_sync: (1 if no_sync else m) * 4 * (n - 1) / n * parameters),
             "2 ranks, 1 micro-batch: you say 131,072.0, a rank sends 262,1"),
            (with_sent(lambda parameters, n, m, no_sync: (1 if no_sync else m) * 8 * (n - 1) * parameters),
             "2 ranks, 1 micro-batch: you say 524,288, a rank sends 262,1"),
            (lambda *given: predict(*given)[1], "expected 2 values (a number, a number)")],
    ),
    page.second: Answers(
        right=[uneven_backward, one_bucket, weighted_means],
        wrong=[
            (mean_of_losses, "rank 0 of 2 is off by 0.42 of its norm"),
            (partial(with_fault, count="own", op="avg"), "the gradient of the mean over all ranks' targets is another"),
            (partial(with_fault, count="own"), "rank 0 of 2 is off by 1.3 of its norm"),
            (partial(with_fault, op="avg"), "rank 0 of 2 is off by 0.5 of its norm"),
            (partial(with_fault, count="none"), "rank 0 of 2 is off by 39 of its norm"),
            (partial(with_fault, average=False), "rank 0 of 2 is off by 0.52 of its norm"),
            (partial(with_fault, counted=lambda targets: torch.tensor(targets.numel())), "rank 0 of 2 is off by"),
            (partial(with_fault, counted=lambda targets: (targets > 0).sum()), "rank 0 of 4 is off by"),
            (mean_of_ranks_with_targets, "rank 0 of 2 is off by 0.42"),
            (all_but_the_last, re.compile("rank 0 of 2 is off by 0.005 of its norm, most in .*bias")),
            (that_drop_gradients, "has no gradient on rank 0 of 2"),
            (lambda *_: True, "has no gradient on rank 0 of 2")],
        saves_nothing=(partial(with_fault, gather=True), "the gradient is right, but rank 0 of 4 sent"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
