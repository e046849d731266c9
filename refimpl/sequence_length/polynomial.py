"""Bytes as a polynomial of the sequence length: a·s² + b·s + c, with whole coefficients."""

from dataclasses import dataclass
from math import inf, isqrt


@dataclass(frozen=True)
class Quadratic:
    """a·s² + b·s + c bytes. Adds, subtracts and multiplies; call it with s for the bytes."""

    a: int = 0
    b: int = 0
    c: int = 0

    @classmethod
    def through(cls, function):
        """The polynomial that `function(s)`, which is one of degree 2 or less, is: from its values at 1, 2 and 3.

        ValueError if it is none: a fourth value lies elsewhere, or a coefficient is no integer.
        """
        one, two, three = function(1), function(2), function(3)
        a, odd = divmod(three - 2 * two + one, 2)
        found = cls(a, two - one - 3 * a, 3 * one - 3 * two + three)
        if odd or found(1000) != function(1000):
            raise ValueError(f"{function(1000):,} at s=1000, and not the {found(1000):,} of {found}: no polynomial "
                             "a·s² + b·s + c with whole coefficients")
        return found

    def __call__(self, s):
        return (self.a * s + self.b) * s + self.c

    def __add__(self, other):
        other = other if isinstance(other, Quadratic) else Quadratic(c=other)
        return Quadratic(self.a + other.a, self.b + other.b, self.c + other.c)

    __radd__ = __add__

    def __mul__(self, other):
        """Times an integer, or a polynomial if the product is of degree 2 or less."""
        if not isinstance(other, Quadratic):
            return Quadratic(self.a * other, self.b * other, self.c * other)
        if self.a * other.a or self.a * other.b or self.b * other.a:
            raise ValueError(f"({self}) · ({other}) is of a degree above 2")
        return Quadratic(self.a * other.c + self.b * other.b + self.c * other.a,
                         self.b * other.c + self.c * other.b, self.c * other.c)

    __rmul__ = __mul__

    def __sub__(self, other):
        return self + other * -1

    def largest(self, budget):
        """The largest integer s ≥ 0 with a·s² + b·s + c ≤ budget, for a, b ≥ 0; −1 if c alone is more, infinite if
        nothing grows.

            s = ⌊(−b + √(b² − 4a·(c − budget))) / 2a⌋,    ⌊(budget − c) / b⌋ if a = 0
        """
        room = int(budget) - self.c
        if room < 0:
            return -1
        if not self.a:
            return room // self.b if self.b else inf
        return (isqrt(self.b**2 + 4 * self.a * room) - self.b) // (2 * self.a)

    def __str__(self):
        terms = [f"{factor:,}{power}" for factor, power in ((self.a, "·s²"), (self.b, "·s"), (self.c, "")) if factor]
        return " + ".join(terms).replace("+ -", "− ") or "0"
