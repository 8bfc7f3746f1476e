r"""A function of a model's parameters along segments from its present weights.

From the objective along a segment to a step.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.analysis import Analysis
from surefoot.calculus.segment.walk import expand, leaf_models
from surefoot.domains import DomainError
from surefoot.norms.hermitian import times_power
from surefoot.operations.call import Norms
from surefoot.taylor import TaylorModel, is_finite, reach

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
        """The step at which the bound is lowest, but for the error of the slope; 0 if it does not descend."""
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


_EXTREME = 50  # lengths between 2^-50 and 2^50 are taken as they are
_LOST = 2.0**-1000
_TRIALS = 40  # reductions of a segment before giving up


class Along:
    """A function of a model's parameters along segments from its present weights.

    Built once per batch. Whatever changed in between, a segment starts at the weights as they are when it is
    asked for, and is one of the function that the model computes then. ``expansions`` counts them.

    Args:
        model: the model, with values.
        x: a batch.
        objective: a loss bound to its targets, or ``None`` for the model's output.
        norms: what is known about the norms of its layers, shared from batch to batch and from step to step.
        stored: whether what is said of steps of an eighth of a segment or more shall hold for weights that are
            rounded to double precision at the end.
        aside: by path, how far other directions may be from those that are asked for, in norm, if what is said
            shall hold along them as well.
        previous: an analysis of the same, which is used as long as it is true.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        objective: nn.Module | None,
        norms: Norms | None = None,
        *,
        stored: bool = False,
        aside: Mapping[str, float] | None = None,
        previous: Analysis | None = None,
    ) -> None:
        self._stored, self._aside, self.expansions = stored, aside or {}, 0
        self._last = Analysis.of(model, x, objective, previous, norms)
        self._last.require_values()

    @property
    def analysis(self) -> Analysis:
        """The analysis of the function as it is now."""
        self._last = Analysis.of(self._last.model, self._last.x, self._last.objective, self._last)
        return self._last

    def expand(self, direction: Mapping[str, Tensor], length: float, order: int) -> tuple[TaylorModel, ...]:
        """The outputs along a direction, by parameter path."""
        self.expansions += 1
        return _expand(self.analysis, direction, length, order, self._stored, self._aside)

    def majorant(self, direction: Mapping[str, Tensor], length: float, order: int) -> Majorant:
        """The quadratic upper bound of the objective along a direction."""
        (output,) = self.expand(direction, length, order)
        return majorant(output)

    def longest(
        self, direction: Mapping[str, Tensor], whole: Majorant, order: int, refinements: int = 0
    ) -> Majorant:
        """The bound on a part of the segment that is not much longer than the step it allows."""
        return longest(lambda length: self.majorant(direction, length, order), whole, refinements)

    def steepest_descent(self) -> dict[str, Tensor]:
        """Minus the gradient of the objective, in double precision."""
        return {path: -slope for path, slope in self.analysis.gradient.items()}


def longest(on: Callable[[float], Majorant], whole: Majorant, refinements: int = 0) -> Majorant:
    """The bound on a part of a segment, from its beginning, that is not much longer than the step it allows.

    The bound of a shorter segment is lower, so its step may be longer. The best part is as long as its step: the
    length is reduced until the step is a quarter of it, then, if wanted, found by halving the interval. Where
    nothing is found, the step is zero.

    Args:
        on: the bound on the part of a length.
        whole: that on the whole segment.
        refinements: how often the interval is halved.
    """
    bound, too_long = whole, whole.length
    for _ in range(_TRIALS):
        if bound.step >= 0.25 * bound.length:
            break
        too_long = bound.length
        shorter = 2 * bound.step if bound.step > 0.1 * bound.length else bound.length / 5
        if shorter == 0:
            break
        bound = on(shorter)
    low = bound.step
    for _ in range(refinements):
        if not low < 0.99 * too_long:
            break
        middle = on(0.5 * (low + too_long))
        bound = middle if middle.step > bound.step else bound
        if middle.step >= 0.999 * middle.length:
            low = middle.length
        else:
            too_long = middle.length
    return bound


def _expand(
    analysis: Analysis,
    direction: Mapping[str, Tensor],
    length: float,
    order: int,
    stored: bool,
    aside: Mapping[str, float],
) -> tuple[TaylorModel, ...]:
    """The outputs, for extreme lengths by way of one from 1 to 2: the direction is multiplied by a power of two.

    That is exact, but for entries that underflow; see :mod:`surefoot.taylor` for why these do not count.
    """
    length = float(length)
    if not 0 <= length < math.inf:
        raise DomainError(f"the length of a segment is a finite number ≥ 0, got {length}")
    graph, values = analysis.reading.graph, analysis.values
    names = {leaf.path: leaf.name for leaf in graph.parameters}
    exponent = 0 if 2.0**-_EXTREME <= length <= 2.0**_EXTREME else math.frexp(length)[1] - 1
    moves, off = {}, {}
    for path, move in direction.items():
        name = names.get(graph.aliases.get(path, path))
        if name is None:
            raise DomainError(f"the direction names '{path}', which is no parameter that varies")
        if move.shape != values[name].shape:
            raise DomainError(
                f"the direction of '{path}' has shape {tuple(move.shape)}, not {tuple(values[name].shape)}"
            )
        if not is_finite(move):
            raise DomainError(f"the direction of '{path}' is not finite")
        moves[name] = times_power(move.double(), exponent)
        off[name] = math.ldexp(aside.get(path, 0.0), exponent)
    prepared = analysis.reading.prepared
    leaves = leaf_models(prepared, values, moves, math.ldexp(length, -exponent), order, stored, off)
    outputs = expand(prepared, leaves, order, analysis.reading.norms)
    if not exponent:
        return outputs
    return tuple(_unscaled(model, length, exponent) for model in outputs)


def _unscaled(model: TaylorModel, length: float, exponent: int) -> TaylorModel:
    r"""The model of a function of :math:`2^{-k}\eta` as one of :math:`\eta`.

    Bounds that underflow become the smallest normal number. A coefficient that underflows loses at most
    :math:`2^{-1022}\sqrt n`: an error of the slope, or :math:`\bar\eta^{j-2}` times that one of second order.
    """
    coefficients = tuple(
        None if c is None else times_power(c, -j * exponent) for j, c in enumerate(model.coefficients)
    )
    if model.tail is None:
        return TaylorModel(coefficients, length, None, model.rowwise)
    degrees = zip((model.order, 0, 1, 2), model.tail.split(1, dim=1), strict=True)
    tail = torch.cat([times_power(bound, -degree * exponent) for degree, bound in degrees], dim=1)
    lost = _LOST * tail.new_tensor([0.0, 0.0, 1.0, sum(reach(length, j) for j in range(model.order - 2))])
    return TaylorModel(coefficients, length, tail.clamp(min=2.0**-1022) + lost, model.rowwise)
