"""Stages that sleep: where ranks wait in a real step, beside the simulator. Zero-bubble's gain shows here."""

import functools

import pytest
import torch
from patience import Late, patiently, slowness
from rank_pool import pooled
from sleeping_kit import SleepingStage
from torch import nn

from refimpl.comm import Link
from refimpl.comm.rank_timeline import timeline
from refimpl.pipeline import Costs, PipelineParallelStage, schedule, simulate
from refimpl.pipeline.named_schedules import BUILDERS

pytestmark = pytest.mark.alone
WIDTH, P, M = 16, 4, 8
SLOW = Link(bytes_per_second=2e6, latency=2e-3)
X = 4 * 250 * WIDTH  # bytes of a message of rows 250


def sleeping(comm, name, costs, link):
    """Return (idle seconds, begin, end) of a step of this rank."""
    comm.link = link
    plan = schedule(name, comm.world_size, M)
    pipe = PipelineParallelStage({s: SleepingStage(WIDTH, *costs) for s in plan.stages_of(comm.rank)}, comm, plan,
                                 loss=nn.functional.mse_loss)
    batch = torch.randn(250 * M, WIDTH)
    pipe.train_step(batch, batch)
    comm.barrier()
    with timeline() as line:
        pipe.train_step(batch, batch)
    spans = [span for span in line.spans if span.lane == "compute"]
    length = (spans[-1].end - spans[0].begin) / 1e9
    return length - sum(span.seconds for span in spans), spans[0].begin, spans[-1].end


@functools.cache
def readings(name, costs, link=None):
    """Return (length of the step, idle of each rank)."""
    idle, begins, ends = zip(*pooled(sleeping, P, name, costs, link), strict=True)
    return (max(ends) - min(begins)) / 1e9, idle


@functools.cache
def unit():
    """Seconds of a whole rank's F. A slower processor is as much longer in what a rank does between stages, and ranks
    that share its cores wait for each other's: the square."""
    return 0.05 * min(slowness() ** 2, 3)


def costs_of(name, *units):
    chunks = schedule(name, P, M).stages // P
    return Costs(*(unit() / chunks * each for each in units or (1.0, 1.0, 1.0)))


UNEQUAL = ("1f1b", "zb-h1", "zb-v")  # at equal costs 1f1b and zb-v are below


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in UNEQUAL])
@patiently
def test_idle_time_is_the_simulator_s(name):
    assert_idle(name, costs_of(name))


def assert_idle(name, costs, link=None):
    length, idle = readings(name, costs, link)
    simulated = simulate(schedule(name, P, M), costs, link=link, message_bytes=X)
    for mine, theirs in zip(idle, simulated.idle, strict=True):
        assert mine >= theirs - 0.05 * simulated.step_time
        in_time(mine <= theirs + 0.05 * simulated.step_time, idle, simulated.idle)
    in_time(length <= 1.1 * simulated.step_time, length, simulated.step_time)


def in_time(holds, *values):
    if not holds:
        readings.cache_clear()
        raise Late(*values)


@patiently
def test_over_a_link():
    """All of it three times as slow: the milliseconds of Python at each message, which a link does not have, are as
    many, and the bounds are the same shares of a longer step."""
    link = Link(bytes_per_second=SLOW.bytes_per_second / 3, latency=3 * SLOW.latency)
    assert_idle("zb-v", costs_of("zb-v", 3.0, 3.0, 3.0), link)


@pytest.mark.parametrize("name", UNEQUAL)
@patiently
def test_at_unequal_costs(name):
    assert_idle(name, costs_of(name, 1, 1.25, 0.75))


@patiently
def test_zb_v_waits_a_tenth_of_what_1f1b_waits():
    for name in ("1f1b", "zb-v"):
        assert_idle(name, costs_of(name, 2, 2, 2))
    plain, v = (readings(name, costs_of(name, 2, 2, 2)) for name in ("1f1b", "zb-v"))
    in_time(max(v[1]) <= 0.1 * max(plain[1]), v[1], plain[1])
    in_time(v[0] < 0.85 * plain[0], v[0], plain[0])
