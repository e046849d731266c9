"""Polynomials of s: exact arithmetic, exact roots."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.sequence_length import Quadratic

coefficients = st.integers(0, 10**12)


@given(coefficients, coefficients, coefficients, st.integers(0, 10**6))
def test_the_largest_s_is_the_largest(a, b, c, s):
    form = Quadratic(a, b, c)
    if a or b:
        assert form.largest(form(s)) == s and form.largest(form(s + 1) - 1) == s
    if (a or b) and form(s) < 2**50:  # beyond, half a byte is lost in a float
        assert form.largest(form(s) + 0.5) == s
    assert form.largest(c - 1) == -1
    assert Quadratic(c=c).largest(c) == math.inf


@given(coefficients, coefficients, coefficients, st.integers(0, 10**4))
def test_sums_and_products_are_those_of_the_values(a, b, c, s):
    form, line = Quadratic(a, b, c), Quadratic(b=b, c=a)
    assert (form + line)(s) == form(s) + line(s) and (form - 3)(s) == form(s) - 3
    assert (line * line)(s) == line(s) ** 2 and (3 * form)(s) == (form * 3)(s) == 3 * form(s)
    assert sum([form, line], Quadratic())(s) == form(s) + line(s)


@given(coefficients, coefficients, coefficients)
def test_a_closed_form_is_found_from_its_values(a, b, c):
    assert Quadratic.through(Quadratic(a, b, c)) == Quadratic(a, b, c)


def test_what_is_no_quadratic_is_refused():
    with pytest.raises(ValueError, match="1,000,000,000 at s=1000, and not the .*: no polynomial"):
        Quadratic.through(lambda s: s**3)
    with pytest.raises(ValueError, match="no polynomial a·s² .* with whole coefficients"):
        Quadratic.through(lambda s: s * (s + 1) // 2)
    with pytest.raises(ValueError, match="is of a degree above 2"):
        Quadratic(a=1) * Quadratic(b=1)


def test_it_reads_like_a_polynomial():
    assert str(Quadratic(1200, 0, 7)) == "1,200·s² + 7" and str(Quadratic(b=-3, c=-4)) == "-3·s − 4"
    assert str(Quadratic()) == "0"
