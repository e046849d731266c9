"""The loss scaler beside torch's and DeepSpeed's rules, and what it asks of the device."""

import copy
import math
import random
from collections import namedtuple

import pytest
import torch
from operations_kit import Operations
from rank_pool import pooled

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.mixed_precision import AdaptiveLossScaler, MixedPrecisionOptimizer


def problem(dtype=torch.float32):
    """(parameter, optimizer): SGD of rate 1."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=dtype))
    return weight, torch.optim.SGD([weight], lr=1.0)


def step(scaler, *optimizers):
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def train(scaler, optimizer, weight, overflow):
    """One step whose gradient is 1, or inf."""
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    if overflow:
        weight.grad[0] = math.inf
    step(scaler, optimizer)


@pytest.mark.parametrize("settings", [{}, {"growth_factor": 1.7, "backoff_factor": 0.37, "growth_interval": 5,
                                           "init_scale": 1000.0}])
def test_the_scale_of_10000_steps_is_that_of_torch(settings):
    """Overflows where fp16 would have them, past a limit that moves, and at random, so rarely that the scale grows."""
    draw, (weight, optimizer) = random.Random(0), problem()
    ours = AdaptiveLossScaler(**settings, min_scale=1e-30, max_scale=1e30)
    theirs = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 2000, **settings})
    rarely, skipped, grown = 0.01 / ours.growth_interval**0.5, 0, 0
    for step in range(10_000):
        overflow = ours.get_scale() > 2.0 ** (14 + 6 * math.sin(step / 500)) or draw.random() < rarely
        before = ours.get_scale()
        for scaler in (ours, theirs):
            train(scaler, optimizer, weight, overflow)
        assert ours.get_scale() == theirs.get_scale(), step
        skipped, grown = skipped + overflow, grown + (ours.get_scale() > before)
    assert ours.skipped_steps == skipped > 10 and grown >= (100 if settings else 2)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_is_deepspeed_s(hysteresis):
    def scale_by_deepspeed(overflows, scale, interval, hysteresis):
        """What DeepSpeed's DynamicLossScaler (consecutive_hysteresis=False) makes of overflows, by its description."""
        left, last = hysteresis, -1
        for step, overflow in enumerate(overflows):
            if overflow:
                scale, left, last = (max(scale / 2, 1), left, step) if left == 1 else (scale, left - 1, step)
            elif (step - last) % interval == 0:
                scale, left = scale * 2, hysteresis
            yield scale
    draw, scaler = random.Random(hysteresis), AdaptiveLossScaler(2.0**20, growth_interval=10, hysteresis=hysteresis)
    scaler.max_scale, (weight, optimizer) = 2.0**100, problem()
    overflows, backed_off = [draw.random() < 0.02 * (1 + hysteresis) for _ in range(1000)], 0
    for overflow, expected in zip(overflows, scale_by_deepspeed(overflows, 2.0**20, 10, hysteresis), strict=True):
        before = scaler.get_scale()
        train(scaler, optimizer, weight, overflow)
        assert scaler.get_scale() == expected
        backed_off += scaler.get_scale() < before
    assert 3 < backed_off < sum(overflows) or hysteresis == 1


def test_limits():
    (weight, optimizer), scales = problem(), []
    scaler = AdaptiveLossScaler(4.0, growth_interval=1, max_scale=8.0)
    for overflow in (False, False, True, True, True):
        train(scaler, optimizer, weight, overflow)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0, 4.0, 2.0, 1.0]
    with pytest.raises(FloatingPointError, match="overflow with the loss scale at min_scale=1.0: training"):
        train(scaler, optimizer, weight, True)
    train(scaler, optimizer, weight, False)  # who catches it can go on
    assert scaler.get_scale() == 2.0


def test_an_overflow_skips_the_step_and_nothing_else():
    for bad in (math.inf, -math.inf, math.nan):
        (weight, optimizer), scaler = problem(), AdaptiveLossScaler(8.0)
        scaler.scale(weight.sum()).backward()
        weight.grad[1] = bad
        assert scaler.step(optimizer) is None and weight.tolist() == [3.0, 4.0] and scaler.skipped_steps == 1
        scaler.update()
        train(scaler, optimizer, weight, False)
        assert weight.tolist() == [2.0, 3.0] and scaler.get_scale() == 4.0


def test_gradients_are_divided_once_and_can_be_clipped():
    (weight, optimizer), scaler = problem(), AdaptiveLossScaler()
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    assert weight.grad.tolist() == [3 * 2.0**16, 4 * 2.0**16]
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [3.0, 4.0]
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    with pytest.raises(RuntimeError, match="unscale_ was called twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.allclose(weight.detach(), torch.tensor([2.4, 3.2]))
    with pytest.raises(RuntimeError, match="step was called twice for this optimizer: call update"):
        scaler.step(optimizer)
    scaler.update()


def test_several_optimizers_skip_for_themselves_and_back_off_together():
    (one, first), (two, second), scaler = problem(), problem(), AdaptiveLossScaler(8.0)
    scaler.scale([one.sum(), two.sum()])[0].backward()
    scaler.scale(two.sum()).backward()
    two.grad[0] = math.nan
    step(scaler, first, second)
    assert one.tolist() == [2.0, 3.0] and two.tolist() == [3.0, 4.0] and scaler.get_scale() == 4.0


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, MixedPrecisionOptimizer])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_step_asks_the_device_once(wrap, unscale_first, overflow):
    def waits(operations):
        """How often the CPU waits for a device: to read a number, or to find where something is not zero."""
        return sum(op.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
                   for op in operations.ran)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)])
    optimizer, scaler = wrap(torch.optim.SGD(model.parameters(), lr=0.1)), AdaptiveLossScaler(8.0)
    scaler.scale(model(torch.ones(1, 4, dtype=next(model.parameters()).dtype)).sum()).backward()
    if overflow:
        model[3].weight.grad[0, 0] = math.inf
    with Operations() as operations:
        if unscale_first:
            scaler.unscale_(optimizer)
        step(scaler, optimizer)
    assert waits(operations) == 1 and scaler.skipped_steps == overflow
    with Operations() as operations:  # the counter does count
        [p.grad.sum().item() for p in model.parameters()]
    assert waits(operations) == 40


def test_sparse_gradients():
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer, scaler = torch.optim.SparseAdam(table.parameters()), AdaptiveLossScaler(8.0)
    before = table.weight.detach().clone()
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
        if bad:
            table.weight.grad._values()[0, 0] = math.nan
        scaler.unscale_(optimizer)
        assert table.weight.grad.is_sparse
        if not bad:
            assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 1, 0]
        step(scaler, optimizer)
    assert scaler.skipped_steps == 1 and not torch.equal(table.weight, before)


def test_low_precision_gradients():
    weight, optimizer = problem(torch.bfloat16)  # the range of fp32: they can be divided where they are
    train(AdaptiveLossScaler(), optimizer, weight, False)
    assert weight.tolist() == [2.0, 3.0]
    weight, optimizer = problem(torch.float16)
    with pytest.raises(ValueError, match="gradients in float16 cannot be divided.*MixedPrecisionOptimizer"):
        train(AdaptiveLossScaler(8.0), optimizer, weight, False)


def test_a_low_precision_loss_is_scaled_in_fp32():
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert AdaptiveLossScaler().scale(loss).item() == 3 * 2.0**16  # inf in fp16
    assert AdaptiveLossScaler().scale(loss.double()).dtype is torch.float64
    assert [x.item() for x in AdaptiveLossScaler(2.0).scale((loss, loss))] == [6.0, 6.0]
    with pytest.raises(TypeError, match=r"scale\(float\): expected a floating-point tensor"):
        AdaptiveLossScaler().scale(3.0)


def test_a_step_of_a_dry_run_goes_well():
    def train_once(weight):
        optimizer, scaler = torch.optim.SGD([weight]), AdaptiveLossScaler()
        scaler.scale(weight.sum()).backward()
        step(scaler, optimizer)
        return scaler.get_scale()
    assert memory.dry_run(train_once, torch.nn.Parameter(torch.ones(3))).result == 2.0**16


def in_a_rank(comm, bad_rank, alone=False):
    (weight, optimizer), scaler = problem(), AdaptiveLossScaler(8.0, comm=None if alone else comm)
    for overflow in (True, False):
        train(scaler, optimizer, weight, overflow and comm.rank == bad_rank)
    return weight.tolist(), scaler.get_scale(), scaler.skipped_steps, dict(comm.traffic)


def test_an_overflow_on_one_rank_is_one_on_all():
    for weights, scale, skipped, traffic in pooled(in_a_rank, 3, 1, device="cpu"):
        assert (weights, scale, skipped) == ([2.0, 3.0], 4.0, 1)
        assert list(traffic) == ["all_reduce"] and traffic["all_reduce"] <= 2 * 2 * 4  # one number a step
    (one, *_), (other, *_) = pooled(in_a_rank, 2, 1, True, device="cpu")
    assert one != other  # the mutant: ranks that decide for themselves drift apart


def test_a_rank_without_gradients_steps_with_the_others():
    def without_gradients(comm, some):
        (weight, optimizer), scaler = problem(), AdaptiveLossScaler(8.0, comm=comm)
        if comm.rank in some:
            scaler.scale(weight.sum()).backward()
        try:
            scaler.step(optimizer)
        except ValueError as error:
            return str(error)
        return weight.tolist()
    assert pooled(without_gradients, 2, [0], device="cpu") == [[2.0, 3.0], [3.0, 4.0]]
    for message in pooled(without_gradients, 2, [], device="cpu"):
        assert message.startswith("no rank has a gradient: call scaler.scale(loss).backward()")


def test_with_a_fake_communicator():
    weights, scale, skipped, traffic = in_a_rank(FakeCommunicator(0, 1024), 0)
    assert (weights, scale, skipped) == ([2.0, 3.0], 4.0, 1) and list(traffic) == ["all_reduce"]


def test_save_and_resume():
    (weight, optimizer), second = problem(), AdaptiveLossScaler()
    first = AdaptiveLossScaler(2.0**10, growth_interval=4, hysteresis=2)
    for overflow in (False, True, False, False, False):
        train(first, optimizer, weight, overflow)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for overflow in (False, True, True, False, False, False, False, False):
        for scaler in (first, second):
            train(scaler, optimizer, weight, overflow)
        assert first.state_dict() == second.state_dict()
    assert repr(first) == f"AdaptiveLossScaler(scale {first.get_scale():g}, {first.skipped_steps} steps skipped)"


def test_a_state_that_is_none():
    scaler = AdaptiveLossScaler()
    with pytest.raises(ValueError, match="no good_steps, .*scale.* in this state"):
        scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict() | {"growth_factor": 2.0})
    good = scaler.state_dict()
    for name, value in (("scale", math.nan), ("growth_factor", 0.5), ("hysteresis", 0), ("backoff_factor", "0.5")):
        with pytest.raises(ValueError, match=name):
            scaler.load_state_dict({**good, name: value})
        assert scaler.state_dict() == good


@pytest.mark.parametrize(("settings", "message"), [
    *(({name: value}, f"{name}={value!r}: expected {expected}") for name, values, expected in (
        ("init_scale", (0, -1.0, math.nan, math.inf, "2"), "a finite number above 0"),
        ("growth_factor", ("2", True), "a number"), ("backoff_factor", (None,), "a number"),
        ("min_scale", ("1",), "a number"), ("max_scale", (None,), "a number"),
        ("growth_factor", (1.0,), "more than 1, or the scale would never grow"),
        ("growth_factor", (0.5, math.nan), "more than 1"), ("backoff_factor", (1.0, 0.0), "between 0 and 1"),
        ("growth_interval", (0, 2.5), "a number of steps"), ("hysteresis", (0,), "a number of steps"),
        ("max_scale", (math.nan,), "0 < min_scale")) for value in values),
    ({"init_scale": 2.0**25}, "init_scale=33554432.0: expected from min_scale=1.0 to max_scale=16777216.0"),
    ({"min_scale": 0.0}, "min_scale=0.0, max_scale=16777216.0: expected 0 < min_scale"),
    ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale=8.0, max_scale=4.0: expected 0 < min_scale"),
    ({"max_scale": 1e300}, r"max_scale=1e\+300: expected 0 < min_scale <= max_scale, both finite, also in fp32"),
    ({"init_scale": 1e-60, "min_scale": 1e-70}, "min_scale=1e-70.*also in fp32")])
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveLossScaler(**settings)


def test_the_scale_is_a_number_of_fp32_as_the_loss_is_multiplied_in():
    assert AdaptiveLossScaler(1000.1).get_scale() == torch.tensor(1000.1).item() != 1000.1


def test_an_option_that_nobody_knows_is_named_beside_the_known():
    with pytest.raises(TypeError, match="AdaptiveLossScaler has no option 'enabled': expected init_scale, "
                                        "growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, "
                                        "max_scale, comm$"):
        AdaptiveLossScaler(enabled=False)


def test_a_comm_that_is_none():
    with pytest.raises(TypeError, match="comm=3: expected a Communicator, such as comm.launch gives each"):
        AdaptiveLossScaler(comm=3)


def test_calls_that_make_no_sense():
    (weight, optimizer), scaler = problem(), AdaptiveLossScaler()
    with pytest.raises(ValueError, match="the optimizer's parameters have no gradients: call scaler.scale"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="have no gradients"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"update\(\) before any step"):
        scaler.update()
    with pytest.raises(ValueError, match="a closure computes gradients of its own"):
        scaler.step(optimizer, lambda: None)
    for scale in (0, math.nan):
        with pytest.raises(ValueError, match="new_scale=.*expected a finite number above 0"):
            scaler.update(new_scale=scale)
    weight.grad = torch.ones_like(weight)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match="no loss was scaled, and the gradients would be divided by 65536"):
            call(optimizer)
    scaler.update(new_scale=16.0)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize(("name", "value"), [("good_steps", -1), ("good_steps", "a"), ("tolerated", 0),
                                             ("skipped_steps", None)])
def test_counts_of_a_state_that_are_none(name, value):
    good = (scaler := AdaptiveLossScaler()).state_dict()
    with pytest.raises(ValueError, match=f"{name}=.*: expected an integer of at least"):
        scaler.load_state_dict({**good, name: value})
    assert scaler.state_dict() == good


def test_it_still_grows_after_the_interval_was_made_less():
    (weight, optimizer), scaler = problem(), AdaptiveLossScaler(4.0, growth_interval=10)
    for interval, scale in ((10, 4.0), (10, 4.0), (2, 8.0)):
        scaler.growth_interval = interval
        weight.grad = scaler.get_scale() * torch.ones_like(weight)
        step(scaler, optimizer)
        assert scaler.get_scale() == scale


@pytest.mark.parametrize("bad", [complex(math.inf, 0), complex(0, math.nan)])
def test_complex_gradients(bad):
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), AdaptiveLossScaler(4.0)
    scaler.scale((weight * weight.conj()).real.sum()).backward()
    step(scaler, optimizer)
    assert torch.equal(weight, torch.full((2,), -1.0 + 0j)) and scaler.get_scale() == 4.0
    weight.grad[1] = bad
    step(scaler, optimizer)
    assert torch.equal(weight, torch.full((2,), -1.0 + 0j)) and scaler.get_scale() == 2.0


def test_losses_in_a_named_tuple():
    losses = namedtuple("losses", "text image")(torch.ones(()), torch.ones(()))
    scaled = AdaptiveLossScaler(4.0).scale(losses)
    assert type(scaled) is type(losses) and scaled.text == scaled.image == 4.0


def test_backing_off_ends_at_the_floor_also_between_powers_of_two():
    (weight, optimizer), scaler = problem(), AdaptiveLossScaler(4.0, min_scale=3.0)
    weight.grad = scaler.get_scale() * torch.full_like(weight, math.inf)
    step(scaler, optimizer)
    assert scaler.get_scale() == 3.0
