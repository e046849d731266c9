"""A recording has the operations in order, what each made, and when it was freed."""

import torch
from static_kit import trainer

from refimpl import memory
from refimpl.allocator import AllocationTrace, record_step
from refimpl.allocator.static import Lifetimes


def test_lives_are_those_of_the_program():
    x = torch.ones(100)
    def step():
        a = x * 2
        b = a.view(10, 10)
        del a
        c = b + 1
        del b
        return c.sum()
    result, trace = record_step(step)
    assert result == 300
    assert [(each.func.name(), len([made for made in each.made if made])) for each in trace.operations] == [
        ("aten::mul.Tensor", 1), ("aten::view", 0), ("aten::add.Tensor", 1), ("aten::sum", 1)]
    lifetimes = Lifetimes.of(trace)
    assert lifetimes.nbytes.tolist() == [400, 400, 4] and trace.peak == 800
    assert trace.result == {2} and lifetimes.ends[2] == len(trace.events)
    assert trace.name_of(0) == "mul.Tensor" and trace.alignment == 64


def test_a_step_asks_for_what_the_tracker_sees():
    _, step, inputs = trainer("gpt")
    batch = inputs()
    step(*batch)
    with memory.track() as read:
        step(*batch)
    _, trace = record_step(step, *batch)
    taken = read.peak.total - read.start.total
    assert abs(trace.peak / taken - 1) < 0.05, "autograd adds in place while only a tracker looks"
    assert isinstance(trace, AllocationTrace) and not trace.live_bytes[0] == 0


def test_what_is_not_planned():
    x = torch.randn(6, 6)
    def step():
        x.t()  # a view
        x.add_(1)  # in place
        torch.empty(0)  # nothing
        x.to_sparse()
        return x.sum()
    _, trace = record_step(step)
    planned = {each.func.name() for each in trace.operations if each.key is not None}
    assert "aten::sum" in planned and not planned & {"aten::t", "aten::add_.Tensor", "aten::empty.memory_format"}


def test_a_step_of_nothing():
    result, trace = record_step(lambda: 7)
    assert result == 7 and len(trace) == 0 and trace.operations == [] and trace.peak == 0
