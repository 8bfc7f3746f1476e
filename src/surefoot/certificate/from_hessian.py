"""Certificates of an objective on balls around its weights: norms, sharpened by the second derivative there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from surefoot.attained import LowerBound
from surefoot.bounds.function import Function
from surefoot.bounds.size import by_block
from surefoot.calculus.adjoint.whole import Whole
from surefoot.calculus.effort import AROUND_DIRECTIONS, ONE_BALL, Effort, in_gradients
from surefoot.certificate.from_sizes import bounds_from_sizes
from surefoot.certificate.record import Certificate
from surefoot.certificate.rows import Row
from surefoot.domains import Ball, Domain
from surefoot.errors import CaptureError, UnsupportedOperation
from surefoot.magnitude import Magnitude, minimum


class AroundWeights:
    """What is proved of an objective on balls around its weights.

    Attributes:
        function: the objective.
        whole: its second derivative in all weights together.
    """

    def __init__(self, function: Function, whole: Whole, effort: Effort) -> None:
        self.function, self.whole, self._effort = function, whole, effort
        self.cost = in_gradients(directions=whole.directions)

    @classmethod
    def of(cls, model: nn.Module, x: Any, objective: nn.Module | None, effort: Effort) -> AroundWeights | None:
        """``None`` if the second derivative is too costly or an operation has no rule."""
        if not effort.directions:
            return None
        try:
            function = Function.of(model, x, objective)
        except (CaptureError, UnsupportedOperation):
            return None
        whole = Whole.of(function, effort) if function.is_scalar and function.has_values else None
        return None if whole is None else cls(function, whole, effort)

    def on(self, domain: Domain) -> Certificate:
        """The certificate on a ball."""
        assert isinstance(domain, Ball)
        proved = bounds_from_sizes(self.function, domain, self._effort.name)
        moved = self.whole.moved(domain.radius)
        matrix = minimum(proved.curvature.matrix, self.whole.between_variables() + moved)
        curvature = replace(proved.curvature, matrix=matrix, moved=moved)
        smooth, matrix = curvature.bounded(self.whole.norm)
        self.cost += ONE_BALL + AROUND_DIRECTIONS * self.whole.balls
        self.whole.balls = 0
        attained, variables = self.whole.attained(), self.function.variables
        slopes = dict(zip(variables, self.whole.gradients(), strict=True))
        by_path = {path: [slopes[name] for name in names] for path, names in self.function.blocks.items()}
        certificate = replace(
            proved.certificate,
            curvature=LowerBound(attained) if attained else None,
            smoothness=smooth,
            block_smoothness=matrix if proved.members is None else by_block(matrix, proved.members),
            reasons=() if smooth.is_finite else proved.certificate.reasons,
            block_gradients={path: math.hypot(*parts) * (1 + 1e-15) for path, parts in by_path.items()},
            gradients=self.cost,
        )
        certificate, rows = near_weights(certificate, proved.value), proved.certificate.make_rows

        def sharper() -> list[Row]:
            """The last operation makes the value itself."""
            *others, last = rows()
            bound, lipschitz = certificate.bound, certificate.lipschitz
            return [*others, replace(last, bound=bound, lipschitz=lipschitz, smoothness=certificate.smoothness)]

        return replace(certificate, make_rows=sharper)


def near_weights(certificate: Certificate, value: Magnitude) -> Certificate:
    r"""The certificate on a ball around the weights, with what follows from the value and the gradient there:
    :math:`\ell \le \|\nabla F(u_0)\| + rL`, also of a block, and :math:`m \le |F(u_0)| + r\ell` (Fact
    refined_smooth).
    """
    radius, gradients = certificate.radius, certificate.block_gradients
    if not isinstance(radius, float) or gradients is None or not certificate.scalar:
        return certificate
    added = certificate.smoothness * radius
    lipschitz = minimum(certificate.lipschitz, added + math.hypot(*gradients.values()) * (1 + 1e-12))
    by_path = {
        path: minimum(slope, added + gradients[path] * (1 + 1e-12), lipschitz)
        for path, slope in certificate.block_lipschitz.items()
    }
    bound = minimum(certificate.bound, value + lipschitz * radius)
    return replace(certificate, lipschitz=lipschitz, block_lipschitz=by_path, bound=bound)
