"""Enclosures of a scalar function and its derivatives on one interval: several, of which the best counts."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property

from flint import arb, arb_series, ctx

from surefoot.scalar.enclosure import Interval, after, before, evaluate, sides_at
from surefoot.scalar.function import ScalarFunction
from surefoot.scalar.primitives import Series
from surefoot.scalar.tails import INFINITY, LENGTH, TailSeries, hull

PRECISION = 80  # bits: enough for doubles after some cancellation
FACTORIAL = [math.factorial(order) for order in range(LENGTH)]


class Cell:
    """Enclosures of f and its derivatives on the interval [low, high].

    Known kinks must not be inside it; at its ends they do not count. A cell that is a single point does count
    the pieces on both sides. An infinite cell, or one with high > 4 low, begins at 1 or beyond and is enclosed as
    (part of) a half line.
    """

    def __init__(self, function: ScalarFunction, low: float, high: float) -> None:
        self.function, self.low, self.high = function, low, high
        near, far = sorted((low, high), key=abs)
        self.is_tail = low * high > 0 and abs(near) >= 1 and abs(far) > 4 * abs(near)
        self.middle = near if self.is_tail else low + (high - low) / 2
        cell: Interval = (low, high)
        with ctx.workprec(PRECISION):
            if self.is_tail:
                variable: Series = TailSeries.variable(Fraction(abs(near)), 1 if near > 0 else -1)
                side = after(near) if near > 0 else before(near)
            else:
                variable = arb_series([arb(low).union(arb(high)), 1], prec=LENGTH)
                side = (self.middle, self.middle)
            self.wide, self.smoothness = evaluate(function, variable, cell)
            self.centre, _ = evaluate(function, arb_series([arb(self.middle), 1], prec=LENGTH), side)
        self.sides: tuple[Series, ...] = (self.wide,)
        self.at: arb | None = None
        if low == high and self.smoothness < LENGTH:
            self.sides, self.at, smoothness = sides_at(function, low)
            self.smoothness = max(self.smoothness, smoothness)

    def value(self, order: int) -> tuple[arb, arb]:
        """Bounds of the derivative of that order at the middle (the near end of a half line)."""
        return ends_of(self.centre[order] * FACTORIAL[order])

    def range(self, order: int) -> tuple[arb, arb]:
        """Bounds of the derivative of that order on the cell, infinite where it does not exist.

        Three enclosures, of which the better ends count: the ball itself and, where the derivative of the
        next order (two orders) is that of an absolutely continuous function, Taylor's formula around the middle.
        """
        if order > self.smoothness:
            return -INFINITY, INFINITY
        with ctx.workprec(PRECISION):
            if self.is_tail:
                return self._tail_range(order)
            sides = [ends_of(side[order] * FACTORIAL[order]) for side in self.sides]
            sides += [ends_of(self.at)] if order == 0 and self.at is not None else []
            candidates = [(min(low for low, _ in sides), max(high for _, high in sides))]
            reach = arb(0, self.radius)
            if order < self.smoothness and order + 1 < LENGTH:
                slope = self.wide[order + 1] * FACTORIAL[order + 1]
                candidates.append(ends_of(self.centre[order] * FACTORIAL[order] + slope * reach))
            if order + 1 < self.smoothness and order + 2 < LENGTH:
                linear = (
                    self.centre[order] * FACTORIAL[order] + self.centre[order + 1] * FACTORIAL[order + 1] * reach
                )
                bend = self.wide[order + 2] * (FACTORIAL[order + 2] // 2)
                candidates.append(ends_of(linear + bend * hull(arb(0), reach.upper() * reach.upper())))
        return _intersection(candidates)

    def range_by_ends(self, order: int) -> list[tuple[arb, arb]]:
        """If the derivative of that order is monotone, its values at the two ends, its extremes; else nothing."""
        if order >= self.smoothness or order + 1 == LENGTH or not math.isfinite(self.high - self.low):
            return []
        falling, rising = self.range(order + 1)
        if not (falling >= 0 or rising <= 0):
            return []
        values = []
        with ctx.workprec(PRECISION):
            for end, side in ((self.low, after(self.low)), (self.high, before(self.high))):
                series, _ = evaluate(self.function, arb_series([arb(end), 1], prec=LENGTH), side)
                values.append(ends_of(series[order] * FACTORIAL[order]))
        return values

    @cached_property
    def radius(self) -> float:
        """At least the distance from the middle to either end."""
        distance = max(self.high - self.middle, self.middle - self.low)
        return math.nextafter(distance, math.inf) if distance else 0.0

    def _tail_range(self, order: int) -> tuple[arb, arb]:
        """The limits of the scale; and where the next derivative has a sign, the value at the near end."""
        low, high = self.wide[order].limits()
        candidates = [(low * FACTORIAL[order], high * FACTORIAL[order])]
        if order < self.smoothness and order + 1 < LENGTH:
            falling, rising = self.wide[order + 1].limits()
            least, most = self.value(order)
            outwards = (falling >= 0, rising <= 0) if self.low > 0 else (rising <= 0, falling >= 0)
            candidates += [(least, INFINITY)] * outwards[0] + [(-INFINITY, most)] * outwards[1]
        return _intersection(candidates)

    def split(self, farthest: float) -> list[tuple[float, float]]:
        """Two intervals that cover this one: its halves; of a half line, an octave and the rest.

        None if it is too narrow, or a half line too far away, for that to be of use.
        """
        point = self.middle * 2 if self.is_tail else self.middle
        narrow = self.high - self.low <= abs(self.middle) * 2.0**-48 or self.high - self.low < 1e-300
        if narrow or (math.isinf(self.high - self.low) and abs(point) > farthest):
            return []
        return [(self.low, point), (point, self.high)]


def ends_of(ball: arb) -> tuple[arb, arb]:
    """The ends of a ball; infinite ones if it is not finite or not a number."""
    return (ball.lower(), ball.upper()) if ball.is_finite() else (-INFINITY, INFINITY)


def _intersection(candidates: list[tuple[arb, arb]]) -> tuple[arb, arb]:
    low, high = candidates[0]
    for least, most in candidates[1:]:
        low, high = (least if least > low else low), (most if most < high else high)
    return low, high


def upwards(number: arb) -> float:
    """The least double that is known to be at least the number."""
    value = float(number)
    return value if arb(value) >= number else math.nextafter(float(number.upper()), math.inf)


def downwards(number: arb) -> float:
    """The largest double that is known to be at most the number."""
    return -upwards(-number)
