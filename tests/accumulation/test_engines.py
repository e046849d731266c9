"""Engines of ZeRO in place of a model: the whole batch's gradient at each stage, one micro-batch's activations, the
traffic of the closed forms; versions that are not so are seen."""

import copy
import functools
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from outside.models import GROUPED, causal, text
from ragged_kit import CONFIG, Net, batch, mine
from rank_pool import on_ranks, pooled
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from zero_kit import ENGINES, copied, equal, parameters_of
from zero_steps import most

from refimpl import memory
from refimpl.accumulation import Engine, accumulate, count_targets, engine_traffic, gradient_reduction
from refimpl.comm import CollectiveMismatch, FakeCommunicator, launch
from refimpl.mixed_precision import AdaptiveLossScaler
from refimpl.model import GPT
from refimpl.zero import DataParallel, Zero3
from refimpl.zero.closed_forms import step_traffic

MOST = {(1, 1): 7, (1, 2): 5, (2, 1): 4, (2, 2): 2, (3, 1): 4, (3, 2): 2}  # rounds, by (world size, micro_batch)
SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def divided(model, tokens, targets):
    """A mean whose gradient is NaN, and not 0, where there are no targets."""
    mask = (targets != -100).flatten()
    each = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def alone(steps=2, dtype=torch.float64, clip=None):
    """(losses, parameters) of one process that sees the whole batch."""
    net = Net(dtype)
    optimizer, losses = SGD(net.parameters()), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(*batch(step))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, copied(net)


def distance(ours, theirs):
    """Norm of the difference, over that of what training has changed."""
    start = dict(Net().named_parameters())
    apart = sum((ours[name] - p).double().square().sum() for name, p in theirs.items())
    return (apart / sum((p - start[name].detach()).double().square().sum() for name, p in theirs.items())).sqrt().item()


def engines(comm, makes=ENGINES, dtype=torch.float64, bucket_bytes=5000):
    """(name, engine) of each, on a net of its own."""
    for make in makes:
        yield make.__name__, make(Net(dtype), comm, SGD, bucket_bytes=bucket_bytes)


def trained(comm, micro_batch, dtype=torch.float64, loss_fn=None, steps=2, makes=ENGINES):
    """{engine: (losses, parameters)}."""
    found = {}
    for name, engine in engines(comm, makes, dtype):
        losses = []
        for step in range(steps):
            losses.append(accumulate(engine, *mine(comm, step), micro_batch=micro_batch, loss_fn=loss_fn).item())
            engine.step()
        found[name] = losses, parameters_of(engine)
    return found


@pytest.mark.parametrize(("micro_batch", "dtype", "within"), [
    (1, torch.float64, 1e-12), (2, torch.float64, 1e-12), (100, torch.float64, 1e-12), (2, torch.float32, 5e-6)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_stage_has_the_gradient_of_the_whole_batch(world, micro_batch, dtype, within):
    losses, expected = alone(dtype=dtype)
    for answer in pooled(trained, world, micro_batch, dtype, device="cpu"):
        for name, (said, ours) in answer.items():
            assert said == pytest.approx(losses, rel=1e-6), name
            assert distance(ours, expected) <= within, name


def test_a_mean_over_no_targets_whose_gradient_is_nan():
    """On the rank without targets; and on a rank that repeats one that has some."""
    _, expected = alone()
    for answer in pooled(trained, 3, 1, torch.float64, divided, device="cpu"):
        assert all(distance(ours, expected) <= 1e-12 for _, ours in answer.values())


def test_zero_times_the_loss_would_not_do():
    def times_zero(comm):
        with patch.object(gradient_reduction, "_zeros", lambda gradient: None):
            return trained(comm, 1, loss_fn=divided, steps=1, makes=[ENGINES[0], ENGINES[3]])
    for _, ours in pooled(times_zero, 3, device="cpu")[0].values():
        assert any(p.isnan().any() for p in ours.values())


@on_ranks(2, device="cpu")
def test_on_two_ranks_it_is_ddps_to_the_bit_and_that_of_a_loop_by_hand(comm):
    """Stages 2 and 3 add up in another order, since they reduce each micro-batch."""
    found, most, n = trained(comm, 1), 4, count_targets(batch()[1])
    for name, engine in engines(comm):
        for step in range(2):
            tokens, targets = mine(comm, step)
            kept = [slice(row, row + 1) for row in range(len(tokens)) if count_targets(targets[row])]
            for number, rows in enumerate([*kept, *kept[-1:] * (most - len(kept))]):
                weight = count_targets(targets[rows]).item() / n.item() if number < len(kept) else 0
                with engine.no_sync() if number < most - 1 else nullcontext():
                    engine.backward(engine(tokens[rows], targets[rows]) * weight * comm.world_size)
            engine.step()
        assert equal(found[name][1], parameters_of(engine))
    net = DistributedDataParallel(Net(), process_group=comm._group)
    optimizer = SGD(net.parameters())
    for step in range(2):
        optimizer.zero_grad()
        accumulate(net, *mine(comm, step), micro_batch=1)
        optimizer.step()
    ddp = copied(net.module)
    assert equal(found["DataParallel"][1], ddp) and equal(found["Zero1"][1], ddp)
    assert equal(found["Zero2"][1], found["Zero3"][1]) and not equal(found["Zero2"][1], ddp)


@on_ranks(2, device="cpu")
def test_sums_and_several_calls_before_a_step(comm):
    """Sums instead of means; and two calls before one step, of which the first has rank 0's first rows only."""
    def loss_fn(engine, tokens, targets):
        return F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / 100
    net = Net()
    (net(*batch()) * (count_targets(batch()[1]).item() / 100)).backward()
    SGD(net.parameters()).step()
    for _, engine in engines(comm, bucket_bytes=None):
        tokens, targets = mine(comm)
        for rows in (slice(0, 2), slice(2, None)):
            accumulate(engine, tokens[rows], targets[rows], micro_batch=1, loss_fn=loss_fn, reduction="sum")
        engine.step()
        assert distance(parameters_of(engine), copied(net)) <= 1e-12


@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world", device="cpu")
def test_a_loss_scaler_and_clipping(comm, world):
    """The second of three tries overflows, on the last rank alone."""
    _, expected = alone(clip=0.1)
    for _, engine in engines(comm):
        scaler = AdaptiveLossScaler(1024.0, comm=comm)
        for step in (0, None, 1):
            def loss_fn(engine, *part, step=step):
                return engine(*part) * (torch.inf if step is None and comm.rank == world - 1 else 1)
            accumulate(engine, *mine(comm, step or 0), micro_batch=1, loss_fn=loss_fn, scale=scaler.scale)
            scaler.unscale_(engine)
            engine.clip_grad_norm_(0.1)
            scaler.step(engine)
            scaler.update()
        assert distance(parameters_of(engine), expected) <= 2e-6  # the norm is in fp32
        assert (scaler.skipped_steps, scaler.get_scale()) == (1, 512.0)


def test_a_model_of_transformers():
    def labels_of(part):
        return count_targets(part["labels"][:, 1:])
    def of_transformers(comm):
        """{engine: (loss, parameters)} of a Llama in micro-batches of several lengths; rank 1 has one and no target."""
        torch.manual_seed(0)
        net, found = causal("llama", **GROUPED)(), {}
        torch.manual_seed(1)
        parts = [{"input_ids": x, "labels": x.clone()} for length in (16, 5, 9)
                 for x in [text(2, length)()["input_ids"]]]
        parts[2]["labels"][:] = -100
        for make in ENGINES:
            engine = make(copy.deepcopy(net), comm, functools.partial(torch.optim.SGD, lr=0.5))
            loss = accumulate(engine, micro_batches=parts[2:] if comm.rank else parts[:2], count=labels_of,
                              loss_fn=lambda engine, part: engine(**part).loss)
            engine.step()
            found[make.__name__] = loss.item(), parameters_of(engine)
        loss = accumulate(net, micro_batches=parts[:2], count=labels_of, loss_fn=lambda net, part: net(**part).loss)
        torch.optim.SGD(net.parameters(), lr=0.5).step()
        return found, loss.item(), copied(net)

    for found, loss, expected in pooled(of_transformers, 2, device="cpu"):
        for said, ours in found.values():
            assert said == pytest.approx(loss, rel=1e-6)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world", "micro_batch", "reduction"), [
    (1, 2, "mean"), (2, 1, "mean"), (2, 2, "mean"), (3, 1, "mean"), (3, 2, "mean"), (2, 3, "sum")])
@on_ranks("world", device="cpu")
def test_traffic_is_that_of_the_engine_and_a_few_numbers(comm, world, micro_batch, reduction):
    most = 2 if reduction == "sum" else MOST[world, micro_batch]
    for _, engine in engines(comm):
        for step in range(2):
            before = comm.traffic
            accumulate(engine, *mine(comm, step), micro_batch=micro_batch, reduction=reduction)
            engine.step()
        expected = step_traffic(Net(), world, engine.stage, rank=comm.rank, micro_batches=most, bucket_bytes=5000).total
        assert (comm.traffic - before).total == expected + engine_traffic(world, comm.rank, reduction), engine.stage


def at_once(engine, *batch, micro_batch):
    """The mutant: the whole batch."""
    engine.backward(engine(*batch))


def keeping(engine, *batch, micro_batch):
    """The mutant: all forwards before the first backward."""
    parts = list(zip(*(each.split(micro_batch) for each in batch), strict=True))
    engine.backward(sum([engine(*part) / len(parts) for part in parts]))


def most_activations(make, accumulator, rows):
    engine = make(GPT(CONFIG), FakeCommunicator(0, 4), SGD, bucket_bytes=5000)
    tokens = torch.zeros(rows, 16, dtype=torch.int64)
    for _ in range(2):
        with memory.track(engine.model, engine.optimizer, tokens) as t:
            accumulator(engine, tokens, tokens, micro_batch=2)
            engine.step()
    return most(t, "activations")


@pytest.mark.parametrize("make", ENGINES)
def test_activations_are_those_of_one_micro_batch(make):
    one = most_activations(make, at_once, 2)
    assert one <= most_activations(make, accumulate, 8) <= one + 64, "the loss, its weight and their sum"
    assert most_activations(make, at_once, 8) >= 3.5 * one, "the mutant"
    if make is DataParallel:
        assert most_activations(make, keeping, 8) >= 3.5 * one, "the mutant"


def test_a_dry_run():
    def step(make, rows):
        tokens = torch.zeros(rows, 16, dtype=torch.int64)
        engine = make(GPT(CONFIG), FakeCommunicator(0, 64), functools.partial(torch.optim.AdamW, lr=1e-2))
        for _ in range(2):
            accumulate(engine, tokens, tokens, micro_batch=2)
            engine.step()
    for make in ENGINES:
        peaks = [memory.dry_run(step, make, rows).peak["activations"] for rows in (4, 8)]
        assert abs(peaks[0] - peaks[1]) <= 64


def raising(comm, who, where="before"):
    """A loss that raises in the second micro-batch of each of `who`, before the forward or after it."""
    calls = []
    def loss_fn(engine, *part):
        calls.append(None)
        if len(calls) == 2 and comm.rank in who:
            if where == "after":
                engine(*part)
            raise ArithmeticError("injected")
        return engine(*part)
    return loss_fn


@pytest.mark.parametrize("where", ["before", "after"])
@on_ranks(2, device="cpu")
def test_after_an_exception_on_all_ranks_no_gradient_is_left_and_the_step_is_tried_again(comm, where):
    """All ranks raise in the second micro-batch, and the step is tried again."""
    _, expected = alone(steps=1)
    for _, engine in engines(comm):
        loss_fn = raising(comm, [0, 1], where)
        with pytest.raises(ArithmeticError):
            accumulate(engine, *mine(comm), micro_batch=1, loss_fn=loss_fn)
        assert all(p.grad is None for p in engine.model.parameters()) and not engine.reducer.micro_batches
        with pytest.raises(RuntimeError, match="step without gradients"):
            engine.step()
        accumulate(engine, *mine(comm), micro_batch=1, loss_fn=loss_fn)
        engine.step()
        assert distance(parameters_of(engine), expected) <= 1e-12


@pytest.mark.parametrize("make", [DataParallel, Zero3])
@on_ranks(2, launch=launch, timeout=20)
def test_an_exception_on_one_rank_leaves_no_gradient_on_any(comm, make):
    """Rank 1 raises in its second micro-batch, and begins the step again; rank 0 is told so."""
    engine = make(Net(), comm, SGD)
    with pytest.raises(ArithmeticError if comm.rank else CollectiveMismatch):
        accumulate(engine, *mine(comm), micro_batch=1, loss_fn=raising(comm, [1]))
    assert all(p.grad is None for p in engine.model.parameters()) and engine.reducer.micro_batches == 0
    if comm.rank:
        with pytest.raises(CollectiveMismatch):
            engine.backward(torch.ones((), requires_grad=True))


def test_what_is_an_engine():
    assert all(isinstance(make(nn.Linear(2, 2), FakeCommunicator(0, 2)), Engine) for make in ENGINES)
    assert not isinstance(nn.Linear(2, 2), Engine) and not isinstance(torch.optim.SGD([torch.ones(1)]), Engine)


class Own:
    """The smallest engine: one rank, a list of what was called."""

    def __init__(self):
        self.model, self.comm, self.calls = Net(), FakeCommunicator(0, 1), []

    def forward(self, *part):
        return self.model(*part)

    def backward(self, loss):
        self.calls.append("backward")
        loss.backward()

    def no_sync(self):
        self.calls.append("no_sync")
        return nullcontext()

    def zero_grad(self):
        self.calls.append("zero_grad")


def test_an_engine_of_ones_own():
    engine = Own()
    accumulate(engine, *batch(), micro_batch=3)
    assert engine.calls == ["no_sync", "backward", "no_sync", "backward", "backward"]
    with pytest.raises(ValueError, match="requires_grad_"):
        engine.model.requires_grad_(False)
        accumulate(engine, *batch(), micro_batch=3)


def test_what_an_engine_does_not_take_says_so():
    tokens, comm = torch.zeros(4, 16, dtype=torch.int64), FakeCommunicator(0, 2)
    engine = Zero3(GPT(CONFIG, dtype=torch.bfloat16), comm)
    with pytest.raises(ValueError, match="Zero3 sums gradients itself, of parameters in torch.bfloat16: .*dtype=None"):
        accumulate(engine, tokens, tokens, micro_batch=2)
    with pytest.raises(ValueError, match="leave comm out, since it reduces gradients over its own ranks"):
        accumulate(engine, tokens, tokens, micro_batch=2, comm=FakeCommunicator(0, 2))
    accumulate(engine, tokens, tokens, micro_batch=4)
    engine.step()
    accumulate(engine, tokens, tokens, micro_batch=2, dtype=None, comm=comm)
    engine.step()
