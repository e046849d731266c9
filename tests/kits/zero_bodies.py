"""What the engines are asked on ranks of any device: rehearsed on a CPU by tests/zero, on GPUs in tests/gpu."""

import contextlib
import functools
import gc
import itertools

import torch
from zero_kit import BUCKET, equal, farthest, gpt, gradients_of_step, parameters_of, train_gpt
from zero_steps import STATES, gpt_engine

from refimpl import memory
from refimpl.zero.closed_forms import model_state_bytes, step_traffic
from refimpl.zero.update import ShardedUpdate


def readings(comm, stage):
    """What a rank's own meters say between the third step's backward and its update; its traffic and parameters.

    {"tracked": Ledger of model states on the device, "held" and "peak": bytes of the device's allocator, since before
    the engine was made, "sent", "parameters" on the host}.
    """
    gpt(device=comm.device)(*[torch.zeros(1, 4, dtype=torch.int64, device=comm.device)] * 2).backward()  # workspaces
    gc.collect()
    with memory.measure(comm.device) as m:
        engine = gpt_engine(stage, comm, steps=2)
        before = comm.traffic
        gradients_of_step(engine)
        gc.collect()
    with memory.track(engine.model, engine.optimizer) as t:
        now = t.now if comm.device.type == "cpu" else t.on(comm.device).now
    engine.step()
    return {"tracked": {name: now[name] for name in STATES}, "held": m.net, "peak": m.peak,
            "sent": dict(comm.traffic - before), "device": comm.device.type,
            "parameters": {name: p.cpu() for name, p in parameters_of(engine).items()}}


def check_readings(stage, answers):
    """Of one stage on all ranks: beside the closed forms, and ranks with each other."""
    model, N = gpt(), len(answers)
    for rank, read in enumerate(answers):
        expected = dict(model_state_bytes(model, N, stage, rank=rank, bucket_bytes=BUCKET))
        if read["device"] == "cuda":  # Adam's step counters are on the host
            expected["optimizer state"] -= 4 * counters(model, N, stage, rank)
        assert read["tracked"] == expected, (stage, rank)
        # and not a byte more; a CPU's profiler misses what gloo's thread releases: notes of one byte a parameter
        unseen = 1000 if read["device"] == "cpu" else 0
        assert 0 <= read["held"] - sum(expected.values()) <= unseen, (stage, rank)
        assert read["sent"] == dict(step_traffic(model, N, stage, rank=rank, bucket_bytes=BUCKET))
        assert equal(read["parameters"], answers[0]["parameters"])


def counters(model, world_size, stage, rank):
    """How many tensors a rank's optimizer updates: AdamW's state is 4 bytes more for each than plain moments."""
    with_them, without = (model_state_bytes(model, world_size, stage, rank=rank, bucket_bytes=BUCKET, optimizer=name)[
        "optimizer state"] for name in ("adamw", "momentum"))
    return (with_them - 2 * without) // 4


def check_stages(found):
    """Of all stages, {stage: answers}: the same parameters, and each lower than the one before."""
    for stage in (1, 2, 3):
        assert farthest(found[stage][0]["parameters"], found[0][0]["parameters"]) <= 1e-5
    if len(found[0]) > 1:
        for rank in range(len(found[0])):
            held = [found[stage][rank]["held"] for stage in range(4)]
            assert held == sorted(held, reverse=True) and held[3] < 1.1 * held[0] / len(found[0])


def tried_again(expected, engine, number=2):
    """Whether a step whose optimizer raised in its `number`th call ends, tried again, where the other engine's does."""
    for each in (expected, engine):
        gradients_of_step(each)
    expected.step()
    calls = itertools.count(1)

    def raising(*_):
        if next(calls) == number:
            raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError), engine.optimizer.register_step_pre_hook(raising):
        engine.step()
    engine.step()
    return equal(parameters_of(expected), parameters_of(engine))


def updated_on_the_host(comm, stage):
    """{whether the update is on the host: (bytes of optimizer state on the device and on the host, parameters)}."""
    found = {}
    for host in (False, True):
        update = functools.partial(ShardedUpdate, device="cpu") if host else None
        engine = gpt_engine(stage, comm, update=update)
        train_gpt(engine, 3, max_norm=0.1)
        held, states = {"device": 0, "host": 0}, engine.optimizer.state.values()
        for x in (*engine.update.masters.values(), *(x for state in states for x in state.values() if x.dim())):
            held["host" if x.is_cpu else "device"] += x.nbytes
        found[host] = held, {name: p.cpu() for name, p in parameters_of(engine).items()}
    return found
