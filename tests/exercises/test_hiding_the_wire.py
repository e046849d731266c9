"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import hiding_the_wire as page


def average_list(comm, gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    comm.all_reduce(flat, "avg", out=flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def average(comm, parameters, bucket_bytes, all_at_once=False):
    bucket = []
    for parameter in parameters:
        if not all_at_once and bucket and sum(g.nbytes for g in bucket) + parameter.nbytes > bucket_bytes:
            average_list(comm, bucket)
            bucket = []
        bucket.append(parameter.grad)
    average_list(comm, bucket)
    return True


def one_by_one(comm, parameters, bucket_bytes, op="avg"):
    for parameter in parameters:
        comm.all_reduce(parameter.grad, op, out=parameter.grad)
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


def held_at_once(ready, takes, nbytes, of):
    return predict(ready, takes, nbytes)[0], of(nbytes)


ANSWERS = {
    page.first: Answers(
        right=[average],
        wrong=[
            (partial(one_by_one, op="sum"), "gradient 0 on rank 0 of 2 is not the mean over ranks"),
            (one_by_one, "by 30 collectives; 5 buckets hold all 15,360 bytes"),
            (partial(average, all_at_once=True), "bytes were taken: two buckets are 8,192"),
            (gathered, "the means are right, by 15 collectives")],
    ),
    page.second: Answers(
        right=[predict],
        wrong=[
            (lambda *_: 3, "expected a pair"),
            (all_of_the_wire, "you say that a rank waits 180 ms, it is 60 ms"),
            (only_the_last, "you say that a rank waits"),
            (partial(held_at_once, of=sum), "the time is right; you say 12,288 bytes at most, it is 4,096"),
            (partial(held_at_once, of=max), "the time is right; you say")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
