"""Overlap is real: with delays in every collective and in every unit, results are the same to the bit, and collectives
go on under computation. A wire that blocks shows none of it."""

import random
import time

import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from zero_kit import ADAMW, ENGINES, equal, parameters_of, square
from zero_steps import update

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.common.spans import started
from refimpl.zero import DataParallel, Zero3
from refimpl.zero.internals.step_timeline import timeline

WIDTH, LAYERS = 32, 6
BUCKET = WIDTH * (WIDTH + 1) * 4  # bytes: a layer in each


class Late:
    """A work that is completed no sooner than `moment`."""

    def __init__(self, moment):
        self.moment = moment

    def wait(self):
        time.sleep(max(0, self.moment - time.monotonic()))

    def is_completed(self):
        return time.monotonic() >= self.moment


class SlowWire:
    """A communicator whose asynchronous collectives take `seconds()` at least."""

    def __init__(self, comm, seconds, blocks=False):
        self.comm, self.seconds, self.blocks = comm, seconds, blocks

    def __getattr__(self, name):
        method = getattr(self.comm, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter"):
            return method
        def collective(*args, async_op=False, **options):
            if not async_op:
                return method(*args, **options)
            handle = method(*args, async_op=True, **options)
            handle.works = [*handle.works, Late(time.monotonic() + self.seconds())]
            if self.blocks:
                handle.wait()
            return handle
        return collective


class SlowLayer(nn.Linear):
    """A layer whose forward and backward take `seconds()` longer."""
    def forward(self, x):
        time.sleep(self.seconds())
        y = super().forward(x)
        y.register_hook(lambda gradient: time.sleep(self.seconds()))
        return y


def model_of(seconds):
    torch.manual_seed(0)
    model = nn.Sequential(*(SlowLayer(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        layer.seconds = seconds
    return model


def stepped(comm, make, wire, compute, blocks=False, steps=3, slow=0):
    """(parameters after some steps, Recording of the last one); delays begin with step `slow`."""
    step = 0

    def late(seconds):
        return seconds() if step >= slow else 0

    engine = make(model_of(lambda: late(compute)), SlowWire(comm, lambda: late(wire), blocks), ADAMW,
                  bucket_bytes=BUCKET)
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank + 10 * step))
        with timeline(engine) as line:
            update(engine, square(engine, x))
    return parameters_of(engine), line


@on_ranks(3)
def test_delays_change_no_bit(comm):
    """The same training without delays, and with others on each rank."""
    for make in ENGINES:
        chance = random.Random(comm.rank)
        quick, slow = (stepped(comm, make, seconds, seconds)[0] for seconds in (
            lambda: 0, lambda chance=chance: chance.choice((0, 0.002, 0.01))))
        assert equal(quick, slow)


@pytest.mark.alone
@pytest.mark.parametrize("blocks", [False, True])
def test_collectives_go_on_under_computation(blocks):
    def with_even_delays(comm, blocks):
        return {make.__name__: stepped(comm, make, lambda: 0.02, lambda: 0.02, blocks, slow=2)[1] for make in ENGINES}
    for answer in launch(with_even_delays, 2, blocks):
        for name, line in answer.items():
            assert len(line.of("forward")) == len(line.of("backward")) == LAYERS
            kinds = {"DataParallel": ["all_reduce"], "Zero3": ["reduce_scatter", "all_gather"]}
            for kind in kinds.get(name, ["reduce_scatter"]):
                # Of LAYERS collectives one at each end has no computation beside it.
                share = line.hidden(kind) / line.seconds(kind)
                assert (share > 0.5) == (not blocks), (name, kind, share, line.waited(kind))


def test_the_collectives_of_a_step_by_bucket():
    engine, x = Zero3(model_of(lambda: 0), FakeCommunicator(0, 4), ADAMW), torch.ones(2, WIDTH)
    for _ in range(2):
        with timeline(engine) as line, memory.track(engine.model, engine.optimizer) as t:
            update(engine, square(engine, x))
    names = [str(i) for i in range(LAYERS)]
    assert [span.name for span in line.of("forward")] == names
    assert [span.name for span in line.of("backward")] == names[::-1] == [
        span.name for span in line.of("reduce_scatter")]
    assert sorted(span.name for span in line.of("all_gather")) == sorted(names + names[:-1])  # the last one stays
    assert all(span.nbytes == engine.buckets[0].nbytes for span in line.of("all_gather") + line.of("reduce_scatter"))
    assert {span.kind for span in line.spans} == {"forward", "backward", "update", "all_gather", "reduce_scatter",
                                                  "all_reduce"}
    assert line.plot(t).labels == ["compute", "gather", "reduce"]


def test_afterwards_nothing_is_left():
    engine = DataParallel(model_of(lambda: 0), FakeCommunicator(0, 2), ADAMW)
    comm, hooks = engine.comm, [dict(layer._forward_hooks) for layer in engine.model]
    with pytest.raises(ArithmeticError), timeline(engine):
        raise ArithmeticError
    assert started("all_gather", torch.zeros(1)) is None and engine.comm is comm
    assert [dict(layer._forward_hooks) for layer in engine.model] == hooks
