"""The simulator in one screen is the hardened one: orders, times, idle time, counts, and what deadlocks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_screen import check_paper

from refimpl.papers import pipeline_simulator as paper
from refimpl.pipeline.instructions import Instruction, Schedule
from refimpl.pipeline.named_schedules import BUILDERS, idle_time, schedule
from refimpl.pipeline.step_simulation import Costs, simulate
from refimpl.pipeline.validate import DeadlockError, validate

ORDERS = {"1f1b": paper.one_forward_one_backward, "zb-h1": paper.zb_h1}


@pytest.mark.core
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 2), (4, 8), (4, 16), (8, 5), (8, 16)])
def test_orders_are_the_hardened_ones(name, p, m):
    orders = ORDERS[name](p, m)
    assert orders == [list(order) for order in schedule(name, p, m).ranks]
    assert m < p or paper.simulate(orders, p)[1][0] == idle_time(name, p)


@pytest.mark.core
@given(st.sampled_from(list(BUILDERS)), st.integers(1, 5), st.integers(1, 10),
       st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))
def test_times_and_counts_are_the_hardened_ones(name, ranks, micro_batches, costs):
    built = schedule(name, ranks, micro_batches)
    times, idle, most = paper.simulate(built.ranks, built.stages, *costs)
    step = simulate(built, Costs(*costs))
    assert times == {each: (begin, end) for rank in step.ranks for each, begin, end in rank}
    assert tuple(idle) == step.idle and most == [count.peak for count in validate(built)]


@given(st.data(), st.integers(2, 4), st.integers(1, 4))
def test_what_deadlocks_here_deadlocks_there(data, p, m):
    """Instructions of ranks moved to other places: both find the same orders impossible."""
    orders = paper.one_forward_one_backward(p, m)
    for _ in range(3):
        order = data.draw(st.sampled_from(orders))
        order.insert(data.draw(st.integers(0, 2 * m)), order.pop(data.draw(st.integers(0, 2 * m - 1))))
    ranks = tuple(tuple(Instruction(*each) for each in order) for order in orders)
    try:
        validate(Schedule("moved", ranks, tuple(range(p)), m))
    except ValueError:
        with pytest.raises(ValueError, match="deadlock: rank"):
            paper.simulate(orders, p)
    else:
        assert len(paper.simulate(orders, p)[0]) == 2 * p * m


def test_a_deadlock_names_where_ranks_are():
    orders = [[("F", 0, 0), ("FULL", 0, 0), ("F", 0, 1), ("FULL", 0, 1)],
              [("F", 1, 0), ("F", 1, 1), ("FULL", 1, 0), ("FULL", 1, 1)]]
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at \('FULL', 0, 0\), rank 1 at \('F', 1, 1\)"):
        paper.simulate(orders, 2)
    with pytest.raises(DeadlockError):
        validate(Schedule("x", tuple(tuple(Instruction(*each) for each in order) for order in orders), (0, 1), 2))


def test_it_is_one_screen_by_itself():
    check_paper("pipeline", "pipeline_simulator")
    assert "torch" not in Path(paper.__file__).read_text()
