"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import pytest

from refimpl.exercises import data_parallel as page


def predict(parameters, world_size, micro_batches, no_sync):
    times = 1 if no_sync else micro_batches
    return 16 * parameters, times * 2 * (world_size - 1) * 4 * parameters // world_size


def sent_with_no_sync(parameters, world_size, micro_batches, no_sync):
    return predict(parameters, world_size, micro_batches, True)


def divided_states(parameters, world_size, micro_batches, no_sync):
    states, sent = predict(parameters, world_size, micro_batches, no_sync)
    return states // world_size, sent


def uneven_backward(comm, model, tokens, targets):
    count = comm.all_reduce((targets != -100).sum())
    (model(tokens, targets, reduction="sum") / count).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, out=parameter.grad)
    return True


def mean_of_means(comm, model, tokens, targets):
    model(tokens, targets, reduction="sum").div((targets != -100).sum().clamp(min=1)).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, "avg", out=parameter.grad)
    return True


def every_gradient_gathered(comm, model, tokens, targets):
    count = comm.all_reduce((targets != -100).sum())
    (model(tokens, targets, reduction="sum") / count).backward()
    for parameter in model.parameters():
        parameter.grad = comm.all_gather(parameter.grad[None]).sum(0)
    return True


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, predict), (page.second, uneven_backward),
])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, divided_states, "a rank holds 1,048,5"),
    (page.first, sent_with_no_sync, "3 micro-batches: you say 393,216, a rank sends 1,179,6"),
    (page.second, mean_of_means, "the gradient of all targets is another one"),
    (page.second, every_gradient_gathered, "the gradient is right, but a rank sent"),
    (page.second, lambda *_: True, "a parameter has no gradient"),
])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
