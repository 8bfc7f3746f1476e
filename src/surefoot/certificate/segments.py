r"""Certificates along a segment: the constants that a step needs, seen from its start.

For a real-valued function

.. math:: |F(\eta) - F_0| \le \ell\eta, \qquad F(\eta) \le F_0 + F_1\eta + \tfrac L2\eta^2
    \qquad (0 \le \eta \le \bar\eta),

for several outputs :math:`\|z(\eta) - z_0\| \le \ell\eta` and :math:`\|z(\eta) - z_0 - \eta z_1\| \le \frac
L2\eta^2`. The value and the slope here are the exact ones: models along a segment bound the errors of the computed
ones and of everything they are computed from (:mod:`surefoot.taylor`).
"""

from __future__ import annotations

import math

from surefoot.calculus.segment.along import Along, majorant
from surefoot.certificate.record import Certificate
from surefoot.domains import Ball, Segment
from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude
from surefoot.operations.evaluation import remarks
from surefoot.taylor import TaylorModel, reach

_REFINEMENTS = 10  # of the length of a step
_REASON = (
    "along the segment a kink or an unbounded curvature is within reach: use smooth activations "
    "(surefoot.smooth), or a shorter segment"
)


def on_segment(along: Along, domain: Segment) -> Certificate:
    """The certificate along a segment; without a direction, against the gradient."""
    direction = along.steepest_descent() if domain.direction is None else domain.direction
    outputs = along.expand(direction, domain.length, domain.order)
    scalar = len(outputs) == 1 and outputs[0].value.numel() == 1
    step = None
    if scalar:
        upper = along.longest(direction, majorant(outputs[0]), domain.order, _REFINEMENTS)
        step = upper.step if upper.decrease(upper.step) > 0 else 0.0  # round-off may hide the descent
    bound, lipschitz, smoothness = _of_number(outputs[0]) if scalar else _of_vector(outputs)
    around = Ball(float(norm(tuple(direction.values())) * domain.length))
    return Certificate(
        bound=_magnitude(bound),
        lipschitz=_magnitude(lipschitz),
        smoothness=_magnitude(smoothness),
        block_lipschitz={},
        block_smoothness=Magnitude.zero((0, 0)),
        reasons=() if math.isfinite(smoothness) else (_REASON,),
        remarks=remarks(along.analysis.reading.graph.nodes, lambda: along.analysis.over(around).enclosures),
        domain=str(domain),
        wrt="params",
        scalar=scalar,
        segment_step=step,
    )


def _of_number(model: TaylorModel) -> tuple[float, float, float]:
    """Bound, Lipschitz constant and curvature of a real-valued function, seen from the start of the segment."""
    upper = majorant(model)
    numbers = [0.0 if c is None else float(c) for c in model.coefficients]
    rest, (first, second, third) = float(model.rest), model.errors[0].tolist()
    slope = sum(abs(c) * reach(model.length, j - 1) for j, c in enumerate(numbers) if j)
    slope = slope + rest * reach(model.length, model.order - 1) + second + third * model.length
    slope = slope * (1 + 2.0**-40) + 2.0**-1000
    bound = abs(numbers[0]) + slope * model.length + first
    return bound, slope, max(upper.curvature, 0.0)


def _of_vector(models: tuple[TaylorModel, ...]) -> tuple[float, float, float]:
    """The same for several outputs, stacked."""
    whole = [model.merged() for model in models]
    bounds = ([float(size) for size in (model.sizes, model.speed, model.turn)] for model in whole)
    bound, slope, turn = (math.hypot(*sizes) for sizes in zip(*bounds, strict=True))
    return bound, slope, 2 * turn


def _magnitude(value: float) -> Magnitude:
    return Magnitude.of(value * (1 + 2.0**-26) + 2.0**-1000) if math.isfinite(value) else Magnitude.infinity()
