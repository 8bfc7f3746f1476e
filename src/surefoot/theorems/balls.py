r"""Ball arithmetic for the theorems, and how the change of the Jacobian adds up with distance.

A ball is a number with an error. An inequality between balls holds only if it holds for all their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


def _positive(ball: arb) -> arb:
    return ball.max(arb(0))


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


@dataclass(frozen=True)
class Profile:
    r"""How fast the Jacobian changes, measured by itself: :math:`\omega(t) \ge \|J^+D^2\psi(u)\|` for
    :math:`\|u - u_0\| \le t`, a step function that does not decrease.

    On a ball :math:`B(u_0, t)`, :math:`\|J^+(D\psi(u) - J)\| \le \int_0^t\omega` (:meth:`turn`). As :math:`JJ^+ =
    I`, :math:`D\psi(u) = JT` with :math:`T = I + J^+(D\psi(u) - J)`; if the integral is less than one, T is
    invertible, :math:`D\psi(u)` is onto like J, and as :math:`T^{-1}J^+z` solves :math:`D\psi(u)v = z`,

    .. math:: \|D\psi(u)^+z\| \le \frac{\|J^+z\|}{1 - \int_0^t\omega}, \qquad
        \sigma_{\min}(D\psi(u)) \ge \sigma\Big(1 - \int_0^t\omega\Big), \qquad
        \|D\psi(u)\| \le \|J\|\Big(1 + \int_0^t\omega\Big).

    :math:`\omega = K/\sigma` is always a choice.

    Attributes:
        steps: pairs of a radius and :math:`\omega` up to it, by increasing radius.

    >>> profile = sf.theorems.Profile.of([(0.5, 2.0), (0.1, 1.0)])
    >>> profile.radius, profile.steps[0]
    (0.5, (0.1, 1.0))
    """

    steps: tuple[tuple[float, float], ...]

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]]) -> Profile:
        """The profile of bounds on balls, in any order; a bound on a larger ball holds on a smaller one."""
        steps: list[tuple[float, float]] = []
        for radius, omega in sorted(pairs, reverse=True):
            if math.isfinite(omega) and radius > 0:
                steps.insert(0, (radius, min(omega, steps[0][1]) if steps else omega))
        return Profile(tuple(steps))

    @property
    def radius(self) -> float:
        """The radius of the largest ball."""
        return self.steps[-1][0] if self.steps else 0.0

    def _pieces(self) -> Iterator[tuple[arb, arb, arb]]:
        start = arb(0)
        for radius, omega in self.steps:
            yield start, arb(radius), arb(omega)
            start = arb(radius)

    def turn(self, t: arb) -> arb:
        """The integral of :math:`\\omega` up to t."""
        return sum(
            (omega * (_positive(t - low) - _positive(t - high)) for low, high, omega in self._pieces()), arb(0)
        )

    def bend(self, t: arb) -> arb:
        """The integral of :math:`(t - s)\\omega(s)` up to t."""
        squares = (
            omega * (square(_positive(t - low)) - square(_positive(t - high))) / 2
            for low, high, omega in self._pieces()
        )
        return sum(squares, arb(0))

    def room(self) -> tuple[float, float]:
        """The longest first step, :math:`\\max_\\tau\\tau - \\int_0^\\tau(\\tau - s)\\omega(s)ds` rounded down,
        and its :math:`\\tau`.
        """
        with ctx.workprec(BITS):
            places = [radius for radius, _ in self.steps]
            turned = arb(0)
            for low, high, omega in self._pieces():
                if proved(omega > 0) and proved(turned < 1):
                    place = low + (1 - turned) / omega
                    if proved(place < high):
                        places.append(below(place))
                turned += omega * (high - low)
            steps = [
                (below(arb(tau) - self.bend(arb(tau))), tau) for tau in places if proved(self.turn(arb(tau)) <= 1)
            ]
        return max(steps, default=(0.0, 0.0))
