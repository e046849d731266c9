"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import pytest
import torch

from refimpl.exercises import data_parallel as page


def predict(parameters, world_size, micro_batches, no_sync):
    times = 1 if no_sync else micro_batches
    return 16 * parameters, times * 2 * (world_size - 1) * 4 * parameters // world_size


def sent_with_no_sync(parameters, world_size, micro_batches, no_sync):
    return predict(parameters, world_size, micro_batches, True)


def divided_states(parameters, world_size, micro_batches, no_sync):
    states, sent = predict(parameters, world_size, micro_batches, no_sync)
    return states // world_size, sent


def average_list(comm, gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    comm.all_reduce(flat, "avg", out=flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def average(comm, parameters, bucket_bytes):
    bucket = []
    for parameter in parameters:
        if bucket and sum(g.nbytes for g in bucket) + parameter.nbytes > bucket_bytes:
            average_list(comm, bucket)
            bucket = []
        bucket.append(parameter.grad)
    average_list(comm, bucket)
    return True


def all_at_once(comm, parameters, bucket_bytes):
    average_list(comm, [parameter.grad for parameter in parameters])
    return True


def one_by_one(comm, parameters, bucket_bytes):
    for parameter in parameters:
        comm.all_reduce(parameter.grad, "avg", out=parameter.grad)
    return True


def summed(comm, parameters, bucket_bytes):
    for parameter in parameters:
        comm.all_reduce(parameter.grad, out=parameter.grad)
    return True


def gathered(comm, parameters, bucket_bytes):
    """In buckets, by gathering and adding: small buffers would need smaller buckets."""
    bucket = torch.cat([parameter.grad for parameter in parameters])
    places = torch.arange(bucket.numel()).split(256)
    for place in places:
        bucket[place] = comm.all_gather(bucket[place]).view(comm.world_size, -1).mean(0)
    for parameter, mean in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(mean)
    return True


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
    (page.first, predict), (page.second, average), (page.third, uneven_backward),
])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, divided_states, "a rank holds 1,048,5"),
    (page.first, sent_with_no_sync, "3 micro-batches: you say 393,216, a rank sends 1,179,6"),
    (page.second, summed, "gradient 0 on rank 0 of 2 is not the mean over ranks"),
    (page.second, one_by_one, "by 30 collectives; 5 buckets hold all 15,360 bytes"),
    (page.second, all_at_once, "bytes were taken: two buckets are 8,192"),
    (page.second, gathered, "the means are right, by 15 collectives"),
    (page.third, mean_of_means, "the gradient of all targets is another one"),
    (page.third, every_gradient_gathered, "the gradient is right, but a rank sent"),
    (page.third, lambda *_: True, "a parameter has no gradient"),
])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
