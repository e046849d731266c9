"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import all_reduced, averaged, graded

from exercises import zero_1_and_2 as page


def predict(parameters, world_size, stage, dtype):
    weight, gradient, state = (4, 4, 8) if dtype == "fp32" else (2, 2, 12)
    return int(parameters * (weight + gradient / (world_size if stage > 1 else 1)
                             + state / (world_size if stage else 1)))


def without_masters(parameters, world_size, stage, dtype):
    return predict(parameters, world_size, stage, "fp32") // (1 if dtype == "fp32" else 2)


def gradients_whole(parameters, world_size, stage, dtype):
    return predict(parameters, world_size, min(stage, 1), dtype)


def sharded(comm, flat, *, reduced=averaged, gather=True, whole=False):
    mine = flat if whole else flat.chunk(comm.world_size)[comm.rank]
    own = torch.nn.Parameter(mine)
    optimizer = torch.optim.AdamW([own], lr=1e-3)

    def step(gradient):
        own.grad = reduced(comm, gradient)
        optimizer.step()
        own.grad = None
        if gather:
            comm.all_gather(mine, out=flat)
        return True

    return step


not_sharded = partial(sharded, gather=False, whole=True,
                      reduced=lambda comm, gradient: comm.all_reduce(gradient, "avg"))


def in_shards(comm, model, loss, *, reduced=averaged, free=True, remove=True, late=False):
    shards = {}

    def scatter(parameter):
        shards[parameter] = reduced(comm, parameter.grad.flatten())
        if free:
            parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(scatter) for p in model.parameters() if not late]
    loss.backward()
    for parameter in model.parameters() if late else ():
        scatter(parameter)
    for hook in hooks if remove else ():
        hook.remove()
    return [shards[p] for p in model.parameters()]


RIGHT = [(page.first, predict), (page.second, sharded), (page.third, in_shards)]
WRONG = [
    (page.first, without_masters, "in bf16, 8 ranks, stage 1: you say"),
    (page.first, gradients_whole, "in fp32, 4 ranks, stage 2: you say"),
    (page.second, not_sharded, "bytes stay on rank 0 of 2; two moments of a shard are 16,384"),
    (page.second, partial(sharded, gather=False), "rank 0 of 2 has other parameters than AdamW after 3 steps"),
    (page.second, partial(sharded, reduced=all_reduced), "the parameters are right, but a rank sent"),
    (page.third, partial(in_shards, late=True), "the shards are right, but gradients took"),
    (page.third, partial(in_shards, reduced=all_reduced), "the shards are right, but a rank sent"),
    (page.third, lambda comm, *given: [comm.world_size * shard for shard in in_shards(comm, *given)],
     "shard 0 on rank 0 of 2 is not chunk 0 of the mean gradient"),
    (page.third, partial(in_shards, free=False), "8 gradients and hooks on 0 parameters are left"),
    (page.third, partial(in_shards, remove=False), "0 gradients and hooks on 8 parameters are left")]
test_right_answers, test_wrong_answers, test_blank_answers = graded(page, RIGHT, WRONG)
