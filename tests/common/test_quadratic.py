"""Polynomials of s: exact arithmetic, exact roots."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.common.quadratic import Quadratic

coefficients = st.integers(0, 10**12)


@given(coefficients, coefficients, coefficients, st.integers(0, 10**6))
def test_the_largest_s_is_the_largest(a, b, c, s):
    form = Quadratic(a, b, c)
    if a or b:
        assert form.largest(form(s)) == s and form.largest(form(s + 1) - 1) == s
    if (a or b) and form(s) < 2**50:  # beyond, half a byte is lost in a float
        assert form.largest(form(s) + 0.5) == s
    assert form.largest(c - 1) == -1 and Quadratic(c=c).largest(c) == math.inf


@given(coefficients, coefficients, coefficients, st.integers(0, 10**4))
def test_sums_and_products_are_those_of_the_values(a, b, c, s):
    form, line = Quadratic(a, b, c), Quadratic(b=b, c=a)
    assert (form + line)(s) == form(s) + line(s) and (form - 3)(s) == form(s) - 3
    assert (line * line)(s) == line(s) ** 2 and (3 * form)(s) == (form * 3)(s) == 3 * form(s)
    assert sum([form, line], Quadratic())(s) == form(s) + line(s)


@given(coefficients, coefficients, coefficients)
def test_a_closed_form_is_found_from_its_values(a, b, c):
    assert Quadratic.through(Quadratic(a, b, c)) == Quadratic(a, b, c)


@given(coefficients, coefficients, coefficients, st.sets(st.integers(1, 10**5), min_size=3, max_size=3))
def test_three_points_determine_it(a, b, c, lengths):
    form = Quadratic(a, b, c)
    assert Quadratic.fit({s: form(s) for s in lengths}) == form


def test_of_bits_there_are_parts_of_bytes():
    """A mask of one bit for each token that a query sees, s(s + 1)/2 bits: whole bytes at the lengths that are run."""
    form = Quadratic.fit({s: 7 + s * (s + 1) // 16 for s in (15, 16, 31)})
    assert form == Quadratic(Fraction(1, 16), Fraction(1, 16), 7) and str(form) == "1/16·s² + 1/16·s + 7"
    assert form.largest(form(1600)) == 1600 and form.largest(form(1600) - 1) == 1599


def test_bytes_that_fall_at_first():
    """As those of a step that pads: the larger root counts."""
    form = Quadratic(1, -100, 5000)
    assert form.largest(5000) == 100 and form.largest(2500) == 50 and form.largest(2499) == -1
    assert Quadratic(b=-1, c=10).largest(0) == Quadratic(a=-1).largest(0) == math.inf


def test_what_is_no_quadratic_is_refused():
    with pytest.raises(ValueError, match="1,000,000,000, but .*, fitted at .*: expected a polynomial"):
        Quadratic.through(lambda s: s**3)
    with pytest.raises(ValueError, match="expected a polynomial a·s² .* with integer coefficients"):
        Quadratic.through(lambda s: s * (s + 1) // 2)
    with pytest.raises(ValueError, match="is of a degree above 2"):
        Quadratic(a=1) * Quadratic(b=1)


def test_it_reads_like_a_polynomial():
    assert str(Quadratic(1200, 0, 7)) == "1,200·s² + 7" and str(Quadratic(b=-3, c=-4)) == "-3·s − 4"
    assert str(Quadratic()) == "0"
