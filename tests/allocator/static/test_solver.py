"""Two of MiniMalloc's problems, which greedy plans miss by over a quarter; small problems, against all plans."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from static_kit import lifetimes_of

from refimpl.allocator import plan_static
from refimpl.allocator.static import Lifetimes
from refimpl.allocator.static.problems import load_problem, problem_names
from refimpl.allocator.static.solver import Attempt, solve

BOXES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6)


def least(lifetimes):
    """The least capacity, by all orders: each block as low as it can be, above what meets it and came before."""
    best = 2**60
    begins, ends, sizes = (each.tolist() for each in (lifetimes.begins, lifetimes.ends, lifetimes.nbytes))
    for order in itertools.permutations(range(len(sizes))):
        tops = {}
        for b in order:
            tops[b] = sizes[b] + max((tops[c] for c in tops if begins[c] < ends[b] and begins[b] < ends[c]), default=0)
        best = min(best, max(tops.values()))
    return best


@given(BOXES)
@settings(max_examples=150, deadline=None)
def test_small_problems_are_solved_in_the_least_capacity_and_in_no_less(boxes):
    lifetimes = lifetimes_of(boxes)
    capacity = least(lifetimes)
    assert solve(lifetimes, capacity).nbytes <= capacity and solve(lifetimes, capacity - 1, steps=3000) is None


@pytest.mark.parametrize("name", ["J", "K"])
def test_problems_of_minimalloc(name):
    lifetimes, capacity = load_problem(name)
    assert capacity == 2**20 >= lifetimes.lower_bound
    assert plan_static(lifetimes, alignment=1, placements=0).nbytes > 1.27 * capacity
    plan, again = solve(lifetimes, capacity), solve(lifetimes, capacity)
    assert plan.nbytes <= capacity and (again.offsets == plan.offsets).all(), "the same each time"
    plan.check()


def test_the_eleven_problems_and_the_example_are_there():
    assert problem_names() == list("ABCDEFGHIJK")
    for name in problem_names():
        lifetimes, capacity = load_problem(name)
        assert (lifetimes.lower_bound < capacity) == (name in "CDJ")
        assert 1.24 < plan_static(lifetimes, alignment=1, placements=0).nbytes / capacity < 1.42
    lifetimes, capacity = load_problem("input")
    assert capacity == 12 and solve(lifetimes, 12).nbytes == 12 and solve(lifetimes, 11) is None


def test_a_search_ends():
    lifetimes, capacity = load_problem("I")
    assert solve(lifetimes, capacity, steps=50) is None and solve(lifetimes, capacity, seconds=0.01) is None
    assert solve(Lifetimes([], [], []), 10).nbytes == 0
    assert solve(Lifetimes([0], [1], [11]), 10) is None, "less than the lower bound"


def test_a_search_has_as_long_as_it_is_given_and_else_no_end():
    lifetimes, capacity = load_problem("input")
    assert solve(lifetimes, capacity, seconds=1e-9) is None
    assert solve(lifetimes, capacity).nbytes == solve(lifetimes, capacity, seconds=100).nbytes == capacity


@pytest.mark.parametrize("steps", [3, 1000])
def test_python_recurses_as_deep_as_before_when_a_search_ends(steps):
    before = sys.getrecursionlimit()
    found = solve(*load_problem("input"), steps=steps)
    assert (found is None) == (steps == 3) and sys.getrecursionlimit() == before


def test_without_bounds_nothing_is_found(monkeypatch):
    """The mutant that undoes a step only when a block does not fit itself."""
    (lifetimes, capacity), whole = load_problem("K"), Attempt._too_high
    assert solve(lifetimes, capacity, steps=3000) is not None
    monkeypatch.setattr(Attempt, "_too_high", lambda self, lowest, raised, left, span: whole(
        self, lowest, raised, np.zeros_like(left), span))
    assert solve(lifetimes, capacity, steps=3000) is None


@pytest.mark.parametrize(("name", "text"), [
    ("p.csv", "id,lower\n1,2\n"), ("p.12.csv", "id,lower,upper,size\n1,2,x,3\n"),
    ("p.x.csv", "id,lower,upper,size\n1,2,3,4\n")])
def test_files_of_another_form_are_named(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"is no problem of MiniMalloc: expected NAME\.CAPACITY\.csv"):
        load_problem(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_problem("Z")
