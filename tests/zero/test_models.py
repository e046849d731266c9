"""Models that are not a plain stack, 16 bits, accumulation and clipping: each stage against one process that sees the
whole batch."""

import contextlib
import math

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import ENGINES, FAST, MODELS, SGD, WIDTH, batch, copied, equal, model_of, parameters_of, rows_of, square
from zero_steps import plainly, train, update

from refimpl.comm import launch
from refimpl.mixed_precision import AdaptiveLossScaler
from refimpl.zero import DataParallel


def width_of(name):
    return 1 if name == "one small tensor" else WIDTH


def trained(comm, names, **options):
    found = {}
    for name in names:
        for make in ENGINES[: 3 if name == "unused on a rank" and comm.world_size > 1 else 4]:
            engine = make(model_of(name), comm, FAST, bucket_bytes=500, **options)
            found[name, make.__name__] = parameters_of(train(engine, 4, width=width_of(name)))
    return found


def alone(name, world_size):
    model, parts = model_of(name), [batch(step, width_of(name)).chunk(world_size) for step in range(4)]
    return plainly(model, FAST, (sum(square(model, mine) for mine in rows) / world_size for rows in parts))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_as_in_one_process(world_size):
    for answer in launch(trained, world_size, list(MODELS)):
        for (name, engine), ours in answer.items():
            torch.testing.assert_close(ours, alone(name, world_size), rtol=1e-5, atol=2e-6, msg=f"{name} {engine}")


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_the_norm_of_all_gradients_each_counted_once(comm, world_size):
    for norm_type in (1, 2, 3, math.inf):
        model = model_of("twice")
        for mine in batch(0, rows=6).chunk(world_size):
            (model(mine).square().mean() * 100 / world_size).backward()
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type)
        SGD(model.parameters()).step()
        for make in ENGINES:
            engine = make(model_of("twice"), comm, SGD, bucket_bytes=200)
            engine.backward(square(engine, rows_of(comm, 0, rows=6)) * 100)
            assert engine.clip_grad_norm_(0.7, norm_type).item() == pytest.approx(expected.item(), rel=1e-5)
            engine.step()
            torch.testing.assert_close(parameters_of(engine), copied(model), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_micro_batches_with_and_without_no_sync(comm):
    """Three micro-batches, each reduced or only the last."""
    found = {}
    for make in ENGINES:
        for way in ("no_sync", "each reduced"):
            engine = make(model_of("twice"), comm, FAST, bucket_bytes=500)
            for step in range(3):
                for i in range(3):
                    with engine.no_sync() if way == "no_sync" and i < 2 else contextlib.nullcontext():
                        engine.backward(square(engine, rows_of(comm, 3 * step + i)) / 3)
                engine.step()
            found[make, way] = parameters_of(engine)
            torch.testing.assert_close(found[make, way], found[DataParallel, "no_sync"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(2)
def test_16_bit_parameters_have_masters_in_shards(comm, reduce_dtype):
    engines = [make(model_of("twice").bfloat16(), comm, FAST, bucket_bytes=300, reduce_dtype=reduce_dtype)
               for make in ENGINES]
    for engine in engines:
        for step in range(4):
            update(engine, square(engine, rows_of(comm, step).bfloat16()))
    for engine in engines[1:]:
        ours = parameters_of(engine)
        masters = engine.update.masters if engine.stage < 3 else engine.parameters.shards
        assert {master.dtype for master in masters.values()} == {torch.float32}
        assert equal(ours, parameters_of(engines[1])) and all(p.dtype == torch.bfloat16 for p in ours.values())


def overflowing(comm):
    """A loss scaler that a caller brings, with an overflow on rank 1 alone in the second step."""
    found = {}
    for make in ENGINES:
        engine, scaler = make(model_of("twice"), comm, FAST, bucket_bytes=500), AdaptiveLossScaler(1024.0, comm=comm)
        before, seen = None, []
        for step in range(3):
            mine = rows_of(comm, step) * (math.inf if step == 1 and comm.rank == 1 else 1)
            engine.zero_grad()
            engine.backward(scaler.scale(square(engine, mine)))
            scaler.step(engine)
            scaler.update()
            now = parameters_of(engine)
            seen.append(before is not None and equal(now, before))
            before = now
        found[make.__name__] = seen, before, scaler.get_scale()
    return found


def test_an_overflow_on_one_rank_is_one_on_all():
    answers = launch(overflowing, 2)
    for answer in answers:
        for seen, parameters, scale in answer.values():
            assert seen == [False, True, False] and scale == 512
            torch.testing.assert_close(parameters, answers[0]["DataParallel"][1])
