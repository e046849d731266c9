"""Engines where an optimizer is expected: schedules of lr, loss scalers, and what is refused by name."""

import copy
import functools
import math
import pickle
import warnings

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as lr
from zero_kit import ENGINES, WIDTH, copied, equal, parameters_of, rows_of, square, three_layers
from zero_steps import train

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.mixed_precision import AdaptiveLossScaler, MixedPrecisionOptimizer
from refimpl.zero import DataParallel, Zero1, Zero3

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 5
SCHEDULES = {
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)), "constant": lr.ConstantLR,
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9), "linear": lr.LinearLR,
    "step": lambda o: lr.StepLR(o, 2), "multi step": lambda o: lr.MultiStepLR(o, [1, 3]),
    "exponential": lambda o: lr.ExponentialLR(o, 0.8), "polynomial": lr.PolynomialLR,
    "cosine": lambda o: lr.CosineAnnealingLR(o, STEPS), "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: lr.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.03, total_steps=STEPS + 1),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.ExponentialLR(o, 0.5)], milestones=[2]),
    "chained": lambda o: lr.ChainedScheduler([lr.LinearLR(o), lr.ExponentialLR(o, 0.5)])}


def groups(named):
    return [{"params": [p for name, p in named if "bias" not in name]},
            {"params": [p for name, p in named if "bias" in name], "lr": 0.02, "weight_decay": 0.0}]


def scheduled(comm):
    """{schedule: {engine: (lr of each step, parameters)}}; one optimizer for DDP, the engine itself for the others."""
    found = {}
    for name, schedule in SCHEDULES.items():
        factory, found[name] = SGD if name in ("cyclic", "lambda") else ADAMW, {}
        for make in (None, *ENGINES):
            model = three_layers()
            if make is None:
                forward = DistributedDataParallel(model, broadcast_buffers=False)
                optimizer, backward = factory(groups(list(model.named_parameters()))), torch.Tensor.backward
            else:
                forward = optimizer = make(model, comm, factory, groups=groups, bucket_bytes=300)
                backward = optimizer.backward
            scheduler, rates = schedule(optimizer), []
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(square(forward, rows_of(comm, step)))
                optimizer.step()
                scheduler.step(*[1.0] * (name == "plateau"))
                rates.append([group["lr"] for group in optimizer.param_groups])
            found[name][make and make.__name__] = rates, copied(model) if make is None else parameters_of(optimizer)
    return found


@on_ranks(2)
def test_every_schedule_as_with_ddp(comm):
    """No schedule says that it was called before the optimizer, or that its `step` is another one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call|Seems like")
        answer = scheduled(comm)
    for name, found in answer.items():
        rates, parameters = found.pop(None)
        assert len({tuple(each) for each in rates}) > 1, name
        for engine, (ours, trained) in found.items():
            assert ours == rates and equal(trained, parameters), (name, engine)


@pytest.mark.parametrize("make", ENGINES)
def test_a_schedule_goes_on_where_it_was_saved(make, tmp_path):
    def begun(make):
        engine = make(three_layers(), FakeCommunicator(0, 1), ADAMW, groups=groups)
        return engine, SCHEDULES["one cycle"](engine)
    def trained(engine, scheduler, steps):
        for step in steps:
            train(engine, 1, step)
            scheduler.step()
        return engine
    engine, scheduler = begun(make)
    trained(engine, scheduler, range(3)).save(tmp_path)
    sd, saved = engine.state_dict(), scheduler.state_dict()
    assert sd["param_groups"][0]["initial_lr"] == pytest.approx(0.03 / 25) and "max_lr" in sd["param_groups"][1]
    expected = parameters_of(trained(engine, scheduler, (3, 4)))
    for load, source in ((DataParallel.load, tmp_path), (DataParallel.load_state_dict, sd)):
        for other in (make, Zero3):
            again, schedule = begun(other)
            load(again, source)
            schedule.load_state_dict(saved)
            assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in sd["param_groups"]]
            assert equal(parameters_of(trained(again, schedule, (3, 4))), expected)


@pytest.mark.parametrize("make", ENGINES)
def test_what_an_optimizer_does_and_an_engine_does_not_is_refused_by_name(make):
    engine = make(nn.Linear(2, 2), FakeCommunicator(0, 2), ADAMW)
    assert isinstance(engine, torch.optim.Optimizer) and engine.defaults is engine.optimizer.defaults
    assert engine.state is engine.optimizer.state and engine.param_groups is engine.optimizer.param_groups
    assert repr(engine).startswith(f"{make.__name__}(Linear, rank 0 of 2, AdamW (\nParameter Group 0\n")
    refused = [name for name in dir(torch.optim.Optimizer) if name.startswith("register_") or name == "add_param_group"]
    assert len(refused) == 7
    for name in refused:
        with pytest.raises(TypeError, match=f"{name} of an engine: "):
            getattr(engine, name)({"params": [nn.Parameter(torch.zeros(1))]})
    for work in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="an engine, or a model with the hooks of Zero3, cannot be"):
            work(engine)
    with pytest.raises(TypeError, match="expected an optimizer of the model's parameters"):
        MixedPrecisionOptimizer(engine)
    with pytest.raises(TypeError, match="optimizer is an .* already"):
        make(nn.Linear(2, 2), FakeCommunicator(0, 2), engine)
    with memory.track(engine) as t:
        engine.backward(engine.forward(torch.ones(1, 2)).sum())
        engine.step()
    assert t.now["optimizer state"] >= 2 * 4 * 4 / (2 if engine.stage else 1)
    known = {name for name in vars(torch.optim.Optimizer) if not name.startswith("__")} - set(refused)
    assert known - vars(DataParallel.__mro__[1]).keys() - vars(DataParallel).keys() <= {
        "OptimizerPreHook", "OptimizerPostHook", "profile_hook_step", "_patch_step_function", "_optimizer_step_code",
        "_group_tensors_by_device_and_dtype", "_process_value_according_to_param_policy",
        "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"}


ONE_SKIPPED = [(False, 1024), (True, 512), (False, 512), (False, 512)]  # steps: (skipped, the scale after it)


def scaled(comm, kind, unscales, zeroes=True):
    """{engine: (whether each step left the parameters as they were, the scale after it)}; in the second step the batch
    of rank 1 has an inf that is in the gradient of the first layer's first rows alone."""
    found = {}
    for make in ENGINES:
        engine = make(three_layers(), comm, SGD, bucket_bytes=300)
        scaler = {"adaptive": lambda: AdaptiveLossScaler(1024.0, comm=comm), "torch": lambda: torch.amp.GradScaler(
            "cpu", init_scale=1024.0), "sharded": lambda: ShardedGradScaler("cpu", 1024.0)}[kind]()
        hook, seen, before = engine.model[0].weight.register_hook(lambda g, at=[0]: damaged(comm, g, at)), [], None
        for step in range(4):
            try:
                if zeroes:
                    engine.zero_grad()
                engine.backward(scaler.scale(square(engine, rows_of(comm, step))))
                if unscales:
                    scaler.unscale_(engine)
                    engine.clip_grad_norm_(1.0)
                scaler.step(engine)
                scaler.update()
            except TypeError as error:
                seen.append(str(error))
                break
            now = parameters_of(engine)
            seen.append((before is not None and equal(now, before), scaler.get_scale()))
            before = now
        hook.remove()
        found[make.__name__] = seen
    return found


def damaged(comm, gradient, at):
    """In the second call, on rank 1, one element is inf."""
    at[0] += 1
    if at[0] != 2 or comm.rank != 1:
        return None
    gradient = gradient.clone()
    gradient[0, 0] = math.inf
    return gradient


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("zeroes", [False, True])
def test_a_scaler_that_asks_all_ranks(unscales, zeroes):
    assert launch(scaled, 2, "adaptive", unscales, zeroes) == [{make.__name__: ONE_SKIPPED for make in ENGINES}] * 2


@pytest.mark.parametrize("unscales", [False, True])
def test_torch_has_one_too(unscales):
    assert launch(scaled, 2, "sharded", unscales) == [{make.__name__: ONE_SKIPPED for make in ENGINES}] * 2


@pytest.mark.parametrize("unscales", [False, True])
def test_one_that_asks_a_shard_is_refused(unscales):
    first, second = launch(scaled, 2, "torch", unscales)
    assert first == second
    assert first.pop("DataParallel") == ONE_SKIPPED
    for name, (said,) in first.items():
        assert said.startswith(f"GradScaler looks for inf in one rank's shard of the gradients, and {name} has them in")
        assert "use refimpl.mixed_precision.AdaptiveLossScaler(comm=comm)" in said


def without_a_communicator(comm):
    said = []
    for make in ENGINES:
        engine, scaler = make(three_layers(), comm, SGD), AdaptiveLossScaler(1024.0)
        for look in (scaler.step, scaler.unscale_):
            engine.zero_grad()
            engine.backward(scaler.scale(square(engine, rows_of(comm, 0))))
            if make is DataParallel:
                scaler.step(engine)
                scaler.update()
                break
            with pytest.raises(ValueError, match=r"in shards, .*: AdaptiveLossScaler\(comm=comm\) asks all") as error:
                look(engine)
            said.append(str(error.value))
    return said


def test_ours_asks_a_shard_alone_no_more():
    first, second = launch(without_a_communicator, 2)
    assert first == second and len(first) == 6


@on_ranks(2)
def test_a_scaler_that_is_off_or_of_a_rank_alone(comm):
    """What is off asks nothing; alone a rank has all shards."""
    for world in (comm, FakeCommunicator(0, 1)):
        engine = Zero1(three_layers(), world, SGD)
        scaler = torch.amp.GradScaler("cpu", enabled=world is not comm)
        engine.backward(scaler.scale(square(engine, torch.ones(2, WIDTH))))
        scaler.step(engine)
        scaler.update()
        assert engine._steps == 1
