"""What is read from a recording: sums, peaks, names, phases."""

import itertools
import pickle
import time

import pytest
import torch

from refimpl import memory
from refimpl.memory import Moment, Trace, Tracker
from refimpl.memory.trace import Op, StorageRecord, category_of


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


PLAIN = {"device": "cpu", "op": "mm", "phase": "forward", "module": "", "born": 0, "nbytes": 4}


@pytest.mark.parametrize(("known", "category"), [
    ({}, "temporaries"),
    ({"alive": False}, "temporaries"),
    ({"saved": True}, "activations"),
    ({"saved": True, "alive": False}, "activations"),
    ({"offered": True}, "activations"),  # still alive: somebody keeps it for backward
    ({"offered": True, "alive": False}, "temporaries"),  # a technique was asked, and let go
    ({"offered": True, "alive": False, "kept": True}, "activations"),
    ({"packed": True}, "activations"),
    ({"packed": True, "alive": False}, "temporaries"),
    ({"packed": True, "alive": False, "kept": True}, "activations"),
    ({"kept": True}, "temporaries"),  # the user holds it
    ({"kept": True, "alive": False}, "temporaries"),  # … and let it go after backward
    ({"kept": True, "alive": False, "freed_by_backward": True}, "activations"),
    ({"alive": False, "freed_by_backward": True}, "activations"),
    ({"offered": True, "alive": False, "phase": "backward"}, "activations"),  # recomputed
    ({"packed": True, "alive": False, "phase": "backward"}, "temporaries"),
    ({"alive": False, "phase": "backward"}, "temporaries"),
    ({"offered": True, "alive": False, "phase": "step"}, "temporaries"),
    ({"saved": True, "held_by_optimizer": True}, "optimizer state"),
    ({"saved": True, "roles": {"inputs"}}, "inputs"),
    ({"saved": True, "roles": {"inputs", "parameters"}}, "parameters"),
    ({"held_by_optimizer": True, "roles": {"gradients"}}, "gradients"),
    ({"roles": {"parameters"}, "mark": "communication"}, "communication"),
    ({"held_by_optimizer": True, "saved": True, "mark": "of its own"}, "of its own"),
    ({"held_by_optimizer": True}, "optimizer state"),
])
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
    module = StorageRecord(**PLAIN, roles={"parameters"})
    assert Trace([], [held, module]).categories() == ["optimizer state", "parameters"]
    assert Trace([], [held, StorageRecord(**PLAIN, roles={"inputs"})]).categories() == ["parameters", "inputs"]


def test_the_repr_names_the_culprit():
    with memory.track() as t:
        torch.zeros(300)
    assert repr(t).startswith("peak on cpu, after zeros in no module, forward:")
    assert "<code>zeros</code>" in t._repr_html_() and "1,200" in t._repr_html_()


def test_an_empty_recording_reads_nothing():
    with memory.track() as t:
        pass
    assert t.peak == t.now == t.start == {} and t.device == "cpu" and t.top() == []


# --- two devices and phases, on a trace written by hand --------------------------------------------------------------


@pytest.fixture
def by_hand():
    """Five operations; 1,000 and 1 bytes on the CPU, 30 then 70 on cuda:0, 500 on cuda:1. Nothing tracked."""
    ops = [Op("load", "forward", "", 5000), Op("copy", "forward", "", 6000), Op("mm", "forward", "net", 8000),
           Op("mm", "backward", "net", 9500), Op("add", "step", "", 12_000)]
    records = [
        StorageRecord("cpu", "load", "forward", "", 0, 1000, alive=False),
        StorageRecord("cuda:0", "copy", "forward", "", 1, 30, roles={"inputs"}),
        StorageRecord("cuda:0", "mm", "forward", "net", 2, 70, saved=True, alive=False),
        StorageRecord("cuda:1", "mm", "forward", "net", 2, 500),
        StorageRecord("cpu", "(start)", "forward", "", -1, 1, mark="of its own"),
    ]
    events = [(-1, 4, 1), (0, 0, 1000), (1, 1, 30), (2, 2, 70), (2, 3, 500), (4, 2, -70), (5, 0, -1000)]
    return Trace(ops, records, events, first_call=2, began_ns=4000)


def test_each_device_has_its_own_readings(by_hand):
    assert by_hand.devices == ["cpu", "cuda:0", "cuda:1"]
    assert by_hand.device == "cuda:0"
    totals = {device: by_hand.on(device).timeline.totals.tolist() for device in by_hand.devices}
    assert totals == {"cpu": [1, 1001, 1001, 1001, 1001, 1001, 1], "cuda:0": [0, 0, 30, 100, 100, 30, 30],
                      "cuda:1": [0, 0, 0, 500, 500, 500, 500]}
    assert by_hand.timeline.totals.tolist() == totals["cuda:0"]
    assert by_hand.peak == {"inputs": 30, "activations": 70}
    assert by_hand.on("cuda:1").now == by_hand.on(torch.device("cuda:1")).peak == {"temporaries": 500}
    cpu = by_hand.on("cpu")
    assert (cpu.start, cpu.peak) == ({"of its own": 1}, {"temporaries": 1000, "of its own": 1})
    assert cpu.now == {"of its own": 1}  # what left after the last operation is gone
    assert (cpu.device, cpu.first_call, cpu.began_ns) == ("cpu", 2, 4000)
    assert cpu.on("cuda:0").peak == by_hand.peak
    with pytest.raises(ValueError, match="nothing was allocated on 'cuda:2'; this trace saw cpu, cuda:0, cuda:1"):
        by_hand.on("cuda:2")
    with pytest.raises(ValueError, match="nothing was allocated on 'cpu'; this trace saw none"):
        Trace().on("cpu")


def test_the_largest_holders_are_of_the_device_alone(by_hand):
    assert by_hand.top() == [("net", 70), ("(no module)", 30)]
    assert by_hand.top(by="operation") == [("mm", 70), ("copy", 30)]
    assert by_hand.on("cpu").top(by="category") == [("temporaries", 1000), ("of its own", 1)]
    assert by_hand.on("cuda:1").top() == [("net", 500)]
    assert by_hand.top(phase="build") == [("(no module)", 30)]
    assert by_hand.top(phase="step") == [("(no module)", 30)]  # what was freed has left


def test_equal_holders_come_in_the_order_of_their_names():
    records = [StorageRecord("cpu", name, "forward", name, 0, 8) for name in ("b", "c", "a")]
    trace = Trace([Op("x", "forward", "", 1)], records, [(0, i, 8) for i in range(3)])
    assert trace.top(2) == [("a", 8), ("b", 8)]


@pytest.mark.parametrize("device", [None, "cpu", "cuda:1"])
def test_a_trace_in_a_pickle_keeps_its_device(by_hand, device):
    trace = by_hand.on(device) if device else by_hand
    copy = pickle.loads(pickle.dumps(trace))
    assert copy.device == trace.device and copy.peak == trace.peak
    assert (copy.first_call, copy.began_ns) == (trace.first_call, trace.began_ns) == (2, 4000)
    assert (copy.ops, copy.records, copy.events) == (trace.ops, trace.records, trace.events)
    assert copy.devices == trace.devices


def test_building_is_what_runs_forward_before_the_first_call(by_hand):
    """A step or a backward there (of something that is no module) stays what it is."""
    assert [op.phase for op in by_hand.timeline.ops] == [
        "build", "build", "build", "forward", "backward", "step", "step"]
    phases = ["forward", "backward", "step", "forward", "forward"]
    ops = [Op("a", phase, "", 0) for phase in phases]
    build = [moment.phase for moment in Trace(ops, first_call=4).timeline]
    assert build == ["build", "build", "backward", "step", "build", "forward", "forward"]
    assert [op.phase for op in Trace(ops).timeline.ops] == ["forward", *phases, "forward"]


def test_the_lines_of_start_and_end(by_hand):
    start, *_, end = by_hand.timeline.ops
    assert start == Op("(start)", "build", "", 4000) and end == Op("(end)", "step", "", 12_000)
    inside = Trace([Op("a", "forward", "net", 1)], first_call=0).timeline.ops
    assert [op.module for op in inside] == ["", "net", ""]
    assert Trace(by_hand.ops, first_call=0).timeline.ops[0].time_ns == 5000  # not known when it began
    assert [op[:3] for op in Trace().timeline.ops] == [("(start)", "forward", ""), ("(end)", "forward", "")]


def test_a_new_recording_begins_now():
    before = time.time_ns()
    with memory.track() as t:
        torch.zeros(1)
    assert before <= t.began_ns <= t.ops[0].time_ns


def test_a_timeline_is_indexed_like_a_list(by_hand):
    timeline = by_hand.timeline
    moments = list(timeline)
    assert len(moments) == len(timeline) == 7
    assert timeline[3] == moments[3] == Moment(3, "mm", "forward", "net", memory.Ledger(inputs=30, activations=70))
    assert timeline[-1] == moments[6] and timeline[-1].index == 6
    assert timeline[1:3] == moments[1:3] and timeline[::-2] == moments[::-2] and timeline[9:] == []
    with pytest.raises(IndexError):
        timeline[7]


def test_the_peak_of_a_phase_is_the_first_of_its_highest(by_hand):
    assert [by_hand.peak_moment(phase).index for phase in (None, "build", "forward", "backward", "step")] == [
        3, 2, 3, 4, 5]
    empty_step = Trace([Op("a", "step", "", 0)], first_call=0)
    assert empty_step.peak_moment("step").ledger == {}
    with pytest.raises(ValueError, match="no operation ran in phase 'optimizer'; this timeline has backward, build"):
        by_hand.peak_moment("optimizer")
