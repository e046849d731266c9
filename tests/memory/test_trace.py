"""What is read from a recording: sums, peaks, names, phases."""

import itertools
import pickle
import time
from collections import Counter

import pytest
import torch

from refimpl import memory
from refimpl.memory.trace import Moment, Op, StorageRecord, Trace, category_of


def test_categories_sum_to_the_total_at_every_point(trace):
    assert len(trace.timeline) > 100
    running, total = Counter(), 0
    for index, _, delta in trace.events:
        running[index + 1] += delta
    for row, moment in enumerate(trace.timeline):
        total += running[row]
        assert sum(moment.ledger.values()) == moment.ledger.total == total


def test_operations_and_modules_are_named_in_forward_and_backward(trace):
    assert {("_softmax", "forward", "blocks.1.attention"), ("gelu_backward", "backward", "blocks.0.mlp"),
            ("_softmax_backward_data", "backward", "blocks.1.attention")} <= {
        (op.name, op.phase, op.module) for op in trace.ops}
    assert {op.phase for op in trace.ops} == {"forward", "backward", "step"}


def test_building_inside_the_context_is_its_own_phase():
    with memory.track() as t:
        torch.nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()
    assert [run.phase for run in (t.timeline[1], t.timeline[-1])] == ["build", "backward"]
    assert t.peak_moment("build").ledger["parameters"] == 80


def test_top_names_the_largest_holders(trace):
    by_operation, by_module = dict(trace.top(100, by="operation")), dict(trace.top(100))
    assert by_operation["_softmax"] == 2 * (4 * 2 * 4 * 32 * 32)
    assert by_module["blocks.0.attention"] == by_module["blocks.1.attention"]
    assert sum(by_operation.values()) == sum(by_module.values()) == trace.peak.total
    assert dict(trace.top(100, by="category")) == trace.peak and len(trace.top(3)) == 3
    in_step = dict(trace.top(100, by="category", phase="step"))
    assert in_step == trace.peak_moment("step").ledger and in_step["gradients"]
    with pytest.raises(ValueError, match="by='colour'"):
        trace.top(by="colour")


def test_a_tracker_travels_as_its_trace(trace):
    copy = pickle.loads(pickle.dumps(trace))
    assert copy.peak == trace.peak and copy.timeline.ops == trace.timeline.ops and not isinstance(copy, memory.Tracker)


def test_the_peak_is_the_first_of_equals_and_phases_have_their_own():
    with memory.track() as t:
        torch.zeros(100)
        b = torch.ones(100)
    moment = t.peak_moment()
    assert (moment.operation, moment.ledger.total) == ("zeros", 400) and t.timeline.peak("forward") == moment
    assert b.sum() == 100 and t.now.total == 400 and t.start.total == 0


PLAIN = {"device": "cpu", "op": "mm", "phase": "forward", "module": "", "born": 0, "nbytes": 4}


@pytest.mark.parametrize(("known", "category"), [
    ({}, "temporaries"), ({"alive": False}, "temporaries"), ({"saved": True}, "activations"),
    ({"saved": True, "alive": False}, "activations"),
    ({"offered": True}, "activations"),  # still alive: somebody keeps it for backward
    ({"offered": True, "alive": False}, "temporaries"),  # a technique was asked, and let go
    ({"offered": True, "alive": False, "kept": True}, "activations"),
    ({"packed": True}, "activations"), ({"packed": True, "alive": False}, "temporaries"),
    ({"packed": True, "alive": False, "kept": True}, "activations"),
    ({"kept": True}, "temporaries"),  # the user holds it
    ({"kept": True, "alive": False}, "temporaries"),  # … and let it go after backward
    ({"kept": True, "alive": False, "freed_by_backward": True}, "activations"),
    ({"alive": False, "freed_by_backward": True}, "activations"),
    ({"offered": True, "alive": False, "phase": "backward"}, "activations"),  # recomputed
    ({"packed": True, "alive": False, "phase": "backward"}, "temporaries"),
    ({"alive": False, "phase": "backward"}, "temporaries"),
    ({"offered": True, "alive": False, "phase": "step"}, "temporaries"),
    ({"held_by_optimizer": True}, "optimizer state"), ({"saved": True, "held_by_optimizer": True}, "optimizer state"),
    ({"held_by_optimizer": True, "saved": True, "mark": "of its own"}, "of its own"),
    ({"held_by_optimizer": True, "roles": {"gradients"}}, "gradients"),
    ({"saved": True, "roles": {"inputs"}}, "inputs"),
    ({"saved": True, "roles": {"inputs", "parameters"}}, "parameters"),
    ({"roles": {"parameters"}, "mark": "communication"}, "communication")])
def test_the_category_that_each_fact_leads_to(known, category):
    assert category_of(StorageRecord(**PLAIN | known), master_weights=True) == category


def test_an_activation_is_what_backward_will_read():
    """All combinations of the facts, against the rule said in words."""
    names = ("alive", "saved", "offered", "packed", "kept", "freed_by_backward")
    for phase, *flags in itertools.product(["forward", "backward"], *[[False, True]] * len(names)):
        facts = dict(zip(names, flags, strict=True))
        reasons = [
            facts["saved"],
            facts["freed_by_backward"],  # backward alone held it
            facts["offered"] and phase == "backward",  # recomputed
            (facts["offered"] or facts["packed"]) and (facts["alive"] or facts["kept"]),  # lives on until backward
        ]
        record = StorageRecord(**PLAIN | facts | {"phase": phase})
        assert category_of(record, master_weights=False) == ("activations" if any(reasons) else "temporaries"), facts


def test_roles_win_in_one_order_and_the_owner_of_bare_tensors_depends():
    order = ["parameters", "buffers", "gradients", "optimizer state", "inputs"]
    for stronger, weaker in itertools.combinations(order, 2):
        assert category_of(StorageRecord(**PLAIN, roles={weaker, stronger}), master_weights=True) == stronger
    held = StorageRecord(**PLAIN, held_by_optimizer=True)
    assert category_of(held, master_weights=True) == "optimizer state"
    assert category_of(held, master_weights=False) == "parameters"
    for beside, category in (("parameters", "optimizer state"), ("inputs", "parameters")):
        assert Trace([], [held, StorageRecord(**PLAIN, roles={beside})]).categories() == [category, beside]


def test_the_repr_names_the_culprit():
    with memory.track() as t:
        torch.zeros(300)
    assert repr(t).startswith("peak on cpu, after zeros in no module, forward:")
    assert "<code>zeros</code>" in t._repr_html_() and "1,200" in t._repr_html_()


def test_an_empty_recording_reads_nothing():
    with memory.track() as t:
        pass
    assert t.peak == t.now == t.start == {} and t.device == "cpu" and t.top() == []


@pytest.fixture
def by_hand():
    """Five operations; 1,000 and 1 bytes on the CPU, 30 then 70 on cuda:0, 500 on cuda:1. Nothing tracked."""
    ops = [Op("load", "forward", "", 5000), Op("copy", "forward", "", 6000), Op("mm", "forward", "net", 8000),
           Op("mm", "backward", "net", 9500), Op("add", "step", "", 12_000)]
    records = [StorageRecord("cpu", "load", "forward", "", 0, 1000, alive=False),
               StorageRecord("cuda:0", "copy", "forward", "", 1, 30, roles={"inputs"}),
               StorageRecord("cuda:0", "mm", "forward", "net", 2, 70, saved=True, alive=False),
               StorageRecord("cuda:1", "mm", "forward", "net", 2, 500),
               StorageRecord("cpu", "(start)", "forward", "", -1, 1, mark="of its own")]
    events = [(-1, 4, 1), (0, 0, 1000), (1, 1, 30), (2, 2, 70), (2, 3, 500), (4, 2, -70), (5, 0, -1000)]
    return Trace(ops, records, events, first_call=2, began_ns=4000)


def test_each_device_has_its_own_readings(by_hand):
    assert by_hand.devices == ["cpu", "cuda:0", "cuda:1"] and by_hand.device == "cuda:0"
    totals = {device: by_hand.on(device).timeline.totals.tolist() for device in by_hand.devices}
    assert totals == {"cpu": [1, 1001, 1001, 1001, 1001, 1001, 1], "cuda:0": [0, 0, 30, 100, 100, 30, 30],
                      "cuda:1": [0, 0, 0, 500, 500, 500, 500]}
    assert by_hand.timeline.totals.tolist() == totals["cuda:0"] and by_hand.peak == {"inputs": 30, "activations": 70}
    assert by_hand.on("cuda:1").now == by_hand.on(torch.device("cuda:1")).peak == {"temporaries": 500}
    cpu = by_hand.on("cpu")
    assert (cpu.start, cpu.peak) == ({"of its own": 1}, {"temporaries": 1000, "of its own": 1})
    assert cpu.now == {"of its own": 1}  # what left after the last operation is gone
    assert (cpu.device, cpu.first_call, cpu.began_ns) == ("cpu", 2, 4000) and cpu.on("cuda:0").peak == by_hand.peak
    for trace, device, saw in ((by_hand, "cuda:2", "cpu, cuda:0, cuda:1"), (Trace(), "cpu", "none")):
        with pytest.raises(ValueError, match=f"nothing was allocated on '{device}'; this trace saw {saw}"):
            trace.on(device)


def test_the_largest_holders_are_of_the_device_alone(by_hand):
    assert by_hand.top() == [("net", 70), ("(no module)", 30)]
    assert by_hand.top(by="operation") == [("mm", 70), ("copy", 30)]
    assert by_hand.on("cpu").top(by="category") == [("temporaries", 1000), ("of its own", 1)]
    assert by_hand.on("cuda:1").top() == [("net", 500)] and by_hand.top(phase="build") == [("(no module)", 30)]
    assert by_hand.top(phase="step") == [("(no module)", 30)]  # what was freed has left


def test_equal_holders_come_in_the_order_of_their_names():
    records = [StorageRecord("cpu", name, "forward", name, 0, 8) for name in ("b", "c", "a")]
    assert Trace([Op("x", "forward", "", 1)], records, [(0, i, 8) for i in range(3)]).top(2) == [("a", 8), ("b", 8)]


@pytest.mark.parametrize("device", [None, "cpu", "cuda:1"])
def test_a_trace_in_a_pickle_keeps_its_device(by_hand, device):
    trace = by_hand.on(device) if device else by_hand
    copy = pickle.loads(pickle.dumps(trace))
    for name in ("device", "devices", "peak", "ops", "records", "events"):
        assert getattr(copy, name) == getattr(trace, name)
    assert (copy.first_call, copy.began_ns) == (trace.first_call, trace.began_ns) == (2, 4000)


def test_building_is_what_runs_forward_before_the_first_call(by_hand):
    """A step or a backward there (of something that is no module) stays what it is."""
    assert [op.phase for op in by_hand.timeline.ops] == ["build"] * 3 + ["forward", "backward", "step", "step"]
    phases = ["forward", "backward", "step", "forward", "forward"]
    ops = [Op("a", phase, "", 0) for phase in phases]
    assert [moment.phase for moment in Trace(ops, first_call=4).timeline] == [
        "build", "build", "backward", "step", "build", "forward", "forward"]
    assert [op.phase for op in Trace(ops).timeline.ops] == ["forward", *phases, "forward"]


def test_the_lines_of_start_and_end(by_hand):
    start, *_, end = by_hand.timeline.ops
    assert start == Op("(start)", "build", "", 4000) and end == Op("(end)", "step", "", 12_000)
    assert [op.module for op in Trace([Op("a", "forward", "net", 1)], first_call=0).timeline.ops] == ["", "net", ""]
    assert Trace(by_hand.ops, first_call=0).timeline.ops[0].time_ns == 5000  # not known when it began
    assert [op[:3] for op in Trace().timeline.ops] == [("(start)", "forward", ""), ("(end)", "forward", "")]


def test_a_new_recording_begins_now():
    before = time.time_ns()
    with memory.track() as t:
        torch.zeros(1)
    assert before <= t.began_ns <= t.ops[0].time_ns


def test_a_timeline_is_indexed_like_a_list(by_hand):
    timeline, moments = by_hand.timeline, list(by_hand.timeline)
    assert len(moments) == len(timeline) == 7
    assert timeline[3] == moments[3] == Moment(3, "mm", "forward", "net", memory.Ledger(inputs=30, activations=70))
    assert timeline[-1] == moments[6] and timeline[-1].index == 6
    assert timeline[1:3] == moments[1:3] and timeline[::-2] == moments[::-2] and timeline[9:] == []
    with pytest.raises(IndexError):
        timeline[7]


def test_the_peak_of_a_phase_is_the_first_of_its_highest(by_hand):
    for phase, index in {None: 3, "build": 2, "forward": 3, "backward": 4, "step": 5}.items():
        assert by_hand.peak_moment(phase).index == index
    assert Trace([Op("a", "step", "", 0)], first_call=0).peak_moment("step").ledger == {}
    with pytest.raises(ValueError, match="no operation ran in phase 'optimizer'; this timeline has backward, build"):
        by_hand.peak_moment("optimizer")
