"""The dynamic program against every schedule there is, and what it says against what it does."""

import heapq
import random

import pytest

from refimpl.checkpointing import costs, gpt_costs, optimal_schedule, plan_peak, plan_time, time_peak_curve
from refimpl.checkpointing.schedule import Program
from refimpl.model import GPTConfig


def cheapest(chain, budget, drops=False):
    """The least time of any persistent schedule within `budget` bytes, or None: a search over the states of memory.
    With `drops`, of any schedule at all: what was kept may be dropped at any time.

    It knows the operations and their bytes, and nothing of sub-chains, regions or order. State: which x_i stay until
    their backward, which x_i was just made and may be dropped, which stages are saved, and which gradient is there.
    """
    a, d, s = [chain.input_bytes, *chain.output_bytes], [0, *chain.gradient_bytes], [0, *chain.activation_bytes]
    start = (frozenset([0]), None, frozenset(), len(chain))
    best, heap, pushed = {start: 0}, [(0, 0, start)], 0
    while heap:
        time, _, state = heapq.heappop(heap)
        if time > best[state]:
            continue
        kept, fresh, saved, k = state
        if k == 0:
            return time
        following = list(operations(chain, a, d, s, kept, fresh, saved, k))
        if drops:
            following += [(0, 0, (kept - {x}, fresh, saved, k)) for x in kept if x]
            following += [(0, 0, (kept, fresh, saved - {i}, k)) for i in saved]
        for nbytes, took, after in following:
            if nbytes <= budget and time + took < best.get(after, float("inf")):
                best[after], pushed = time + took, pushed + 1
                heapq.heappush(heap, (time + took, pushed, after))
    return None


def operations(chain, a, d, s, kept, fresh, saved, k):
    """(bytes at its peak, time, next state) of everything that can be done next."""
    held = sum(a[i] for i in kept) + sum(s[i] for i in saved)
    for i in range(1, k + 1):
        if i - 1 in kept or i - 1 == fresh:  # another fresh value than the input of this is dropped before
            mine = a[i - 1] if i - 1 == fresh else 0
            time, stays = chain.forward_times[i - 1], kept | {i - 1}
            if i < k:  # F∅, which keeps its input or not
                nbytes = held + mine + d[k] + chain.forward_peaks[i - 1]
                for keeps in {kept, stays} if i - 1 == fresh else {kept}:
                    yield nbytes, time, (keeps, None if i in keeps else i, saved, k)
            if i not in saved:  # Fall, which keeps its input and output; before B(i) there is no output
                nbytes = held + mine + d[k] + chain.saving_peaks[i - 1]
                yield nbytes, time, (stays | {i} if i < k else stays, None, saved | {i}, k)
    if k in saved and k - 1 in kept:  # B
        nbytes = held - s[k] - (a[k] if k in kept else 0) + chain.backward_peaks[k - 1]
        yield nbytes, chain.backward_times[k - 1], (kept - ({k} if k == 1 else {k - 1, k}), None, saved - {k}, k - 1)


def random_chain(n, rng):
    """Small integers, so that budgets one byte apart matter; peaks given in half of the chains."""
    outputs, kept, more = [rng.randint(1, 6) for _ in range(n)], [rng.randint(0, 10) for _ in range(n)], {}
    if rng.random() < 0.5:
        more = {"forward_peaks": [a + rng.randint(0, 25) for a in outputs],
                "saving_peaks": [a + s + rng.randint(0, 5) for a, s in zip(outputs, kept, strict=True)],
                "backward_peaks": [rng.randint(0, 25) for _ in range(n)]}
    return costs([rng.randint(1, 9) for _ in range(n)], kept, outputs, input_bytes=rng.randint(0, 4),
                 backward_times=[rng.randint(0, 9) for _ in range(n)], **more)


@pytest.mark.parametrize("n", range(1, 8))
def test_no_schedule_is_faster(n):
    """At every budget where something changes, and one byte below it."""
    rng = random.Random(n)
    for _ in range(12 if n < 6 else 4):
        chain = random_chain(n, rng)
        steps = (program := Program(chain)).curve()
        for budget in {b for peak, _ in steps for b in (peak, peak - 1) if b > 0}:
            expected = cheapest(chain, budget)
            if expected is None:
                with pytest.raises(ValueError, match=f"{steps[0][0]:,} bytes, the smallest feasible"):
                    program.schedule(budget)
            else:
                assert program.schedule(budget).time == expected


def test_what_dropping_kept_values_could_add():
    """Nothing to a GPT; up to a fifth to random chains: what the search for persistent schedules leaves out."""
    blocks = gpt_costs(GPTConfig(vocab_size=64, context_length=64, layers=4, hidden=32, heads=4), 2, 64)
    assert all(time == cheapest(blocks, peak, drops=True) for peak, time in Program(blocks).curve())
    rng, ratios = random.Random(1), []
    for _ in range(10):
        chain = random_chain(4, rng)
        for peak, time in Program(chain).curve():
            ratios.append(time / cheapest(chain, peak, drops=True))
    assert 1 < max(ratios) < 1.3 and min(ratios) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_takes_what_its_schedule_says(seed):
    chain = random_chain(12, random.Random(seed))
    for peak, time in Program(chain).curve():
        schedule = Program(chain).schedule(peak)
        assert (schedule.peak, schedule.time) == (peak, time)
        assert plan_peak(chain, schedule.plan) <= peak and plan_time(chain, schedule.plan) == time


def test_a_program_that_only_cuts_into_segments_is_worse():
    """The mutant: one level of regions, as √N has it. It must need more bytes or more time somewhere."""
    chain = costs([1] * 9, [10] * 9, [1] * 9)
    flat = [[(0, 1, 2), (3, 4, 5), 6, 7, 8], [tuple(range(i, i + 1)) for i in range(8)] + [8]]
    assert all(plan_peak(chain, plan) > min(dict(Program(chain).curve())) for plan in flat)
    assert Program(chain).schedule(plan_peak(chain, flat[1])).time <= plan_time(chain, flat[1])


def test_more_bytes_never_take_more_time():
    curve = time_peak_curve([3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [1, 2, 1, 2, 1, 2])
    assert curve == sorted(curve) and [t for _, t in curve] == sorted((t for _, t in curve), reverse=True)
    assert curve[-1][1] == 3 * 23, "with room for all of it nothing runs twice"


def test_with_room_everything_is_kept():
    schedule = optimal_schedule([1] * 5, [10] * 5, budget=1000)
    assert schedule.plan == [0, 1, 2, 3, 4] and schedule.forwards == [1] * 5 and schedule.time == 15


@pytest.mark.parametrize(("budget", "message"), [
    (0, "budget=0: expected a positive number of bytes"), (-1, "budget=-1"), (float("nan"), "budget=nan"),
    ("8", "budget='8'"), (True, "budget=True"), (11, "budget=11 bytes: .* 5 stages .* 13 bytes, the smallest")])
def test_a_budget_that_cannot_be_met(budget, message):
    with pytest.raises(ValueError, match=message):
        optimal_schedule([1] * 5, [10] * 5, [1] * 5, budget=budget)
    assert optimal_schedule([1] * 5, [10] * 5, [1] * 5, budget=13).peak == 13


@pytest.mark.parametrize("search", [optimal_schedule, time_peak_curve])
def test_a_cost_that_nobody_knows(search):
    options = {"budget": 9} if search is optimal_schedule else {}
    with pytest.raises(TypeError, match=f"{search.__name__} has no option 'peaks': expected forward_times, backward_"):
        search([1], [1], peaks=[1], **options)


@pytest.mark.parametrize(("arguments", "message"), [
    (([], []), "forward_times is empty"), (([1, 2], [1]), "activation_bytes has 1 entries: expected 2"),
    (([1, float("nan")], [1, 1]), r"forward_times\[1\] is nan"), (([1], [-3]), r"activation_bytes\[0\] is -3"),
    (([1], [1], [float("inf")]), r"output_bytes\[0\] is inf")])
def test_costs_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        costs(*arguments)
