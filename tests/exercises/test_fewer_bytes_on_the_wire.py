"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

import math
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import fewer_bytes_on_the_wire as page
from refimpl.comm import two_level_all_reduce
from refimpl.compression import GradientCompressor
from refimpl.papers import compression as paper

# --- first -----------------------------------------------------------------------------------------------------------


def predict(numel, ratio, world_size):
    k = max(1, round(ratio * numel))
    payload = 4 * k + 4 * k  # places, numbers
    return (world_size - 1) * payload


def by_tensors(numel, ratio, world_size):
    k = round(ratio * numel) or 1
    places, numbers = torch.empty(k, dtype=torch.int32), torch.empty(k)
    return sum(places.nbytes + numbers.nbytes for _ in range(1, world_size))


def by_library(numel, ratio, world_size):
    return GradientCompressor("topk", ratio).payload_bytes((numel,)) * (world_size - 1)


def with_fault(numel, ratio, world_size, *, place=4, k=round, least=1, sent=lambda n: n - 1):
    return sent(world_size) * (4 + place) * max(least, k(ratio * numel))


# --- second ----------------------------------------------------------------------------------------------------------


def make(comm, ratio):
    residual = 0

    def average(gradient):
        nonlocal residual
        x = gradient + residual
        k = max(1, round(ratio * len(x)))
        places = x.abs().topk(k).indices
        residual = x.index_fill(0, places, 0)
        all_places = comm.all_gather(places.int())
        all_numbers = comm.all_gather(x[places])
        return torch.zeros_like(x).index_add_(0, all_places, all_numbers) / comm.world_size

    return average


def make_of_bytes(comm, ratio):
    state = {}

    def average(gradient):
        x = gradient + state.get("residual", torch.zeros_like(gradient))
        places = x.abs().argsort(descending=True)[: max(1, round(ratio * x.numel()))]
        sent = x[places]
        state["residual"] = x.clone()
        state["residual"][places] = 0
        payloads = comm.all_gather(torch.cat([places.int().view(torch.uint8), sent.view(torch.uint8)]))
        total = torch.zeros_like(x)
        for payload in payloads.chunk(comm.world_size):
            where, numbers = payload.chunk(2)
            total[where.view(torch.int32).long()] += numbers.view(torch.float32) / comm.world_size
        return total

    return average


def make_from_paper(comm, ratio):
    topk = paper.TopK(comm, ratio)
    return lambda gradient: topk.average("the only one", gradient)


def make_with_fault(comm, ratio, *, largest=torch.abs, k=lambda x: max(1, round(x)), kept="rest", int_type=torch.int32,
                    dense=False, mean=True, add=True, of_gradient=False):
    residual = 0

    def average(gradient):
        nonlocal residual
        x = gradient + residual
        places = largest(x).topk(k(ratio * len(x))).indices
        sent = x if not of_gradient else gradient
        if kept == "rest":
            residual = x.index_fill(0, places, 0)
        elif kept == "of this step":
            residual = gradient.index_fill(0, places, 0)
        elif kept == "everything":
            residual = x
        elif kept == "sent":
            residual = x - x.index_fill(0, places, 0)
        total = torch.zeros_like(x)
        if dense:
            return comm.all_reduce(x - x.index_fill(0, places, 0), "avg")
        all_places, numbers = comm.all_gather(places.to(int_type)).long(), comm.all_gather(sent[places])
        total = total.index_add_(0, all_places, numbers) if add else total.index_copy_(0, all_places, numbers)
        return total / (comm.world_size if mean else 1)

    return average


def the_first_ratio(comm, ratio):
    return make(comm, 0.01)


def of_own_places(comm, ratio):
    """Each rank keeps the whole mean at its own places alone."""
    average = make(comm, ratio)

    def own(gradient):
        mean = average(gradient)
        return mean * (mean == mean.abs().max())

    return own


def in_fp64(comm, ratio):
    average = make(comm, ratio)
    return lambda gradient: average(gradient).double()


def in_two_rows(comm, ratio):
    average = make(comm, ratio)
    return lambda gradient: average(gradient).view(2, -1)


def the_same_tensor(comm, ratio):
    """Right, in memory that is written to again."""
    average, buffer = make(comm, ratio), []

    def into(gradient):
        if not buffer:
            buffer.append(torch.empty_like(gradient))
        return buffer[0].copy_(average(gradient))

    return into


def that_drop_the_average(comm, ratio):
    average = make(comm, ratio)

    def dropped(gradient):
        found = average(gradient)
        found.untyped_storage().resize_(0)
        return found

    return dropped


def no_tensor(comm, ratio):
    average = make(comm, ratio)
    return lambda gradient: average(gradient).tolist()


# --- third -----------------------------------------------------------------------------------------------------------


def reduce(intra, inter, x):
    shard = intra.reduce_scatter(x)
    shard = inter.all_reduce(shard)
    return intra.all_gather(shard)


def reduce_with_parts(intra, inter, x):
    """By all_to_all within a machine; between machines in two halves, padded."""
    shard = intra.all_to_all(x).view(intra.world_size, -1).sum(0)
    out = torch.empty_like(x)
    intra.all_gather(inter.all_reduce(shard, "avg") * inter.world_size, out=out)
    return out


def only_first_machine(intra, inter, x):
    return intra.all_reduce(x)


def all_within(intra, inter, x):
    shard = intra.all_reduce(x).chunk(intra.world_size)[intra.rank]
    return intra.all_gather(inter.all_reduce(shard.contiguous()))


def gathered_between(intra, inter, x):
    shard = intra.reduce_scatter(x)
    return intra.all_gather(inter.all_gather(shard).view(inter.world_size, -1).sum(0))


def whole_between(intra, inter, x):
    return intra.all_reduce(inter.all_reduce(x))


def without_gather(intra, inter, x):
    return inter.all_reduce(intra.reduce_scatter(x))


def means(intra, inter, x):
    return intra.all_gather(inter.all_reduce(intra.reduce_scatter(x, "avg"), "avg"))


def mean_between(intra, inter, x):
    return intra.all_gather(inter.all_reduce(intra.reduce_scatter(x), "avg"))


def for_two_machines(intra, inter, x):
    return intra.all_gather(inter.all_reduce(intra.reduce_scatter(x), "avg")) * 2


def in_rows(intra, inter, x):
    return reduce(intra, inter, x).view(intra.world_size, -1)


def parts_in_another_order(intra, inter, x):
    return torch.cat(reduce(intra, inter, x).chunk(intra.world_size)[::-1])


def in_bf16_between(intra, inter, x):
    return intra.all_gather(inter.all_reduce(intra.reduce_scatter(x).bfloat16()).float())


def that_drop_the_sum(intra, inter, x):
    total = reduce(intra, inter, x)
    total.untyped_storage().resize_(0)
    return total


ANSWERS = {
    page.first: Answers(
        right=[predict, by_tensors, by_library],
        wrong=[
            (partial(with_fault, place=8), "10,000 numbers, ratio 0.01, 2 ranks: you say 1,200, a rank sends 800 bytes "
             "for 100 of the numbers"),
            (partial(with_fault, place=0), "you say 400, a rank sends 800"),
            (partial(with_fault, place=2), "you say 600, a rank sends 800"),
            (partial(with_fault, least=0), "100 numbers, ratio 0.001, 3 ranks: you say 0, a rank sends 16"),
            (partial(with_fault, k=int), "1,078 numbers, ratio 0.1, 3 ranks: you say 1,712, a rank sends 1,728"),
            (partial(with_fault, k=math.ceil), "1,043 numbers, ratio 0.01, 2 ranks: you say 88, a rank sends 80"),
            (partial(with_fault, sent=lambda n: n), "you say 1,600, a rank sends 800"),
            (partial(with_fault, sent=lambda n: 1), "10,000 numbers, ratio 0.05, 4 ranks: you say 4,000, a rank sends "
             "12,000"),
            (partial(with_fault, sent=lambda n: 2 * (n - 1) / n), "4 ranks: you say 6,000.0, a rank sends 12,000"),
            (lambda numel, ratio, n: 2 * (n - 1) * 4 * numel // n, "you say 40,000, a rank sends 800")],
        same=("1, round(ratio * numel) → round(ratio * numel), 1",),
    ),
    page.second: Answers(
        right=[make, make_of_bytes, make_from_paper, the_same_tensor],
        wrong=[
            (partial(make_with_fault, kept="nothing"), "another average in step 1, in"),
            (partial(make_with_fault, kept="of this step"), "another average in step 2, in"),
            (partial(make_with_fault, kept="everything"), "is what was not sent, and only that, kept and added?"),
            (partial(make_with_fault, kept="sent"), "another average in step 1, in"),
            (partial(make_with_fault, of_gradient=True), "another average in step 1, in"),
            (partial(make_with_fault, largest=lambda x: x), "rank 0 of 2: another average in step 0, in"),
            (partial(make_with_fault, largest=lambda x: -x.abs()), "another average in step 0, in"),
            (partial(make_with_fault, mean=False), "another average in step 0, in 7"),
            (partial(make_with_fault, add=False), "another average in step"),
            (partial(make_with_fault, k=int), "1,290 numbers, ratio 0.03, rank 0 of 3: another average in step 0"),
            (partial(make_with_fault, k=round), "300 numbers, ratio 0.001, rank 0 of 2: another average in step 0"),
            (partial(make_with_fault, int_type=torch.int64), "right, but it sent 2,880 bytes; payloads are 1,920"),
            (the_first_ratio, "1,290 numbers, ratio 0.03, rank 0 of 3: another average in step 0"),
            (of_own_places, "another average in step 0"),
            (in_fp64, "expected an average in fp32 of shape (4000,)"),
            (in_two_rows, "expected an average in fp32 of shape (4000,)"),
            (that_drop_the_average, "expected an average in fp32 of shape (4000,), which can be read"),
            (no_tensor, "expected a tensor, you return [")],
        same=("1, round(ratio * len(x)) → round(ratio * len(x)), 1",),
        saves_nothing=(partial(make_with_fault, dense=True), "the averages are right, but it sent 96,000 bytes"),
    ),
    page.third: Answers(
        right=[reduce, two_level_all_reduce, reduce_with_parts],
        wrong=[
            (only_first_machine, "2 ranks in a machine, rank 0 of 4 does not have the sum of all ranks"),
            (lambda intra, inter, x: inter.all_reduce(x), "rank 0 of 4 does not have the sum of all ranks"),
            (without_gather, "rank 0 of 4 does not have the sum of all ranks"),
            (means, "rank 0 of 4 does not have the sum of all ranks"),
            (mean_between, "rank 0 of 4 does not have the sum of all ranks"),
            (for_two_machines, "3 ranks in a machine, rank 0 of 3 does not have the sum of all ranks"),
            (in_rows, "rank 0 of 4 does not have the sum of all ranks, in fp32 of x's shape"),
            (parts_in_another_order, "rank 0 of 4 does not have the sum of all ranks"),
            (in_bf16_between, "rank 0 of 4 does not have the sum of all ranks"),
            (that_drop_the_sum, "rank 0 of 4 does not have the sum of all ranks"),
            (whole_between, "rank 0 of 4: the sum is right, but it sent 808 bytes between machines; 404 are enough"),
            (lambda intra, inter, x: inter.all_reduce(intra.all_reduce(x)), "bytes between machines; 404 are enough"),
            (gathered_between, "1 rank in a machine, rank 0 of 3: the sum is right, but it sent 808 bytes between"),
            (all_within, "rank 0 of 4: the sum is right, but it sent 1,212 bytes within its machine; 808 are enough")],
        saves_nothing=(whole_between, "bytes between machines; 404 are enough"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
