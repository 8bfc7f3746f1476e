r"""Evaluation of a scalar function on power series that enclose its argument, and how smooth it is.

On a bounded cell the function is evaluated on a power series of balls (``flint.arb_series``) whose constant
term contains the cell: coefficient k then encloses :math:`f^{(k)}/k!` at every point of the cell. On a half
line the same is done with :class:`~surefoot.scalar.tails.TailSeries`.

Kinks. The derivatives of a piecewise function are those of its pieces, except at the breaks. Call *smoothness*
of f at a point the largest m such that :math:`f, f', …, f^{(m-1)}` are continuous there. For a bound of order
k, the Lipschitz constant of :math:`f^{(k-1)}`, we need m ≥ k: then :math:`f^{(k-1)}` is continuous and
piecewise continuously differentiable, so the supremum of the one-sided :math:`f^{(k)}` is right; for m < k
there is none. m is found in two ways, both proofs, of which the better one counts:

* a composition is as smooth as the least smooth of its piecewise steps, whose smoothness is known by comparing
  the Taylor coefficients of the two pieces at the break, which must be exact and equal
  (so CELU is continuously differentiable whatever its scale);
* the same comparison for the whole function at the kink (so the square of a ReLU is).

In both the value *at* the point, where a break belongs to the piece before it, is compared as well: that of
sign(x)² at 0 differs from the limits on both sides, which agree.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TypeAlias

from flint import arb, arb_series, ctx

from surefoot.scalar.function import ScalarFunction, Step
from surefoot.scalar.primitives import PRIMITIVES, Series, is_undefined, unknown
from surefoot.scalar.tails import INFINITY, LENGTH, Scale, TailSeries, ball_of, hull, rational

Interval: TypeAlias = tuple[Fraction | float, Fraction | float]  # the ends are exact; they may be infinite

PRECISION = 80  # bits: enough for doubles after some cancellation
FACTORIAL = [math.factorial(order) for order in range(LENGTH)]
EXACT = 2000  # bits: sums and products of a few doubles are exact
_NEAR = Fraction(1, 2**1200)  # closer than any two doubles: stands for one side of a point


def evaluate(function: ScalarFunction, x: Series, cell: Interval | None) -> tuple[Series, int]:
    """The series of a function of a series, and its smoothness (``LENGTH`` if without kinks).

    The cell is an interval that contains the argument, if one is known exactly: it decides which pieces count.
    Pieces that meet it in a single point do not.
    """
    values: list[Series] = []
    smoothness = LENGTH
    for step in function.steps:
        arguments = [values[operand] for operand in step.operands]
        if step.op == "piecewise":
            inner = _image(function, step.operands[0], cell)
            value, order = _evaluate_piecewise(step, arguments[0], inner)
            smoothness = min(smoothness, order)
        else:
            value = _elementary(step, x, arguments)
        values.append(value)
    return values[-1], smoothness


def _elementary(step: Step, x: Series, arguments: list[Series]) -> Series:
    """A step that is not piecewise."""
    if step.op == "variable":
        return x
    if step.op == "constant":
        value = step.parameters[0]
        return x.constant(value) if isinstance(x, TailSeries) else arb_series([arb(value)], prec=LENGTH)
    return PRIMITIVES[step.op].enclose(*arguments, *step.parameters)


def _image(function: ScalarFunction, index: int, cell: Interval | None) -> Interval | None:
    """The interval of an affine step, exactly."""
    pair = function.affine[index]
    if pair is None or cell is None:
        return None
    slope, intercept = pair
    if slope == 0:
        return intercept, intercept
    if slope == 1 and intercept == 0:
        return cell
    sign = 1 if slope > 0 else -1
    low, high = (sign * end if end in (-math.inf, math.inf) else slope * Fraction(end) + intercept for end in cell)
    return (low, high) if slope > 0 else (high, low)


def _evaluate_piecewise(step: Step, u: Series, cell: Interval | None) -> tuple[Series, int]:
    """The pieces that the argument meets: one of them, or a hull of several."""
    if is_undefined(u):
        return unknown(u), 0
    pieces = list(zip([-math.inf, *step.parameters], [*step.parameters, math.inf], step.pieces, strict=True))
    if cell is not None:
        low, high = cell
        met = [p for p in pieces if (p[0] < high and low < p[1]) or (low == high and p[0] <= low <= p[1])]
    else:
        least, most = u[0].limits() if isinstance(u, TailSeries) else (u[0].lower(), u[0].upper())
        met = [p for p in pieces if not (arb(p[0]) > most or arb(p[1]) < least)]
    if len(met) == 1:
        return evaluate(met[0][2], u, cell)
    value, smoothness = None, LENGTH
    for position, (left, right, piece) in enumerate(met):
        inside = None if cell is None else (max(cell[0], left), min(cell[1], right))
        series, order = evaluate(piece, _clip(u, left, right), inside)
        smoothness = min(smoothness, order)
        if position > 0:
            smoothness = min(smoothness, _join(met[position - 1][2], piece, left))
        value = series if value is None else _union(value, series)
    return value, smoothness


def _clip(u: Series, left: float, right: float) -> Series:
    """The same series, its constant term limited to [left, right]; a half line is left as it is."""
    if isinstance(u, TailSeries):
        return u
    value = u[0].max(arb(left)) if math.isfinite(left) else u[0]
    value = value.min(arb(right)) if math.isfinite(right) else value
    return arb_series([value, *u.coeffs()[1:]], prec=LENGTH)


def _union(a: Series, b: Series) -> Series:
    if isinstance(a, TailSeries):
        pairs = zip(a.coefficients, b.coefficients, strict=True)
        hulls = [hull(*first.limits()).union(hull(*second.limits())) for first, second in pairs]
        return TailSeries(a.start, [Scale(a.start, ball) for ball in hulls])
    return arb_series([a[order].union(b[order]) for order in range(LENGTH)], prec=LENGTH)


@lru_cache(maxsize=4096)
def _join(left: ScalarFunction, right: ScalarFunction, point: float) -> int:
    """The smoothness of a function with these pieces at their break."""
    with ctx.workprec(EXACT):
        at = arb_series([arb(point), 1], prec=LENGTH)
        first, _ = evaluate(left, at, before(point))
        second, _ = evaluate(right, at, after(point))
        return _agreement(first, second, _value_at(left, Fraction(point)))


def before(point: float) -> Interval:
    """The side below a point."""
    return Fraction(point) - _NEAR, Fraction(point)


def after(point: float) -> Interval:
    """The side above a point."""
    return Fraction(point), Fraction(point) + _NEAR


def _value_at(function: ScalarFunction, point: Fraction) -> arb:
    """The value at a point, where a break belongs to the piece before it: a ball, exact where it can be."""
    at = arb_series([ball_of(point)], prec=LENGTH)
    values: list[Series] = []
    for step in function.steps:
        arguments = [values[operand] for operand in step.operands]
        if step.op == "piecewise":
            pair, ball = function.affine[step.operands[0]], arguments[0][0]
            if pair is None and not (ball.is_finite() and ball.is_exact()):
                value, _ = _evaluate_piecewise(step, arguments[0], None)
            else:
                u = rational(ball) if pair is None else pair[0] * point + pair[1]
                value = arb_series([_value_at(step.pieces[bisect_left(step.parameters, u)], u)], prec=LENGTH)
        else:
            value = _elementary(step, at, arguments)
        values.append(value)
    return values[-1][0]


def _agreement(first: Series, second: Series, value: arb) -> int:
    """How many leading coefficients are exact and equal; none if the value at the point is not."""
    if first[0] == value:
        differ = (k for k in range(LENGTH) if not (first[k].is_finite() and first[k] == second[k]))
        return next(differ, LENGTH)
    return 0


@lru_cache(maxsize=4096)
def kinks(function: ScalarFunction) -> tuple[Fraction, ...]:
    """The exactly known points, in order, where pieces meet: breaks of steps whose argument is affine in x.

    Breaks that a nonlinear argument reaches are not listed; a cell that may contain one is enclosed by a hull.
    """
    points: set[Fraction] = set()
    for step in function.steps:
        pair = function.affine[step.operands[0]] if step.op == "piecewise" else None
        if pair is None or pair[0] == 0:
            continue
        met = {Fraction(point) for point in step.parameters}
        ends = [-math.inf, *step.parameters, math.inf]
        for left, piece, right in zip(ends, step.pieces, ends[1:], strict=False):
            met |= {point for point in kinks(piece) if left < point < right}
        points |= {(point - pair[1]) / pair[0] for point in met}
    return tuple(sorted(points))


def doubles_at(kink: Fraction) -> list[float]:
    """The double that is the kink, or the two neighbouring doubles it is between; none if it is beyond doubles."""
    if abs(kink) > sys.float_info.max:
        return []
    nearest = float(kink)
    if nearest == kink:
        return [nearest]
    return sorted([nearest, math.nextafter(nearest, -math.inf if nearest > kink else math.inf)])


@lru_cache(maxsize=4096)
def sides_at(function: ScalarFunction, point: float) -> tuple[tuple[Series, Series], arb, int]:
    """The Taylor series before and after a kink, the value there, and the smoothness by comparing them."""
    with ctx.workprec(EXACT):
        at = arb_series([arb(point), 1], prec=LENGTH)
        first, left = evaluate(function, at, before(point))
        second, right = evaluate(function, at, after(point))
        value = _value_at(function, Fraction(point))
        return (first, second), value, min(left, right, _agreement(first, second, value))


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
