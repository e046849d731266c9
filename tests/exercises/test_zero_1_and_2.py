"""Right answers pass, wrong and unanswered ones do not, on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, all_reduced, averaged, graded

from exercises import zero_1_and_2 as page
from refimpl.zero import closed_forms

# --- first -----------------------------------------------------------------------------------------------------------


def predict(parameters, world_size, stage, dtype):
    weight, gradient, state = (4, 4, 8) if dtype == "fp32" else (2, 2, 12)
    if stage >= 1:
        state /= world_size
    if stage >= 2:
        gradient /= world_size
    return parameters * (weight + gradient + state)


def by_table(parameters, world_size, stage, dtype):
    whole = {("fp32", 0): 16, ("fp32", 1): 8, ("fp32", 2): 4, ("bf16", 0): 16, ("bf16", 1): 4, ("bf16", 2): 2}
    return parameters * whole[dtype, stage] + parameters * (16 - whole[dtype, stage]) // world_size


def by_closed_form(parameters, world_size, stage, dtype):
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    layer = torch.nn.Linear(parameters, 1, bias=False, dtype=dtypes[dtype], device="meta")
    return closed_forms.model_state_bytes(layer, world_size, stage)


def without_masters(parameters, world_size, stage, dtype):
    return predict(parameters, world_size, stage, "fp32") // (1 if dtype == "fp32" else 2)


def with_fp32_gradients(parameters, world_size, stage, dtype):
    return predict(parameters, world_size, stage, dtype) + 2 * parameters * (dtype == "bf16")


# --- second ----------------------------------------------------------------------------------------------------------


def sharded(comm, flat):
    mine = torch.nn.Parameter(flat.chunk(comm.world_size)[comm.rank])  # a view of flat
    optimizer = torch.optim.AdamW([mine], lr=1e-3)

    def step(gradient):
        mine.grad = comm.reduce_scatter(gradient, "avg")
        optimizer.step()
        optimizer.zero_grad()
        comm.all_gather(mine.data, out=flat)

    return step


def sharded_by_hand(comm, flat):
    mine = flat.chunk(comm.world_size)[comm.rank]
    m, v, t = torch.zeros_like(mine), torch.zeros_like(mine), 0

    def step(gradient):
        nonlocal t
        t += 1
        g = comm.reduce_scatter(gradient, "sum") / comm.world_size
        mine.mul_(1 - 1e-3 * 0.01)
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        mine.sub_(1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))
        comm.all_gather(mine, out=flat)

    return step


def sharded_in_a_copy(comm, flat):
    mine = torch.nn.Parameter(flat.chunk(comm.world_size)[comm.rank].clone())
    optimizer = torch.optim.AdamW([mine], lr=1e-3)
    mine.data = flat.chunk(comm.world_size)[comm.rank]

    def step(gradient):
        mine.grad = averaged(comm, gradient)
        optimizer.step()
        mine.grad = None
        flat.copy_(comm.all_gather(mine.data))

    return step


def with_fault(comm, flat, *, reduced=averaged, gather=True, whole=False, adam=torch.optim.AdamW, **options):
    part = flat if whole else flat.chunk(comm.world_size)[comm.rank]
    mine = torch.nn.Parameter(part)
    optimizer = adam([mine], **{"lr": 1e-3, **options})

    def step(gradient):
        mine.grad = reduced(comm, gradient)
        optimizer.step()
        mine.grad = None
        if gather:
            comm.all_gather(part, out=flat)

    return step


def mean_of_all(comm, gradient):
    return comm.all_reduce(gradient, "avg")


# --- third -----------------------------------------------------------------------------------------------------------


def backward_in_shards(comm, model, loss):
    shards = {}

    def scatter(parameter):
        shards[parameter] = comm.reduce_scatter(parameter.grad.flatten(), "avg")
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(scatter) for parameter in model.parameters()]
    loss.backward()
    for handle in handles:
        handle.remove()
    return [shards[parameter] for parameter in model.parameters()]


def backward_in_a_list(comm, model, loss):
    parameters = list(model.parameters())
    shards = [None] * len(parameters)

    def scatter(i, parameter):
        gradient, parameter.grad = parameter.grad, None
        shards[i] = comm.reduce_scatter(gradient.view(-1), "sum").div_(comm.world_size)

    handles = [p.register_post_accumulate_grad_hook(partial(scatter, i)) for i, p in enumerate(parameters)]
    loss.backward()
    for handle in handles:
        handle.remove()
    return tuple(shards)


def backward_by_layers(comm, model, loss):
    found, below = {}, loss
    for layer in reversed(list(model)):  # one layer's gradient at a time, without hooks
        (gradient,) = torch.autograd.grad(below, layer.weight, retain_graph=True)
        found[layer] = comm.reduce_scatter(gradient.flatten(), "avg")
        del gradient
    return [found[layer] for layer in model]


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


ANSWERS = {
    page.first: Answers(
        right=[predict, by_table, by_closed_form],
        wrong=[
            (without_masters, "in bf16, 8 ranks, stage 1: you say"),
            (with_fp32_gradients, "in bf16, 8 ranks, stage 1: you say"),
            (lambda parameters, *rest: 16 * parameters, "in fp32, 4 ranks, stage 1: you say"),
            (lambda parameters, n, stage, dtype: predict(parameters, n, min(stage, 1), dtype),
             "in fp32, 4 ranks, stage 2: you say"),
            (lambda parameters, n, stage, dtype: predict(parameters, n, stage, dtype) / (n if stage else 1),
             "in fp32, 4 ranks, stage 1: you say"),
            (lambda parameters, n, stage, dtype: predict(parameters, n, stage, dtype) + parameters / n,
             "in fp32, 4 ranks, stage 0: you say")],
    ),
    page.second: Answers(
        right=[sharded, sharded_by_hand, sharded_in_a_copy],
        wrong=[
            (partial(with_fault, gather=False), "rank 0 of 2 has other parameters than AdamW after 3 steps"),
            (partial(with_fault, reduced=all_reduced), "the parameters are right, but a rank sent"),
            (partial(with_fault, reduced=lambda comm, g: comm.reduce_scatter(g, "sum")), "other parameters than AdamW"),
            (partial(with_fault, adam=torch.optim.Adam), "other parameters than AdamW"),
            (partial(with_fault, weight_decay=0.0), "other parameters than AdamW"),
            (partial(with_fault, lr=1e-2), "other parameters than AdamW"),
            (partial(with_fault, reduced=lambda comm, g: g.chunk(comm.world_size)[comm.rank]), "other parameters"),
            (lambda comm, flat: with_fault(comm, flat)(torch.zeros_like(flat)), "not answered yet")],
        saves_nothing=(partial(with_fault, gather=False, whole=True, reduced=mean_of_all),
                       "bytes stay on rank 0 of 2; two moments of a shard are 16,384"),
    ),
    page.third: Answers(
        right=[backward_in_shards, backward_in_a_list, backward_by_layers],
        wrong=[
            (partial(in_shards, reduced=all_reduced), "the shards are right, but a rank sent"),
            (lambda comm, *given: [comm.world_size * shard for shard in in_shards(comm, *given)],
             "shard 0 on rank 0 of 2 is not chunk 0 of the mean gradient"),
            (partial(in_shards, free=False), "8 gradients and hooks on 0 parameters are left"),
            (partial(in_shards, remove=False), "0 gradients and hooks on 8 parameters are left"),
            (lambda comm, *given: in_shards(comm, *given)[::-1], "shard 0 on rank 0 of 2 is not chunk 0"),
            (lambda comm, *given: in_shards(comm, *given)[:-1], "expected 8 shards, one for each parameter"),
            (lambda comm, *given: torch.cat(in_shards(comm, *given)), "expected a list")],
        saves_nothing=(partial(in_shards, late=True), "the shards are right, but gradients took"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
