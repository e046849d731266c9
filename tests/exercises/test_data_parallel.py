"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

from exercises_kit import Answers, graded

from exercises import data_parallel as page


def predict(parameters, world_size, micro_batches, no_sync, *, always_no_sync=False, divided_states=False):
    times = 1 if no_sync or always_no_sync else micro_batches
    states = 16 * parameters // (world_size if divided_states else 1)
    return states, times * 2 * (world_size - 1) * 4 * parameters // world_size


def uneven_backward(comm, model, tokens, targets, *, gather=False):
    count = comm.all_reduce((targets != -100).sum())
    (model(tokens, targets, reduction="sum") / count).backward()
    for parameter in model.parameters():
        own = parameter.grad
        parameter.grad = comm.all_gather(own[None]).sum(0) if gather else comm.all_reduce(own, out=own)
    return True


def mean_of_means(comm, model, tokens, targets):
    model(tokens, targets, reduction="sum").div((targets != -100).sum().clamp(min=1)).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, "avg", out=parameter.grad)
    return True


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, divided_states=True), "a rank holds 1,048,5"),
            (partial(predict, always_no_sync=True), "3 micro-batches: you say 393,216, a rank sends 1,179,6")],
    ),
    page.second: Answers(
        right=[uneven_backward],
        wrong=[
            (mean_of_means, "the gradient of all targets is another one"),
            (partial(uneven_backward, gather=True), "the gradient is right, but a rank sent"),
            (lambda *_: True, "a parameter has no gradient")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
