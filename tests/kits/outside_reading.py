"""Reads a program twice, each time with one instrument alone: what PyTorch's allocator logs, and what the tracker sees.

An instrument may change what it watches (a tracker that keeps tensors alive shows their bytes to an allocator that
is read beside it), so that two that watch the same run can agree and both be wrong. Here each has a build and a run of
its own.
"""

import gc
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from refimpl import memory
from refimpl.memory.trace import START

WARMUP = 2  # steps before the one that is read: state made in the first, and caches


@dataclass(frozen=True)
class Read:
    """The step after the warm-up: bytes above its start, what it returned, and how long it took. `peak`, `net`: of what
    the step itself allocated, as in `memory.Reading`: releases of older storages are not counted. `seconds`: under the
    tracker; of `read_alone`, those of the step before, under no instrument at all."""

    peak: int
    net: int
    seconds: float
    results: list = field(repr=False)
    log: object = field(repr=False)  # the Measurement or the Tracker


def read_alone(build):
    """Read the step of a new build with the allocator's log."""
    with warmed_up(build) as (program, seconds), memory.measure("cpu") as m:
        results = program.step()
    return Read(m.peak, m.net, seconds, results, m)


def read_tracked(build, before=lambda program: None):
    """Read the same step of another build with the tracker; `before` it, call this with the program."""
    with warmed_up(build) as (program, _):
        before(program)
        with memory.track(*program.objects) as t:
            results, seconds = _timed(program.step)
    return Read(*born_inside(t), seconds, results, t)


def born_inside(trace):
    """(peak, net) of the storages that were born in the trace."""
    held = peak = 0
    for _, record, nbytes in trace.events:
        if trace.records[record].op != START and trace.records[record].device == "cpu":
            held += nbytes
            peak = max(peak, held)
    return peak, held


def second_step(build):
    """The trace of a program's second step: the first makes its states."""
    program = build()
    program.step()
    with memory.track(*program.objects) as t:
        program.step()
    return t


def _timed(step):
    began = time.perf_counter()
    return step(), time.perf_counter() - began


@contextmanager
def warmed_up(build):
    """A program after its warm-up, and the seconds of the last step. A step takes the same bytes each time: on one
    thread, since kernels' workspaces and the order of sums depend on their number, and with nothing but `gc.collect()`
    to find cycles of Python objects in what is made inside: such cycles hold tensors until the collector comes by, and
    that is the sooner the more objects an instrument makes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()
    try:
        program = build()
        for _ in range(WARMUP):
            gc.collect()
            seconds = _timed(program.step)[1]
        gc.collect()
        yield program, seconds
    finally:
        gc.enable()
        gc.unfreeze()
        torch.set_num_threads(threads)
