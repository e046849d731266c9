"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import pytest
import torch

from refimpl.exercises import hiding_the_wire as page


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


def predict(ready, takes, nbytes):
    free, ends = 0, []
    for at, own in zip(ready, takes, strict=True):
        free = max(free, at) + own
        ends.append(free)
    held = [sum(size for begin, end, size in zip(ready, ends, nbytes, strict=True) if begin <= at < end)
            for at in ready]
    return free - ready[-1], max(held)


def all_of_the_wire(ready, takes, nbytes):
    """As if nothing were hidden."""
    return sum(takes), predict(ready, takes, nbytes)[1]


def only_the_last(ready, takes, nbytes):
    """As if the wire were always free."""
    return takes[-1], predict(ready, takes, nbytes)[1]


def everything_at_once(ready, takes, nbytes):
    return predict(ready, takes, nbytes)[0], sum(nbytes)


def one_at_a_time(ready, takes, nbytes):
    return predict(ready, takes, nbytes)[0], max(nbytes)


@pytest.mark.parametrize(("exercise", "answer"), [(page.first, average), (page.second, predict)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, summed, "gradient 0 on rank 0 of 2 is not the mean over ranks"),
    (page.first, one_by_one, "by 30 collectives; 5 buckets hold all 15,360 bytes"),
    (page.first, all_at_once, "bytes were taken: two buckets are 8,192"),
    (page.first, gathered, "the means are right, by 15 collectives"),
    (page.second, lambda *_: 3, "expected a pair"),
    (page.second, all_of_the_wire, "you say that a rank waits 180 ms, it is 60 ms"),
    (page.second, only_the_last, "you say that a rank waits"),
    (page.second, everything_at_once, "the time is right; you say 12,288 bytes at most, it is 4,096"),
    (page.second, one_at_a_time, "the time is right; you say"),
])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
