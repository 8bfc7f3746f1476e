r"""From the objective along a segment to a step.

The model :math:`F(\eta) = \sum_{j<m}F_j\eta^j + \eta^mR + E_0 + \eta E_1 + \eta^2E_2` with :math:`|R| \le \rho`
and :math:`|E_k| \le e_k` gives, with

.. math:: S = 2\max_{0\le\eta\le\bar\eta}\Big(\sum_{2\le j<m}F_j\eta^{j-2} + \rho\,\eta^{m-2}\Big) + 2e_2,

the quadratic upper bound :math:`F(\eta) - F(0) \le F'(0)\eta + \frac S2\eta^2 \le (F_1 + e_1)\eta + \frac
S2\eta^2` of the exact function: :math:`E_0` is that of the value at the beginning and falls out. But for
:math:`e_1` its smallest value on the segment is at :math:`\min(\bar\eta, -F_1/S)`: the safe step. The maximum of a
polynomial over an interval is at most the largest of its coefficients in Bernstein's basis, as that basis is a
partition of unity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.taylor import TaylorModel, reach

_UP = 1 + 2.0**-40


@dataclass(frozen=True)
class Majorant:
    r"""A quadratic upper bound along a segment: :math:`F(\eta) \le F(0) + (F_1 + e_1)\eta + \frac S2\eta^2`."""

    value: float  # F_0, as computed
    slope: float  # F_1, as computed
    curvature: float  # S; infinite if there is none
    curvature_at_start: float  # the second derivative at the beginning, as computed
    length: float  # up to which step it holds
    error: float  # on the round-off in F
    slope_error: float = 0.0  # e_1, on that of F_1

    @property
    def step(self) -> float:
        """The step at which the bound is lowest, but for the error of the slope; 0 if the segment does not descend
        or nothing is known.
        """
        if not self.slope < 0 or not math.isfinite(self.curvature):
            return 0.0
        if self.curvature * self.length <= -self.slope:
            return self.length
        return math.nextafter(-self.slope / self.curvature, 0.0)

    def decrease(self, step: float) -> float:
        """By how much F is proved to fall with a step; what the arithmetic here rounds is taken off."""
        gain = -(self.slope + self.slope_error) * step
        loss = 0.5 * self.curvature * step * step
        rounding = (abs(self.slope) * step + abs(gain) + abs(loss)) * 2.0**-50 + 2.0**-1000 * (1.0 + step)
        return gain - loss - rounding


def majorant(model: TaylorModel) -> Majorant:
    """The quadratic bound of a real-valued model of order 2 at least."""
    numbers = [0.0 if c is None else float(c) for c in model.coefficients]
    rest, errors = float(model.rest), model.errors[0].tolist()
    finite = all(map(math.isfinite, [*numbers, rest, *errors]))
    curvature = 2 * (largest([*numbers[2:], rest], model.length) + errors[2]) if finite else math.inf
    curvature += abs(curvature) * (_UP - 1)
    at_start = 2 * numbers[2] if model.order > 2 else math.nan
    error, slope_error = (float(model.error), errors[1]) if finite else (math.inf, math.inf)
    return Majorant(numbers[0], numbers[1], curvature, at_start, model.length, error, slope_error)


def largest(coefficients: list[float], length: float) -> float:
    r"""A bound on the maximum of :math:`\sum_ja_j\eta^j` over :math:`[0, \bar\eta]`.

    With :math:`\eta = \bar\eta t` the Bernstein coefficients of degree d are :math:`b_i = \sum_{j\le
    i}\binom ij\binom dj^{-1}a_j\bar\eta^j`, and the polynomial is at most their maximum.

    >>> round(largest([1.0, -1.0, 1.0], 1.0), 9)
    1.0
    """
    degree = len(coefficients) - 1
    scaled = [a * reach(length, j) if a else 0.0 for j, a in enumerate(coefficients)]
    if not all(map(math.isfinite, scaled)):
        return math.inf
    bernstein = [
        sum(math.comb(i, j) / math.comb(degree, j) * scaled[j] for j in range(i + 1)) for i in range(degree + 1)
    ]
    size = sum(map(abs, scaled))
    return max(bernstein) + size * (_UP - 1) + 2.0**-1000
