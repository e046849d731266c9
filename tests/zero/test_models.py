"""Models that are not a plain stack: each stage against one process that sees the whole batch."""

import contextlib
import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from refimpl.comm import RankError, launch
from refimpl.mixed_precision import AdaptiveLossScaler
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3

ENGINES = (DataParallel, Zero1, Zero2, Zero3)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
WIDTH = 10


class Unused(nn.Module):
    """One layer that nobody uses, and one that only the rank with the first rows uses, or all do."""

    def __init__(self, by_all):
        super().__init__()
        self.first, self.idle, self.some = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.by_all = by_all

    def forward(self, x):
        y = self.first(x)
        return y + self.some(y) if self.by_all or x[0, 0] > 0 else y


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self[2].requires_grad_(False)
        self[4].bias.requires_grad_(False)


class Twice(nn.Module):
    """A layer used twice, a weight of two layers, and a parameter of the module itself."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.two(self.one(self.one(x).tanh()).tanh()) * self.scale


class Recomputed(nn.Module):
    """Blocks in a region of recomputation, in another one."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), reentrant

    def part(self, x, first):
        for block in self.blocks[first : first + 2]:
            x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=self.reentrant)
        return x

    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()
        for first in (0, 2):
            x = checkpoint(self.part, x, first, use_reentrant=self.reentrant)
        return x


MODELS = {
    "unused": functools.partial(Unused, True), "unused on a rank": functools.partial(Unused, False),
    "frozen": Frozen, "twice": Twice, "recomputed": functools.partial(Recomputed, False),
    "recomputed, reentrant": functools.partial(Recomputed, True),
    "one small tensor": lambda: nn.Linear(1, 1, bias=False)}


def batch(step, width=WIDTH, rows=4):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(step))
    x[:, 0] = torch.linspace(1, -1, rows)  # what `Unused` asks for
    return x


def build(name):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return MODELS[name]()


def whole(engine):
    return engine.gathered() if isinstance(engine, Zero3) else contextlib.nullcontext()


def parameters_of(engine):
    with whole(engine):
        return [p.detach().clone() for p in engine.model.parameters()]


def width_of(name):
    return 1 if name == "one small tensor" else WIDTH


def trained(comm, names, **options):
    found = {}
    for name in names:
        for make in ENGINES[: 3 if name == "unused on a rank" and comm.world_size > 1 else 4]:
            engine = make(build(name), comm, ADAMW, bucket_bytes=500, **options)
            for step in range(4):
                mine = batch(step, width_of(name)).chunk(comm.world_size)[comm.rank]
                engine.backward(engine.forward(mine).square().mean())
                engine.step()
            found[name, make.__name__] = parameters_of(engine)
    return found


def alone(name, world_size):
    model = build(name)
    optimizer = ADAMW(model.parameters())
    for step in range(4):
        for mine in batch(step, width_of(name)).chunk(world_size):
            (model(mine).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_as_in_one_process(world_size):
    for answer in launch(trained, world_size, list(MODELS)):
        for (name, engine), ours in answer.items():
            for a, b in zip(ours, alone(name, world_size), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6, msg=f"{name} {engine}")


# --- clipping, accumulation, precision -------------------------------------------------------------------------------


def clipped(comm):
    found = {}
    for make in ENGINES:
        for norm_type in (1, 2, 3, math.inf):
            engine = make(build("twice"), comm, SGD, bucket_bytes=200)
            engine.backward(engine.forward(batch(0, rows=6).chunk(comm.world_size)[comm.rank]).square().mean() * 100)
            norm = engine.clip_grad_norm_(0.7, norm_type)
            engine.step()
            found[make.__name__, norm_type] = norm.item(), parameters_of(engine)
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_norm_of_all_gradients_each_counted_once(world_size):
    answers = launch(clipped, world_size)
    for norm_type in (1, 2, 3, math.inf):
        model = build("twice")
        for mine in batch(0, rows=6).chunk(world_size):
            (model(mine).square().mean() * 100 / world_size).backward()
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type)
        SGD(model.parameters()).step()
        for answer in answers:
            for make in ENGINES:
                norm, ours = answer[make.__name__, norm_type]
                assert norm == pytest.approx(expected.item(), rel=1e-5)
                for a, b in zip(ours, model.parameters(), strict=True):
                    torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)


def accumulated(comm, ways):
    """Three micro-batches, with and without no_sync."""
    found = {}
    for make in ENGINES:
        for way in ways:
            engine = make(build("twice"), comm, ADAMW, bucket_bytes=500)
            for step in range(3):
                for i in range(3):
                    mine = batch(3 * step + i).chunk(comm.world_size)[comm.rank]
                    with engine.no_sync() if way == "no_sync" and i < 2 else contextlib.nullcontext():
                        engine.backward(engine.forward(mine).square().mean() / 3)
                engine.step()
            found[make.__name__, way] = parameters_of(engine)
    return found


def test_micro_batches_with_and_without_no_sync():
    for answer in launch(accumulated, 2, ["no_sync", "each reduced"]):
        expected = answer["DataParallel", "no_sync"]
        for key, ours in answer.items():
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=str(key))


def low(comm, dtype, reduce_dtype):
    found = {}
    for make in ENGINES:
        engine = make(build("twice").to(dtype), comm, ADAMW, bucket_bytes=300, reduce_dtype=reduce_dtype)
        for step in range(4):
            mine = batch(step).to(dtype).chunk(comm.world_size)[comm.rank]
            engine.backward(engine.forward(mine).square().mean())
            engine.step()
        masters = engine.pieces.masters.values() if make is not DataParallel else []
        found[make.__name__] = parameters_of(engine), [m.dtype for m in masters]
    return found


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_16_bit_parameters_have_masters_in_shards(reduce_dtype):
    for answer in launch(low, 2, torch.bfloat16, reduce_dtype):
        for name in ("Zero1", "Zero2", "Zero3"):
            ours, masters = answer[name]
            assert masters and set(masters) == {torch.float32}
            for a, b in zip(ours, answer["Zero1"][0], strict=True):
                assert a.dtype == torch.bfloat16 and torch.equal(a, b)


def overflowing(comm):
    """A loss scaler that a caller brings, with an overflow on rank 1 alone in the second step."""
    found = {}
    for make in ENGINES:
        engine, scaler = make(build("twice"), comm, ADAMW, bucket_bytes=500), AdaptiveLossScaler(1024.0, comm=comm)
        before, seen = None, []
        for step in range(3):
            mine = batch(step).chunk(comm.world_size)[comm.rank]
            if step == 1 and comm.rank == 1:
                mine = mine * math.inf
            engine.zero_grad()
            engine.backward(scaler.scale(engine.forward(mine).square().mean()))
            scaler.step(engine)
            scaler.update()
            now = parameters_of(engine)
            seen.append(before is not None and all(torch.equal(a, b) for a, b in zip(now, before, strict=True)))
            before = now
        found[make.__name__] = seen, before, scaler.get_scale()
    return found


def test_an_overflow_on_one_rank_is_one_on_all():
    answers = launch(overflowing, 2)
    for answer in answers:
        for seen, parameters, scale in answer.values():
            assert seen == [False, True, False] and scale == 512
            for a, b in zip(parameters, answers[0]["DataParallel"][1], strict=True):
                torch.testing.assert_close(a, b)


# --- faults ----------------------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    """Raises in its first backward."""

    raised = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not Once.raised:
            Once.raised = True
            raise ArithmeticError("the first time")
        return gradient


def retried(comm):
    found = {}
    for make in ENGINES:
        for fails in (True, False):
            Once.raised = not fails
            engine, count = make(build("twice"), comm, ADAMW, bucket_bytes=200), 0
            mine = batch(0).chunk(comm.world_size)[comm.rank]
            while True:
                x = engine.model.one(mine)
                try:
                    engine.backward(engine.forward(Once.apply(x)).square().mean())
                    break
                except ArithmeticError:
                    count += 1
                    assert all(p.grad is None for p in engine.model.parameters())
            engine.step()
            found[make.__name__, fails] = count, parameters_of(engine)
    return found


def test_a_backward_that_raised_is_tried_again():
    for answer in launch(retried, 2):
        for make in ENGINES:
            (failed, ours), (none, expected) = answer[make.__name__, True], answer[make.__name__, False]
            assert (failed, none) == (1, 0)
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def other_models(comm):
    Zero2(nn.Linear(4, 4 + comm.rank), comm, ADAMW)


def other_counts(comm, make):
    engine = make(build("twice"), comm, ADAMW)
    for _ in range(1 + comm.rank):
        engine.backward(engine.forward(batch(0)).square().mean())
    engine.step()


def test_ranks_that_differ_are_named():
    with pytest.raises(RankError, match=r"ranks \[1\] have another model than rank 0"):
        launch(other_models, 2)
    for make in (Zero1, Zero3):
        with pytest.raises(RankError, match=r"ranks \[1\] are elsewhere than rank 0.*step of micro-batch 1.*"
                                            r"ward of micro-batch 1"):
            launch(other_counts, 2, make)


def other_units(comm):
    engine = Zero3(build("unused on a rank"), comm, ADAMW)
    engine.backward(engine.forward(batch(0).chunk(2)[comm.rank]).square().mean())


def test_stage_3_needs_the_same_units_on_every_rank():
    with pytest.raises(RankError, match="ranks? 1 differs in a collective"):
        launch(other_units, 2, debug=True)


def misused(comm):
    said = []
    engine = Zero1(build("twice"), comm, ADAMW)
    for wrong in (engine.step, lambda: engine.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError) as error:
            wrong()
        said.append(str(error.value))
    with engine.no_sync():
        engine.backward(engine.forward(batch(0)).mean())
    with pytest.raises(RuntimeError) as error:
        engine.step()
    return [*said, str(error.value)]


def test_what_is_called_in_the_wrong_order():
    (first, second, third), = launch(misused, 1)
    assert first == second == "step without gradients: call engine.backward(loss) first"
    assert third.startswith("the last backward was in no_sync")
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        Zero1(nn.Tanh(), None)
