"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import hiding_the_wire as page

# --- first -----------------------------------------------------------------------------------------------------------


def average_bucket(comm, gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    comm.all_reduce(flat, "avg", out=flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def average(comm, parameters, bucket_bytes):
    bucket, nbytes = [], 0
    for parameter in parameters:
        if bucket and nbytes + parameter.grad.nbytes > bucket_bytes:
            average_bucket(comm, bucket)
            bucket, nbytes = [], 0
        bucket.append(parameter.grad)
        nbytes += parameter.grad.nbytes
    average_bucket(comm, bucket)
    return True


def in_one_buffer(comm, parameters, bucket_bytes):
    """The same buffer for all buckets, cut through gradients: each bucket but the last is full."""
    buffer, filled, waiting = torch.empty(bucket_bytes // 4), 0, []

    def send():
        part = buffer[:filled]
        comm.all_reduce(part, "sum", out=part)
        for piece, begin in waiting:
            piece.copy_(part[begin : begin + len(piece)] / comm.world_size)

    for gradient in (parameter.grad.view(-1) for parameter in reversed(parameters)):
        while len(gradient):
            piece, gradient = gradient[: len(buffer) - filled], gradient[len(buffer) - filled :]
            buffer[filled : filled + len(piece)] = piece
            waiting.append((piece, filled))
            filled += len(piece)
            if filled == len(buffer):
                send()
                filled, waiting = 0, []
    if filled:
        send()
    return True


def by_recursion(comm, parameters, bucket_bytes):
    number, nbytes = 0, 0
    while number < len(parameters) and nbytes + parameters[number].nbytes <= bucket_bytes:
        nbytes += parameters[number].nbytes
        number += 1
    mean = comm.all_reduce(torch.nn.utils.parameters_to_vector(p.grad for p in parameters[:number])) / comm.world_size
    for parameter in parameters[:number]:
        part, mean = mean.tensor_split([parameter.numel()])
        parameter.grad = part.clone().view_as(parameter)
    del mean, part
    return number == len(parameters) or by_recursion(comm, parameters[number:], bucket_bytes)


def with_fault(comm, parameters, bucket_bytes, *, limit=1, last=True, sent=average_bucket, first=0):
    bucket, nbytes = [], 0
    for parameter in parameters[first:]:
        if bucket and nbytes + parameter.grad.nbytes > limit * bucket_bytes:
            sent(comm, bucket)
            bucket, nbytes = [], 0
        bucket.append(parameter.grad)
        nbytes += parameter.grad.nbytes
    if last:
        sent(comm, bucket)
    return True


def one_by_one(comm, parameters, bucket_bytes, op="avg"):
    for parameter in parameters:
        comm.all_reduce(parameter.grad, op, out=parameter.grad)
    return True


def gathered(comm, parameters, bucket_bytes):
    """In full buckets, each gathered whole: N buckets of buffers."""
    def sent(comm, gradients):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = comm.all_gather(flat).view(comm.world_size, -1).mean(0)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    return with_fault(comm, parameters, bucket_bytes, sent=sent)


def not_copied_back(comm, gradients):
    comm.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), "avg")


def summed(comm, gradients):
    average_bucket(comm, gradients)
    for gradient in gradients:
        gradient.mul_(comm.world_size)


def transposed(comm, gradients):
    average_bucket(comm, gradients)
    for gradient in gradients:
        gradient.copy_(gradient.T.reshape(gradient.shape).clone())


def flat_gradients(comm, parameters, bucket_bytes):
    average(comm, parameters, bucket_bytes)
    for parameter in parameters:
        parameter.data, parameter.grad = parameter.data.flatten(), None
        parameter.grad = torch.zeros_like(parameter)
    return True


def in_bf16(comm, gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients]).bfloat16()
    comm.all_reduce(flat, "avg", out=flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def all_at_once(comm, parameters, bucket_bytes):
    average_bucket(comm, [parameter.grad for parameter in parameters])
    return True


def buckets_made_first(comm, parameters, bucket_bytes):
    buckets = []
    with_fault(comm, parameters, bucket_bytes, sent=lambda comm, gradients: buckets.append(
        (gradients, torch.cat([gradient.flatten() for gradient in gradients]))))
    for gradients, flat in buckets:
        comm.all_reduce(flat, "avg", out=flat)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
    return True


def with_new_gradients(comm, parameters, bucket_bytes):
    """Leave the old gradients alive, beside their means."""
    old = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = parameter.grad.clone()
    return average(comm, parameters, bucket_bytes) and len(old) == len(parameters)


def that_drop_gradients(comm, parameters, bucket_bytes):
    average(comm, parameters, bucket_bytes)
    for parameter in parameters:
        parameter.grad.untyped_storage().resize_(0)
    return True


def no_gradients_left(comm, parameters, bucket_bytes):
    average(comm, parameters, bucket_bytes)
    for parameter in parameters:
        parameter.grad = None
    return True


# --- second ----------------------------------------------------------------------------------------------------------


def predict(ready, takes, nbytes):
    free, ends = 0, []
    for complete, duration in zip(ready, takes, strict=True):
        free = max(free, complete) + duration
        ends.append(free)
    held = [sum(size for begin, end, size in zip(ready, ends, nbytes, strict=True) if begin <= now < end)
            for now in ready]
    return free - ready[-1], max(held)


def by_events(ready, takes, nbytes):
    free, events = 0, []
    for begin, duration, size in zip(ready, takes, nbytes, strict=True):
        free = max(free, begin) + duration
        events += [(begin, size), (free, -size)]
    now = most = 0
    for _, change in sorted(events):  # at one moment what is freed, below 0, comes first
        now += change
        most = max(most, now)
    return free - ready[-1], most


def by_queue(ready, takes, nbytes):
    queue, now, most = [], 0, 0
    for begin, duration, size in zip(ready, takes, nbytes, strict=True):
        while queue and queue[0][0] <= begin:
            now -= queue.pop(0)[1]
        queue.append((max([begin, *(end for end, _ in queue[-1:])]) + duration, size))
        now += size
        most = max(most, now)
    return float(queue[-1][0] - ready[-1]), most


def waits(of):
    return lambda *given: (of(*given), predict(*given)[1])


def held_at_once(of):
    return lambda *given: (predict(*given)[0], of(*given))


def _ends(ready, takes):
    return [predict(ready[: i + 1], takes[: i + 1], takes[: i + 1])[0] + ready[i] for i in range(len(ready))]


def still_there_at_the_end(ready, takes, nbytes):
    """A copy is there at the moment at which it is sent."""
    return max(sum(size for begin, end, size in zip(ready, _ends(ready, takes), nbytes, strict=True)
                   if begin <= now <= end) for now in ready)


def without_the_one_that_begins(ready, takes, nbytes):
    return max(sum(size for begin, end, size in zip(ready, _ends(ready, takes), nbytes, strict=True)
                   if begin < now < end) for now in ready)


def without_a_queue(ready, takes, nbytes):
    return max(sum(size for begin, own, size in zip(ready, takes, nbytes, strict=True) if begin <= now < begin + own)
               for now in ready)


def at_the_last(ready, takes, nbytes):
    return sum(size for end, size in zip(_ends(ready, takes), nbytes, strict=True) if end > ready[-1])


ANSWERS = {
    page.first: Answers(
        right=[average, in_one_buffer, by_recursion],
        wrong=[
            (partial(with_fault, sent=summed), "rank 0 of 2, buckets of 2,048: gradient 0 of 80 is not the mean"),
            (partial(with_fault, last=False), "gradient 76 of 80 is not the mean"),
            (partial(with_fault, first=1), "gradient 0 of 80 is not the mean"),
            (partial(with_fault, sent=not_copied_back), "gradient 0 of 80 is not the mean over ranks"),
            (partial(with_fault, sent=transposed), "gradient 0 of 80 is not the mean over ranks"),
            (partial(with_fault, sent=in_bf16), "gradient 0 of 80 is not the mean over ranks"),
            (flat_gradients, "gradient 0 of 80 is not the mean over ranks"),
            (no_gradients_left, "gradient 0 of 80 is not the mean over ranks"),
            (that_drop_gradients, "gradient 0 of 80 is not the mean over ranks"),
            (one_by_one, "the means are right, by 80 collectives; 8 buckets hold all 14,336 bytes"),
            (partial(with_fault, limit=0.5), "the means are right, by 16 collectives; 8 buckets"),
            (all_at_once, "the means are right, but a collective has a tensor of 14,336 bytes"),
            (partial(with_fault, limit=1.1), "the means are right, but a collective has a tensor of 2,"),
            (buckets_made_first, "bytes were taken at once: two buckets are 4,096"),
            (gathered, "bytes were taken at once: two buckets are")],
        same=("0 → 1", "> → >="),  # a bucket is counted as a byte larger, or is sent just before it is full
        saves_nothing=(with_new_gradients, "the means are right, but 16,368 bytes were taken at once: two buckets are"),
    ),
    page.second: Answers(
        right=[predict, by_events, by_queue],
        same=("free, complete → complete, free",),
        wrong=[
            (lambda *_: 3, "expected 2 values (a number, a number)"),
            (waits(lambda ready, takes, nbytes: sum(takes)), "you say that a rank waits 180 ms, it is 60 ms"),
            (waits(lambda ready, takes, nbytes: takes[-1]), "you say that a rank waits 62 ms, it is 116 ms"),
            (waits(lambda ready, takes, nbytes: _ends(ready, takes)[-1]), "you say that a rank waits 360 ms, it is 60"),
            (waits(lambda ready, takes, nbytes: max(0, sum(takes) - ready[-1])), "you say that a rank waits 0 ms"),
            (waits(lambda ready, takes, nbytes: ready[0] + sum(takes) - ready[-1]), "a rank waits -20 ms, it is 60 ms"),
            (held_at_once(lambda ready, takes, nbytes: sum(nbytes)), "the time is right; you say 12,288 bytes at most, "
             "it is 4,096"),
            (held_at_once(lambda ready, takes, nbytes: max(nbytes)), "the time is right; you say 4,000 bytes at most, "
             "it is 7,000"),
            (held_at_once(still_there_at_the_end), "you say 5,000 bytes at most, it is 3,000"),
            (held_at_once(without_the_one_that_begins), "you say 0 bytes at most, it is 4,096"),
            (held_at_once(without_a_queue), "bytes at most, it is"),
            (held_at_once(at_the_last), "you say 1,000 bytes at most, it is 7,000"),
            (lambda *given: predict(*given)[::-1], "you say that a rank waits 4096 ms, it is 60 ms")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
