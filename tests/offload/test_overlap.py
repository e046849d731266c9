"""Copies over a link of a known rate, beside computation of a known time: what is hidden, what the rest takes."""

import functools
import time

import pytest
import torch
from patience import Late, about, patiently
from torch import nn

from refimpl import common
from refimpl.comm import FakeCommunicator, Link
from refimpl.comm.timed_compute import Delay, compute
from refimpl.offload import CPUAdam, HostStore
from refimpl.offload.closed_forms import pipelined
from refimpl.zero import Zero1, Zero2
from refimpl.zero.internals.step_timeline import timeline

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
SIZE, LAYERS = 100, 12  # rows and columns of a weight; weights
pytestmark = pytest.mark.alone


class Timed:
    """A kernel that takes a known time for an element."""

    name = "timed"

    def __init__(self, seconds):
        self.seconds = seconds

    def update(self, p, m, v, g, low, hyper):
        compute(self.seconds * p.numel())
        low.copy_(p)


def within(reading, expected):
    about([reading], expected, 0.1 * expected)


def hidden(line, direction, seconds):
    """At least 90 % of the copies' seconds are hidden."""
    if line.waited(direction) > 0.1 * seconds:
        raise Late(line.waited(direction), seconds)


def engine_of(make, backward=0.0, optimizer=ADAMW, **options):
    """An engine with a bucket for each layer, whose backward takes a known time."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), Delay(backward=backward)) for _ in range(LAYERS)]
    return make(nn.Sequential(*parts).bfloat16(), FakeCommunicator(0, 1), optimizer, bucket_bytes=1, **options)


def trained(engine, steps=2):
    """The recording of the last step, (when its update began, when it ended)."""
    x = torch.ones(1, SIZE, dtype=torch.bfloat16)
    for _ in range(steps):
        with timeline(engine) as line:
            engine.backward(engine(x).sum())
            begin = time.time_ns()
            engine.step()
            end = time.time_ns()
            if isinstance(engine._stored.store, HostStore):
                engine._stored.store.finish()
    return line, (end - begin) / 1e9


@pytest.mark.parametrize(("compute_seconds", "copy_seconds"), [(0.030, 0.024), (0.030, 0.030), (0.020, 0.040)])
@patiently
def test_weights_of_a_tile_go_back_while_the_next_is_computed(compute_seconds, copy_seconds):
    """One bucket of 20 tiles."""
    model = nn.Linear(200, 100, bias=False).bfloat16()  # 20 tiles of 1,000 elements, 2,000 bytes each
    update = CPUAdam(sub_group_size=1000, kernel=Timed(compute_seconds / 1000), rate=Link(2000 / copy_seconds))
    engine = Zero1(model, FakeCommunicator(0, 1), ADAMW, update=update)
    engine.backward(engine(torch.ones(1, 200, dtype=torch.bfloat16)).sum())
    engine.update.masters[engine.buckets[0]].wait_for_gradients()
    with timeline(engine) as line:
        begin = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begin
    expected, waited = pipelined([compute_seconds] * 20, [copy_seconds] * 20)
    within(seconds, expected)
    if copy_seconds <= compute_seconds:  # all but the last tile's can be hidden
        hidden(line, "to device", 20 * copy_seconds)
    else:
        within(line.waited("to device"), waited)


@patiently
def test_gradients_leave_while_backward_goes_on_with_the_layers_before():
    rate = Link(2 * SIZE * SIZE / 0.008)  # 8 ms for a layer, whose backward takes 10
    line, seconds = trained(engine_of(Zero2, 0.010, update=CPUAdam(kernel=Timed(0.002 / SIZE**2), rate=rate)))
    assert len(line.of("to host")) == LAYERS
    hidden(line, "to host", LAYERS * 0.008)
    # the last gradients arrive when the first buckets are done; then weights leave one by one, as the link has them
    within(seconds, pipelined([0.002] * LAYERS, [0.008] * LAYERS)[0])


@patiently
def test_on_a_slow_link_gradients_take_what_the_link_takes():
    engine = engine_of(Zero2, 0.005, update=CPUAdam(kernel=Timed(0.0), rate=Link(2 * SIZE * SIZE / 0.020)))
    loss = engine(torch.ones(1, SIZE, dtype=torch.bfloat16)).sum()
    begin = time.perf_counter()
    engine.backward(loss)
    for part in engine.update.masters.values():
        part.wait_for_gradients()
    within(time.perf_counter() - begin, 0.005 + LAYERS * 0.020)


class Slow(torch.optim.AdamW):
    """An AdamW whose step takes a known time for each bucket."""

    seconds = 0.0

    def step(self, closure=None):
        compute(self.seconds)
        super().step()


@pytest.mark.parametrize("seconds", [0.060, 0.015])
@patiently
def test_states_come_while_the_bucket_before_is_updated(seconds):
    """Per bucket 14 bytes of an element in each direction, 50 ms: states, and gradients, which are apart here."""
    store = HostStore(rate=Link(14 * SIZE * SIZE / 0.050))
    engine = engine_of(Zero1, optimizer=functools.partial(Slow, lr=1e-3), store=store)
    engine.optimizer.seconds = seconds
    line, step = trained(engine)
    if seconds >= 0.050:
        hidden(line, "to device", LAYERS * 0.050)
    within(step, 0.050 + LAYERS * seconds if seconds >= 0.050 else LAYERS * 0.050 + seconds)


def test_the_timeline_has_a_lane_for_each_direction():
    engine = engine_of(Zero2, update=CPUAdam(rate=Link(100e6)))
    line, _ = trained(engine)
    assert {"to host", "to device"} <= set(line.lanes) and line.plot() is not None
    names = {bucket.name for bucket in engine.buckets}
    assert {span.name for span in line.of("to device")} == names == {span.name for span in line.of("to host")}
    assert {span.nbytes for span in line.of("to host")} == {2 * SIZE * SIZE}
    assert common.spans.COMPUTE in line.lanes and line.seconds("update") > 0
