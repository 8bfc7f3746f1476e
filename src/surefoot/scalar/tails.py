r"""Enclosures on a whole half line: power series whose coefficients carry their growth.

Balls cannot enclose :math:`x\,\sigma'(x)` on :math:`[R, \infty)`: one factor is unbounded, the other tends
to zero. So a quantity on a half line :math:`t \ge R` is enclosed together with its growth,

.. math:: q(t) \in t^p e^{-rt} \cdot B \qquad \text{for every } t \ge R,

with exact rationals p, r and a ball B: a :class:`Scale`. Products add exponents; a sum keeps the faster
growing scale and absorbs the other one. A :class:`TailSeries` is a truncated Taylor series of such
quantities, so that it encloses a function and its derivatives at every point of the half line. It has the
arithmetic of ``flint.arb_series``; the elementary functions are in :mod:`surefoot.scalar.primitives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from flint import arb, arb_series, fmpq

LENGTH = 8  # Taylor coefficients of orders 0 to 7: derivatives up to order 5, and two more to sharpen them

INFINITY = arb("inf")
Rational: TypeAlias = Fraction | int  # integers, by far the most frequent, are faster


def ball_of(number: Rational) -> arb:
    """The ball of a rational number; exact where the number is a short dyadic fraction."""
    return arb(fmpq(number.numerator, number.denominator))


def hull(low: arb, high: arb) -> arb:
    """A ball containing [low, high]."""
    return low.union(high) if low.is_finite() and high.is_finite() else arb(0, float("inf"))


@dataclass(frozen=True)
class Scale:
    """The set of functions q with q(t) in ``t**power * exp(-rate * t) * ball`` for every t >= start >= 1."""

    start: Rational
    ball: arb
    power: Rational = 0
    rate: Rational = 0

    @property
    def is_zero(self) -> bool:
        """Whether it is exactly zero."""
        return bool(self.ball == 0)

    @property
    def vanishes(self) -> bool:
        """Whether it tends to zero."""
        return self.rate > 0 or (self.rate == 0 and self.power < 0)

    def factor(self) -> tuple[arb, arb]:
        """The infimum and supremum (or bounds of them) of ``t**power * exp(-rate * t)`` over t >= start.

        Its logarithm has the derivative power / t - rate: positive before t = power / rate, negative after
        (for rate > 0); so the supremum is there, or at the start if that comes later.
        """
        if self.power == self.rate == 0:
            return arb(1), arb(1)
        if self.vanishes:
            peak = max(self.start, Fraction(self.power) / self.rate) if self.rate else self.start
            return arb(0), self._at(peak)
        return (self._at(self.start) if self.power >= 0 else arb(0)), INFINITY

    def _at(self, point: Rational) -> arb:
        return ball_of(point) ** ball_of(self.power) * (-ball_of(self.rate * point)).exp()

    def limits(self) -> tuple[arb, arb]:
        """Bounds, possibly infinite, of q over t >= start."""
        if not self.ball.is_finite():
            return -INFINITY, INFINITY
        least, most = self.factor()
        low, high = self.ball.lower(), self.ball.upper()
        lower = low * (least if low > 0 else most) if low != 0 else low
        upper = high * (most if high > 0 else least) if high != 0 else high
        return lower.lower(), upper.upper()

    def __add__(self, other: Scale) -> Scale:
        """The dominant scale; the other one is at most a bounded multiple of it.

        With quotient exponents (p, r) the other one is in ``ball * [0, sup t**p exp(-r t)]`` of it.
        """
        if self.is_zero or other.is_zero:
            return other if self.is_zero else self
        if self.power == other.power and self.rate == other.rate:
            return Scale(self.start, self.ball + other.ball, self.power, self.rate)
        large, small = sorted((self, other), key=lambda scale: (scale.rate, -scale.power))
        quotient = Scale(self.start, arb(1), small.power - large.power, small.rate - large.rate)
        ball = large.ball + small.ball * hull(*quotient.factor())
        return Scale(self.start, ball, large.power, large.rate)

    def __mul__(self, other: Scale) -> Scale:
        if self.is_zero or other.is_zero:
            return Scale(self.start, arb(0))
        return Scale(self.start, self.ball * other.ball, self.power + other.power, self.rate + other.rate)

    def times(self, factor: arb | float) -> Scale:
        """The product with a number."""
        return self if self.is_zero else Scale(self.start, self.ball * factor, self.power, self.rate)


class TailSeries:
    """Taylor coefficients, one :class:`Scale` each, of a function at every point of a half line.

    The half line is x = ``sign * t`` with t >= start; coefficient k encloses f^(k)(x) / k!.
    """

    __slots__ = ("coefficients", "start")

    def __init__(self, start: Rational, coefficients: Sequence[Scale]) -> None:
        self.start = start
        self.coefficients = list(coefficients)

    @classmethod
    def variable(cls, start: Rational, sign: int) -> TailSeries:
        """The function x itself."""
        one, zero = Scale(start, arb(1)), Scale(start, arb(0))
        return cls(start, [Scale(start, arb(sign), 1), one, *[zero] * (LENGTH - 2)])

    def constant(self, value: arb | float) -> TailSeries:
        """A constant function on the same half line."""
        zero = Scale(self.start, arb(0))
        return TailSeries(self.start, [Scale(self.start, arb(value)), *[zero] * (LENGTH - 1)])

    def unknown(self) -> TailSeries:
        """A function of which nothing is known."""
        return TailSeries(self.start, [Scale(self.start, arb("nan"))] * LENGTH)

    def __getitem__(self, order: int) -> Scale:
        return self.coefficients[order]

    def _lift(self, other: Any) -> TailSeries:
        return other if isinstance(other, TailSeries) else self.constant(other)

    def __add__(self, other: Any) -> TailSeries:
        pairs = zip(self.coefficients, self._lift(other).coefficients, strict=False)
        return TailSeries(self.start, [a + b for a, b in pairs])

    __radd__ = __add__

    def __neg__(self) -> TailSeries:
        return TailSeries(self.start, [c.times(-1) for c in self.coefficients])

    def __sub__(self, other: Any) -> TailSeries:
        return self + (-self._lift(other))

    def __rsub__(self, other: Any) -> TailSeries:
        return -self + other

    def __mul__(self, other: Any) -> TailSeries:
        a, b = self.coefficients, self._lift(other).coefficients
        return TailSeries(self.start, [self._convolve(a, b, order) for order in range(min(len(a), len(b)))])

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> TailSeries:
        return self * self._lift(other).power(-1.0)

    def __rtruediv__(self, other: Any) -> TailSeries:
        return self._lift(other) * self.power(-1.0)

    def _convolve(self, a: Sequence[Scale], b: Sequence[Scale], order: int) -> Scale:
        return sum((a[index] * b[order - index] for index in range(order + 1)), Scale(self.start, arb(0)))

    def derivative(self) -> TailSeries:
        """The series of f'; one coefficient fewer."""
        return TailSeries(self.start, [c.times(k) for k, c in enumerate(self.coefficients)][1:])

    def integral(self, value: Scale) -> TailSeries:
        """The series of the function with this derivative and that value."""
        integrated = [c.times(arb(1) / (k + 1)) for k, c in enumerate(self.coefficients)]
        return TailSeries(self.start, [value, *integrated])

    @property
    def direction(self) -> int:
        """+1 or -1 if the function tends to plus or minus infinity, 0 if that is not known."""
        value = self.coefficients[0]
        if value.vanishes or value.power == value.rate == 0 or not value.ball.is_finite():
            return 0
        return 1 if value.ball > 0 else -1 if value.ball < 0 else 0

    def bounded(self, function: Callable[[arb_series], arb_series]) -> TailSeries:
        """g(f) for g given on ball series: Taylor's series of g on the range of f, composed with f.

        If f tends to zero and g(0) = 0 exactly, then g(f) = f g'(ξ) with ξ between 0 and f tends to zero, too.
        """
        value = self.coefficients[0]
        low, high = value.limits()
        outer = function(arb_series([hull(low, high), 1], prec=LENGTH))
        step = TailSeries(self.start, [Scale(self.start, arb(0)), *self.coefficients[1:]])
        result = self.constant(outer[LENGTH - 1])
        for order in range(LENGTH - 2, -1, -1):
            result = result * step + outer[order]
        if value.vanishes and function(arb_series([arb(0), 1], prec=LENGTH))[0] == 0:
            around_zero = arb(0).union(hull(low, high))
            slope = function(arb_series([around_zero, 1], prec=LENGTH))[1]
            result.coefficients[0] = value.times(slope)
        return result

    def exp(self) -> TailSeries:
        """exp(f): E' = E f', from the value E of the next method."""
        value = self._exp_value()
        if value is None:
            return self.bounded(arb_series.exp)
        coefficients = [value]
        slope = self.derivative().coefficients
        for order in range(1, LENGTH):
            coefficients.append(self._convolve(slope, coefficients, order - 1).times(arb(1) / order))
        return TailSeries(self.start, coefficients)

    def _exp_value(self) -> Scale | None:
        """exp(f(t)) for f(t) = c t^p: a scale if c is exact and p = 1, or if c < 0.

        For c <= -a < 0 and p >= 1, t^p >= R^(p-1) t, so exp(f(t)) <= exp(-a R^(p-1) t); for p < 1,
        exp(f(t)) <= exp(-a R^p).
        """
        value = self.coefficients[0]
        if value.rate == 0 and value.power == 1 and value.ball.is_exact() and value.ball.is_finite():
            return Scale(self.start, arb(1), rate=-rational(value.ball))
        if value.rate != 0 or self.direction >= 0:
            return None
        steepness = -value.ball.upper()
        if value.power < 1:
            decay = (-steepness * ball_of(self.start) ** ball_of(value.power)).exp()
            return Scale(self.start, hull(arb(0), decay))
        rate = (steepness * ball_of(self.start) ** ball_of(value.power - 1)).lower()
        return Scale(self.start, hull(arb(0), arb(1)), rate=rational(rate))

    def log(self) -> TailSeries:
        """log(f) for f(t) = t^p e^(-rt) b with b > 0: log b + p log t - r t, with log t in [0, t / e]."""
        value = self.coefficients[0]
        if not value.ball > 0:
            return self.bounded(arb_series.log)
        linear = hull(arb(0), (-arb(1)).exp()) * ball_of(value.power) - ball_of(value.rate)
        logarithm = Scale(self.start, value.ball.log()) + Scale(self.start, linear, 1)
        return (self.derivative() * self.power(-1.0)).integral(logarithm)

    def power(self, exponent: float) -> TailSeries:
        """f ** exponent, where f keeps its sign (or the exponent is a natural number).

        P = f^e satisfies f P' = e f' P, so k f_0 P_k = sum over j = 1..k of (j e - k + j) f_j P_(k-j).
        """
        value, whole = self.coefficients[0], float(exponent).is_integer()
        if not (value.ball > 0 or (value.ball < 0 and whole)):
            if whole and exponent >= 0:
                result, base, left = self.constant(1.0), self, int(exponent)
                while left:
                    result, base, left = result * base if left % 2 else result, base * base, left // 2
                return result
            return self.bounded(lambda u: u ** arb(exponent))
        sign = -1 if value.ball < 0 and exponent % 2 else 1
        e: Rational = int(exponent) if whole else Fraction(exponent)
        first = Scale(self.start, sign * abs(value.ball) ** arb(exponent), value.power * e, value.rate * e)
        inverse = Scale(self.start, 1 / value.ball, -value.power, -value.rate)
        coefficients = [first]
        for k in range(1, LENGTH):
            weighted = [self.coefficients[j].times(ball_of(j * e - k + j)) for j in range(1, k + 1)]
            total = self._convolve(weighted, coefficients, k - 1)
            coefficients.append((total * inverse).times(arb(1) / k))
        return TailSeries(self.start, coefficients)


def rational(number: arb) -> Fraction:
    """The exact value of a ball of radius zero."""
    mantissa, exponent = number.man_exp()
    return Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
