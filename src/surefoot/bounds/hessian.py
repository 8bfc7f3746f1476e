r"""Bounds of the second derivative of a function on balls around its weights, shell by shell.

:math:`L(r) = \|\nabla^2F(u_0)\| + m(r)` with m the smaller of how far the derivative of the gradient moves as a
tensor (:mod:`surefoot.bounds.movement`) and the integral of the third derivative (:mod:`surefoot.bounds.speed`),
summed up over the shells from the centre to r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy

from torch import Tensor

from surefoot.bounds.centre import Centre
from surefoot.bounds.jacobians import Jacobians
from surefoot.bounds.movement import MARGIN, Ball
from surefoot.bounds.speed import Speed
from surefoot.norms.verified import symmetric_norm
from surefoot.program import Program


class Hessian:
    """A second derivative around the present weights.

    Args:
        program: with the value and the gradient in all weights as outputs; see
            :func:`surefoot.program.differentiate`.
        values: of all inputs, by name.
        variables: the names of the inputs that the outputs are derivatives in, by default all parameters.

    Attributes:
        matrix: the second derivative at the weights as computed, in the order of the variables.
        norm: a bound of the norm at the weights.
        offset: of how far the exact one may be from the one that was computed.
        radius: the largest one that was looked at.
        moved: how far the second derivative moves on the ball of that radius.

    Raises:
        NotImplementedError: for a primitive without rules.
        Unbounded: if there is no second derivative at the weights.
    """

    def __init__(
        self, program: Program, values: Mapping[str, Tensor], variables: Sequence[str] | None = None
    ) -> None:
        self.centre = Centre(program, values, program.parameters if variables is None else variables)
        self.matrix = Jacobians(self.centre).hessian
        self._ball = Ball(self.centre, 0.0)
        self.offset = self._changed(self._ball)
        self.norm = (symmetric_norm(self.matrix.clone()) + self.offset) * (1 + 2.0**-50)
        self.radius = self._integral = self.moved = 0.0

    def _changed(self, ball: Ball) -> float:
        """How far the gradient's derivative moves as a tensor."""
        moved = [ball.of(k).D for k in self.centre.program.outputs[1:]]
        return math.hypot(*moved) * MARGIN

    def grow(self, radius: float) -> float:
        """The bound on the ball of a radius, larger than any before."""
        if radius <= self.radius:
            raise ValueError(f"balls grow: {radius} after {self.radius}")
        self._ball = Ball(self.centre, radius, self._ball)
        self._integral += (radius - self.radius) * Speed(self._ball).bound * MARGIN
        self.radius = radius
        self.moved = min(self._changed(self._ball), self._integral)
        return self.smoothness

    @property
    def smoothness(self) -> float:
        """A bound of the norm of the second derivative on the ball of the present radius."""
        return (self.norm + self.moved) * (1 + 2.0**-50)

    def again(self) -> Hessian:
        """The same centre, with the radius zero."""
        other = copy(self)
        other._ball = Ball(self.centre, 0.0)
        other.radius = other._integral = other.moved = 0.0
        return other
