"""Computation of a known time: it takes that time and no core, leaves a span, and a gradient takes its own."""

import time

import pytest
import torch
from patience import against_the_clock, check, patiently, within
from torch import nn

from refimpl import memory
from refimpl.comm import Delay, compute
from refimpl.comm.rank_timeline import timeline


def best(function, tries=3):
    """The least [seconds, seconds of a core] of some tries."""
    found = []
    for _ in range(tries):
        begin, core = time.monotonic(), time.process_time()
        function()
        found.append((time.monotonic() - begin, time.process_time() - core))
    return min(found)


@against_the_clock
def test_it_takes_the_time_and_no_core():
    seconds, of_a_core = best(lambda: compute(0.12))
    check([seconds], 0.12)
    assert of_a_core < 0.012


@against_the_clock
def test_a_gradient_takes_its_own_time():
    model = nn.Sequential(nn.Linear(4, 4), Delay(forward=0.1, backward=0.2), nn.ReLU(inplace=True))
    x, losses = torch.randn(2, 4), []
    check([best(lambda: losses.append(model(x).sum()))[0]], 0.1)
    check([best(lambda: losses.pop().backward())[0]], 0.2)
    assert best(lambda: Delay(backward=9)(x))[0] < 0.1, "no gradient passes"


def test_it_passes_values_and_gradients_on():
    x = torch.randn(3, requires_grad=True)
    y = Delay()(x)
    (y * y).sum().backward()
    assert torch.equal(y, x) and torch.equal(x.grad, 2 * x) and repr(Delay(0.5, 1)) == "Delay(forward=0.5, backward=1)"


def test_spans_of_what_is_computed():
    model = nn.Sequential(nn.Linear(4, 4), Delay(0.01, 0.02, "0"), nn.Linear(4, 4), Delay(0.01, 0.02, "1"))
    with timeline() as line:
        model(torch.randn(2, 4)).sum().backward()
        compute(0.01, "update")
    assert [(span.kind, span.name) for span in line.spans] == [
        ("forward", "0"), ("forward", "1"), ("backward", "1"), ("backward", "0"), ("update", "")]
    assert all(span.seconds > 0.0099 for span in line.spans) and line.seconds("backward") > 0.0399


@patiently
def test_within_a_unit_it_is_a_part_of_the_unit():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Delay(0.01, backward)) for backward in (0.02, 0.06)))
    with timeline(dict(model.named_children())) as line:
        model(torch.randn(2, 4)).sum().backward()
    assert [(span.kind, span.name) for span in line.spans] == [
        ("forward", "0"), ("forward", "1"), ("backward", "1"), ("backward", "0")]
    last, first = line.of("backward")
    assert last.seconds > 0.0599 and first.seconds > 0.0199
    within(first.seconds, 0.05)


def test_in_a_dry_run_no_time_passes():
    begin = time.monotonic()
    memory.dry_run(lambda: nn.Sequential(nn.Linear(4, 4), Delay(100, 100))(torch.ones(1, 4)).sum().backward())
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize(("make", "words"), [
    (lambda: compute(-1), "seconds=-1: expected a number of seconds, 0 or more"),
    (lambda: compute(float("inf")), "seconds=inf"), (lambda: Delay(backward=-2), "backward=-2")])
def test_times_that_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()
