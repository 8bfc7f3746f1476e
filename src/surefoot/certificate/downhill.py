r"""A step against the gradient that is proved on its own segment, not on a ball around the weights.

Let g be the gradient at the weights u, and let d be :math:`-g` as computed. For all directions :math:`d'` close to
d, among them :math:`-g`, the Taylor models of :mod:`surefoot.calculus.segment` have the same coefficients, which
include errors of the slopes of weights, and so the same bound S on the curvature
(:mod:`surefoot.calculus.segment.along`):

.. math:: F(u + \gamma d') \le F(u) + \gamma\langle g, d'\rangle + \tfrac S2\gamma^2 \qquad (0 \le \gamma \le
    \bar\gamma).

With :math:`d' = -g`, all steps :math:`\gamma \le \min(\bar\gamma, \|g\|^2/S)` lower F by at least
:math:`\frac\gamma2\|g\|^2`, as steps 1/L do. With the direction :math:`d'` that another program computes in the
precision of the weights, they lower it by :math:`\gamma(-\langle g, d'\rangle - \frac12\|g\|^2)`.

Along the gradient F often bends less than in other directions, and Taylor coefficients along one direction are
exact, whereas balls need bounds on third derivatives in all directions. So these steps are several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.segment.along import Along, Majorant, longest
from surefoot.enclosure import norm

_DOUBLE, _SINGLE = 2.0**-40, 2.0**-20  # relative errors of other programs' gradients, in double and in single
_ORDER, _REFINEMENTS = 5, 6
_FURTHER, _TRIALS = 4.0, 8
_HAIR = 2.0**-30  # more than norms are rounded by


class Gradient(Protocol):
    """A gradient with what it may be off by."""

    @property
    def slopes(self) -> Mapping[str, Tensor]:
        """By path of the parameter."""

    @property
    def errors(self) -> Mapping[str, float]:
        """In norm, by path."""


@dataclass(frozen=True)
class Downhill:
    """Minus the gradient at the weights, as computed."""

    direction: dict[str, Tensor]  # by path of the parameter
    aside: dict[str, float]  # how far directions may be from it that what is said shall hold for, in norm, by path
    shortest: float  # at most the norm of the exact gradient

    @classmethod
    def of(cls, proved: Gradient, parameters: Mapping[str, Tensor]) -> Downhill:
        """From a gradient with its errors, for parameters of these types."""
        down = {path: -proved.slopes[path] for path in parameters}
        error, size = math.hypot(*(proved.errors[path] for path in down)), float(norm(tuple(down.values())))
        unit = {p: _DOUBLE if value.dtype is torch.float64 else _SINGLE for p, value in parameters.items()}
        aside = {path: unit[path] * float(norm(move)) + 2 * proved.errors[path] for path, move in down.items()}
        return cls(down, aside, size * (1 - _HAIR) - error * (1 + _HAIR))

    def bound(self, analysis: Analysis, length: float) -> Majorant:
        """The quadratic upper bound of an objective along the segment up to a length.

        Raises:
            UnsupportedOperation: if an operation has no rule along segments.
        """
        along = Along(analysis.model, analysis.x, analysis.objective, aside=self.aside, previous=analysis)
        return along.majorant(self.direction, length, _ORDER)

    def longest(self, on: Callable[[float], Majorant], start: float) -> float | None:
        """The longest step that was found with such bounds, by length; ``None`` if none is proved."""
        if not (0 < self.shortest < math.inf and 0 < start < math.inf):
            return None
        bound = on(start)
        for _ in range(_TRIALS):
            if bound.step < bound.length:
                break
            bound = on(bound.length * _FURTHER)
        bound = longest(on, bound, _REFINEMENTS)
        if not bound.step > 0:
            return None
        most = self.shortest**2 / bound.curvature * (1 - _HAIR) if bound.curvature > 0 else math.inf
        return min(bound.length, most)


def gradient_step(analysis: Analysis, start: float) -> tuple[float | None, int]:
    """The longest such step that the search proves, or ``None``; and how often the segment was expanded.

    Args:
        analysis: an objective with values.
        start: a step to begin with.

    Raises:
        UnsupportedOperation: if an operation has no rule along segments.
    """
    proved, expansions = proved_gradient(analysis), 0
    leaves = [leaf for leaf in analysis.reading.graph.parameters if leaf.path in proved.slopes]
    down = Downhill.of(proved, {leaf.path: analysis.values[leaf.name] for leaf in leaves})

    def on(length: float) -> Majorant:
        nonlocal expansions
        expansions += 1
        return down.bound(analysis, length)

    return down.longest(on, start), expansions
