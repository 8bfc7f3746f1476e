"""Steps that are proved to descend before anything is evaluated: from derivatives along segments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.calculus.segment.along import Along, Majorant
from surefoot.guarantees import GuaranteeError
from surefoot.operations.call import Norms
from surefoot.optim.problem import Point, Problem

_ORDER = 3  # Taylor coefficients
_LONGEST = 2.0**1000  # no segment is longer
_START = 1e-3  # first length, relative to the weights over the direction, where nothing better is known
_GROWTH, _ROOM = 2.0, 1.25  # how much longer the next segment is than a step to the end of this one, and a shorter


class OnSegments:
    r"""The proof of a step from a bound on the second derivative along it.

    With :math:`F(u + \eta d) \le F + \eta F' + \frac S2\eta^2` on a segment (:mod:`surefoot.calculus.segment`) the
    step is the minimiser of the right-hand side. The segment is somewhat longer than the last step, so that one
    bound is mostly enough to find it. The weights are then rounded to their type, :math:`u' = u + v`, and what is
    proved is the decrease along v itself, from 0 to 1: v is computed with a relative error of :math:`2^{-53}` of
    each entry, and the bound counts :math:`2^{-53}(8\|u\| + 2\|v\|)` for weights that are stored, which is more.

    Attributes:
        reach: the length of the next segment.
        decrease: what was proved of the last step.
        curvature: S along it.
    """

    def __init__(self) -> None:
        self.decrease, self.curvature = 0.0, math.inf
        self._problem: Problem | None = None
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.reach: float | None = None

    def step(self, point: Point, direction: Tensor) -> tuple[float, Point] | None:
        """Step size and new point; ``None`` if round-off leaves no decrease.

        Raises:
            GuaranteeError: if no step along the direction can be proved.
        """
        problem = point.problem
        if self._problem is not problem:
            self._problem = problem
            self._along = Along(problem.model, problem.x, problem.loss.bound_to(problem.y), Norms(), stored=True)
        size = float(torch.linalg.vector_norm(direction))
        bound = self._bound(point, problem.unpack(direction), size)
        if not bound.step > 0:
            return None  # the slope is round-off
        if abs(bound.value - point.value) > 1e-6 * (1 + abs(point.value)):
            raise GuaranteeError(
                f"the model computes the loss {point.value:g}, what can be proved is about a function of value "
                f"{bound.value:g}: a part of it reads what is not among its parameters, buffers and attributes"
            )
        self.reach = min(bound.step * size * (_GROWTH if bound.step >= 0.99 * bound.length else _ROOM), _LONGEST)
        after = problem.near(point, direction, bound.step)
        move = after.vector - point.vector
        if not bool(move.any()):
            return None
        along = self._along.majorant(problem.unpack(move), 1.0, _ORDER)
        self.decrease = along.decrease(1.0) if math.isfinite(along.curvature) else 0.0
        self.curvature = along.curvature
        return (bound.step, after) if self.decrease > 0 else None

    def _bound(self, point: Point, direction: dict[str, Tensor], size: float) -> Majorant:
        """A bound along the direction that is not much longer than the step it allows."""
        along = self._along
        length = None if self.reach is None else self.reach / size
        if length is None or not 0 < length < math.inf:
            # where the second-order Taylor polynomial is lowest, or a small part of the weights
            length = min(_START * (float(point.vector.norm()) or 1.0) / size, _LONGEST)
            bound = along.majorant(direction, length, _ORDER)
            if bound.curvature_at_start > 0 and bound.slope < 0:
                length = min(-bound.slope / bound.curvature_at_start, _LONGEST)
        bound = along.longest(direction, along.majorant(direction, length, _ORDER), _ORDER)
        if math.isfinite(bound.curvature):
            return bound
        raise GuaranteeError(
            "no step along this direction can be proved to descend: a kink is too near, or the curvature is not "
            "bounded. Use smooth activations (surefoot.smooth(model)), or compute in double precision"
        )
