"""Ball arithmetic for the theorems: a ball is a number with an error.

An inequality between balls holds only if it holds for all their numbers.
"""

from __future__ import annotations

import math
from fractions import Fraction

from flint import arb, ctx

BITS = 256


def above(ball: arb) -> float:
    """A double that is at least every number of a ball."""
    with ctx.workprec(BITS):
        number = float(ball.upper())
        return number if arb(number) >= ball else math.nextafter(number, math.inf)


def below(ball: arb) -> float:
    """A double that is at most every number of a ball."""
    return -above(-ball)


def proved(claim: object) -> bool:
    """Whether an inequality between balls is certain."""
    return bool(claim)


def square(ball: arb) -> arb:
    """The square of a ball; the power of a ball around zero would not be a number."""
    return ball * ball


def steps_needed(start: float, rate: float, eps: float) -> int:
    """A number k, as small as verified logarithms give it, with rate^k start ≤ eps."""
    if not 0 < eps < math.inf:
        raise ValueError(f"the accuracy eps is a positive number, got {eps!r}")
    if start <= eps:
        return 0
    if not rate < 1:
        raise OverflowError("the rate is one up to round-off: no number of steps can be given")
    if rate <= 0:
        return 1
    with ctx.workprec(BITS):
        needed = (arb(eps) / arb(start)).log() / arb(rate).log()
        if not needed.is_finite():
            raise OverflowError(f"no number of steps can be given from {start!r} to {eps!r}")
        return math.ceil(Fraction(above(needed)))
