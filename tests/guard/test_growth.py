"""Growth is found in what is there where steps end, and not where it only wavers."""

import random

import pytest

from refimpl.guard.growth import Series


def found(values, least=1):
    """(step, what was found) of the first finding in values of steps 1, 2, 3 …; None if there is none."""
    series = Series(least)
    return next(((step, growth) for step, value in enumerate(values, 1) if (growth := series.add(step, value))), None)


@pytest.mark.parametrize(("values", "expected"), [
    ([100, 400, *range(1000, 2000, 5)], (11, (5, 3))),  # from the third step on: the first two make what stays
    ([1000] * 30 + [*range(1000, 2000, 7)], (38, (7, 30))),  # later: two windows behind where it began
    ([1000 + 50 * (step // 10) for step in range(400)], (38, (5, 3)))], ids=["each step", "later", "each tenth"])
def test_growth_is_found_with_its_rate_and_the_step_since_which(values, expected):
    step, (rate, since) = found(values)
    assert step == expected[0] and abs(rate - expected[1][0]) <= 1 and abs(since - expected[1][1]) <= 3


def test_what_wavers_is_no_growth():
    rng = random.Random(0)
    assert found([1000] * 1000) is None
    assert found([1000 + 400 * (step % 2) for step in range(1000)]) is None
    assert found([10**6 + step % 7 for step in range(1000)]) is None
    assert sum(found([rng.randrange(10**6) for _ in range(300)]) is not None for _ in range(20)) <= 2
    assert found([10**9, 10**9, *range(10**9, 10**9 + 500)], least=10) is None  # less than what is looked for


def test_a_short_window_that_led_to_nothing_is_not_asked_again():
    series = Series(1)
    findings = [step for step in range(1, 100) if series.add(step, 5 * step)]
    assert findings == [11, 38] or len(findings) <= 3
