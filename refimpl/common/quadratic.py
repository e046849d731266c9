"""Bytes as a polynomial of the sequence length: a·s² + b·s + c, in exact arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf, isqrt, lcm
from typing import Any, Self


@dataclass(frozen=True)
class Quadratic:
    """Represents a·s² + b·s + c bytes. It can be added, subtracted and multiplied; call it with s for the bytes.

    Coefficients are integers. They are Fractions where, for example, a tensor takes one bit per token.
    """

    a: int | Fraction = 0
    b: int | Fraction = 0
    c: int | Fraction = 0

    @classmethod
    def through(cls, function: Callable[[int], int]) -> Self:
        """Find the polynomial of degree 2 or less that equals `function(s)`, from the values at s = 1, 2 and 3.

        Raises ValueError if a fourth value, at s = 1000, is not on it, or a coefficient is not an integer.
        """
        found = cls.fit({s: function(s) for s in (1, 2, 3)})
        if any(type(each) is Fraction for each in (found.a, found.b, found.c)) or found(1000) != function(1000):
            raise ValueError(f"function(1000) is {function(1000):,}, but {found}, fitted at s = 1, 2 and 3, gives "
                             f"{found(1000)}: expected a polynomial a·s² + b·s + c with integer coefficients")
        return found

    @classmethod
    def fit(cls, points: Mapping[int, int]) -> Self:
        """Find the polynomial through three points {s: bytes}, by Newton's divided differences:

            a = ((y₃ − y₂)/(s₃ − s₂) − (y₂ − y₁)/(s₂ − s₁)) / (s₃ − s₁)
        """
        (s1, y1), (s2, y2), (s3, y3) = points.items()
        first, second = Fraction(y2 - y1, s2 - s1), Fraction(y3 - y2, s3 - s2)
        a = (second - first) / (s3 - s1)
        b = first - a * (s1 + s2)
        coefficients = a, b, y1 - (a * s1 + b) * s1
        return cls(*(int(each) if each.denominator == 1 else each for each in coefficients))

    def __call__(self, s: int) -> Any:
        return (self.a * s + self.b) * s + self.c

    def __add__(self, other):
        other = other if isinstance(other, Quadratic) else Quadratic(c=other)
        return Quadratic(self.a + other.a, self.b + other.b, self.c + other.c)

    __radd__ = __add__

    def __mul__(self, other):
        """Multiply by a number, or by a polynomial if the product is of degree 2 or less."""
        if not isinstance(other, Quadratic):
            return Quadratic(self.a * other, self.b * other, self.c * other)
        if self.a * other.a or self.a * other.b or self.b * other.a:
            raise ValueError(f"({self}) · ({other}) is of a degree above 2, and a Quadratic holds degrees up to 2")
        return Quadratic(self.a * other.c + self.b * other.b + self.c * other.a,
                         self.b * other.c + self.c * other.b, self.c * other.c)

    __rmul__ = __mul__

    def __sub__(self, other):
        return self + other * -1

    def largest(self, budget: int) -> int | float:
        """Solve for the largest integer s ≥ 0 with a·s² + b·s + c ≤ budget. Returns −1 if there is none, and infinity
        if every s fits.

            s = ⌊(−b + √(b² − 4a·(c − budget))) / 2a⌋,    ⌊(budget − c) / b⌋ if a = 0
        """
        # integers: floats are wrong above 2⁵³
        whole = lcm(*(Fraction(each).denominator for each in (self.a, self.b, self.c)))
        a, b, room = (int(each * whole) for each in (self.a, self.b, int(budget) - self.c))
        if a < 0 or (a == 0 and b < 0) or (a == b == 0 and room >= 0):
            return inf
        square = b * b + 4 * a * room
        if square < 0 or a == b == 0:
            return -1
        return max(-1, (isqrt(square) - b) // (2 * a) if a else room // b)

    def __str__(self):
        terms = [f"{_text(factor)}{power}" for factor, power in ((self.a, "·s²"), (self.b, "·s"), (self.c, ""))
                 if factor]
        return " + ".join(terms).replace("+ -", "− ") or "0"


def _text(factor):
    return f"{factor:,}" if isinstance(factor, int) else str(factor)
