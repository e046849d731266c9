"""What is read from a recording: sums, peaks, names, phases."""

import pickle

import pytest
import torch

from refimpl import memory
from refimpl.memory import Tracker
from refimpl.memory.trace import StorageRecord, settle


def test_categories_sum_to_the_total_at_every_point(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    assert len(t.timeline) > 100
    running = {}
    for index, _, delta in t.events:
        running[index + 1] = running.get(index + 1, 0) + delta
    total = 0
    for row, moment in enumerate(t.timeline):
        total += running.get(row, 0)
        assert sum(moment.ledger.values()) == moment.ledger.total == total


def test_operations_and_modules_are_named_in_forward_and_backward(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    where = {(op.name, op.phase, op.module) for op in t.ops}
    assert ("_softmax", "forward", "blocks.1.attention") in where
    assert ("gelu_backward", "backward", "blocks.0.mlp") in where
    assert ("_softmax_backward_data", "backward", "blocks.1.attention") in where
    assert {op.phase for op in t.ops} == {"forward", "backward", "step"}


def test_building_inside_the_context_is_its_own_phase():
    with memory.track() as t:
        model = torch.nn.Linear(4, 4)
        model(torch.zeros(1, 4)).sum().backward()
    assert [run.phase for run in (t.timeline[1], t.timeline[-1])] == ["build", "backward"]
    assert t.peak_moment("build").ledger["parameters"] == 80


def test_top_names_the_largest_holders(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    by_operation, by_module = dict(t.top(100, by="operation")), dict(t.top(100))
    assert by_operation["_softmax"] == 2 * (4 * 2 * 4 * 32 * 32)
    assert by_module["blocks.0.attention"] == by_module["blocks.1.attention"]
    assert sum(by_operation.values()) == sum(by_module.values()) == t.peak.total
    assert dict(t.top(100, by="category")) == t.peak
    assert len(t.top(3)) == 3
    in_step = dict(t.top(100, by="category", phase="step"))
    assert in_step == t.peak_moment("step").ledger and in_step["gradients"]
    with pytest.raises(ValueError, match="by='colour'"):
        t.top(by="colour")


def test_a_tracker_travels_as_its_trace(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    copy = pickle.loads(pickle.dumps(t))
    assert copy.peak == t.peak and copy.timeline.ops == t.timeline.ops and not isinstance(copy, Tracker)


def test_the_peak_is_the_first_of_equals_and_phases_have_their_own():
    with memory.track() as t:
        a = torch.zeros(100)
        del a
        b = torch.ones(100)
    moment = t.peak_moment()
    assert (moment.operation, moment.ledger.total) == ("zeros", 400)
    assert t.timeline.peak("forward") == moment
    assert b.sum() == 100 and t.now.total == 400 and t.start.total == 0


@pytest.mark.parametrize(("known", "category"), [
    ({}, "temporaries"),
    ({"saved": True}, "activations"),
    ({"offered": True}, "activations"),  # still alive: somebody keeps it for backward
    ({"offered": True, "alive": False}, "temporaries"),  # a technique was asked, and let go
    ({"offered": True, "alive": False, "kept": True}, "activations"),
    ({"packed": True, "alive": False}, "temporaries"),
    ({"kept": True}, "temporaries"),  # the user holds it
    ({"kept": True, "alive": False, "freed_by_backward": True}, "activations"),
    ({"offered": True, "alive": False, "phase": "backward"}, "activations"),  # recomputed
    ({"saved": True, "roles": {"inputs"}}, "inputs"),
    ({"saved": True, "roles": {"inputs", "parameters"}}, "parameters"),
    ({"roles": {"gradients", "optimizer state"}}, "gradients"),
    ({"roles": {"parameters"}, "mark": "communication"}, "communication"),
    ({"held_by_optimizer": True}, "optimizer state"),
])
def test_the_category_that_each_fact_leads_to(known, category):
    plain = {"device": "cpu", "op": "mm", "phase": "forward", "module": "", "born": 0, "nbytes": 4}
    record = StorageRecord(**plain | known)
    assert settle(record, master_weights=True) == category


def test_the_repr_names_the_culprit():
    with memory.track() as t:
        torch.zeros(300)
    assert repr(t).startswith("peak on cpu, after zeros in no module, forward:")
    assert "<code>zeros</code>" in t._repr_html_() and "1,200" in t._repr_html_()


def test_an_empty_recording_reads_nothing():
    with memory.track() as t:
        pass
    assert t.peak == t.now == t.start == {} and t.device == "cpu" and t.top() == []
