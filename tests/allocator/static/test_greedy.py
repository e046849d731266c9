"""Blocks placed in any order, by best fit and first fit: never two on one address."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from static_kit import lifetimes_of

from refimpl.allocator import StaticPlan, plan_static
from refimpl.allocator.static import Lifetimes, greedy

BOXES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(0, 9)), min_size=1, max_size=25)


@given(boxes=BOXES, alignment=st.sampled_from([1, 4]), fit=st.sampled_from(["best", "first"]))
@settings(max_examples=300, deadline=None)
def test_no_two_blocks_share_an_address(boxes, alignment, fit):
    """Against a check of its own, time by time and byte by byte."""
    lifetimes = lifetimes_of(boxes)
    sizes = lifetimes.aligned(alignment)
    offsets = greedy.place(lifetimes, sizes, greedy.by_size(lifetimes, sizes), fit)
    plan = plan_static(lifetimes, alignment=alignment, placements=200)
    assert plan.nbytes <= StaticPlan(lifetimes, offsets, sizes).nbytes or fit == "first"
    for each in (offsets, plan.offsets):
        for t in range(20):
            taken = [byte for b, (begin, width, _) in enumerate(boxes) if begin <= t < begin + width
                     for byte in range(each[b], each[b] + sizes[b])]
            assert len(taken) == len(set(taken))
    assert not (plan.offsets % alignment).any()


@pytest.mark.parametrize(("fit", "offset"), [("best", 8), ("first", 0)])
def test_best_fit_takes_the_smallest_gap_and_first_fit_the_lowest(fit, offset):
    """From below: a gap of 4, a block, a gap of 2, a block."""
    lows, tops = np.array([4, 10]), np.array([8, 12])
    assert greedy._gap(lows, tops, 2, fit) == offset
    assert greedy._gap(lows, tops, 4, fit) == 0 and greedy._gap(lows, tops, 5, fit) == 12


def test_orders():
    lifetimes = Lifetimes([0, 0, 5, 1], [9, 3, 8, 4], [4, 8, 8, 8])
    assert greedy.by_size(lifetimes, lifetimes.nbytes).tolist() == [1, 3, 2, 0]
    assert greedy.by_area(lifetimes, lifetimes.nbytes).tolist() == [0, 1, 3, 2]
    assert greedy.by_fullest(lifetimes, lifetimes.nbytes).tolist() == [0, 1, 3, 2]
