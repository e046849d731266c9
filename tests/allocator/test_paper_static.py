"""The plan in one screen: the greedy plan of `plan_static`, offset by offset."""

import random

from allocator_kit import random_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from one_screen import check_paper

from refimpl.allocator import plan_static
from refimpl.allocator.static import Lifetimes
from refimpl.common.allocations import ALLOC
from refimpl.papers import static_plan as paper_static

BOXES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 9)).map(
    lambda box: (box[0], box[0] + box[1], box[2])), max_size=30)


def test_one_screen():
    check_paper("allocator", "static_plan")


@given(BOXES)
@settings(max_examples=200, deadline=None)
def test_greedy_is_that_of_plan_static(boxes):
    offsets = paper_static.greedy(boxes)
    lifetimes = Lifetimes(*zip(*boxes, strict=True)) if boxes else Lifetimes([], [], [])
    plan = plan_static(lifetimes, alignment=1, placements=0)
    assert plan.offsets.tolist() == offsets and plan.nbytes == paper_static.arena(boxes, offsets)
    assert plan.lower_bound == paper_static.lower_bound(boxes) and paper_static.overlaps(boxes, offsets) == []


def test_lifetimes_are_those_of_a_trace():
    trace = random_trace(500)
    events = [(block, int(trace.blocks["nbytes"][block]) if action == ALLOC else None)
              for action, block, _, _ in trace.events.tolist()]
    boxes, lives = paper_static.lifetimes(events), Lifetimes.of(trace)
    assert boxes == list(zip(lives.begins.tolist(), lives.ends.tolist(), lives.nbytes.tolist(), strict=True))
    assert paper_static.lower_bound(boxes) == trace.peak


def test_an_overlap_is_found():
    dice = random.Random(0)
    boxes = [(i, i + 2, dice.randrange(1, 9)) for i in range(9)]
    offsets = paper_static.greedy(boxes)
    offsets[4] = offsets[3]
    assert (3, 4) in paper_static.overlaps(boxes, offsets)
