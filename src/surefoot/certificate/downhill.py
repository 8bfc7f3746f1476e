r"""A step against the gradient that is proved on the segment which it goes, not on a ball around it.

Let :math:`d` be minus the gradient g at the weights u as it is computed, and S a bound of the curvature on the
segment along it (:mod:`surefoot.calculus.segment.majorant`),

.. math:: F(u + \gamma d) \le F(u) + \gamma\langle g, d\rangle + \tfrac S2\gamma^2 \qquad (0 \le \gamma \le
    \bar\gamma),

and L and ℓ the constants on the ball of radius :math:`\bar\gamma(1 + \delta)\|d\|`. For every :math:`d'` with
:math:`\|d' - d\| \le \delta\|d\|`, minus the exact gradient or what another program computes for it, and
:math:`\gamma \ge \gamma_0`, a step up to which descent is proved otherwise,

.. math:: F(u + \gamma d') \le F(u) + \gamma\langle g, d'\rangle + \tfrac{\bar L}2\gamma^2\|d'\|^2, \qquad
    \bar L = \frac{S/\|d\|^2 + 2\delta\min((1 + \delta)L,\ 2\ell/(\gamma_0\|d\|))}{(1 - \delta)^2} .

*Proof.* The derivative of :math:`v \mapsto F(u + v) - \langle g, v\rangle` is at most :math:`\min(L\|v\|, 2\ell)`,
so its values at :math:`\gamma d'` and :math:`\gamma d` differ by at most that, with :math:`\|v\| \le \gamma(1 +
\delta)\|d\|`, times :math:`\gamma\delta\|d\|`, and :math:`\|d'\| \ge (1 - \delta)\|d\|`. So with :math:`d' = -g`
all steps :math:`\gamma \le \min(\bar\gamma, 1/\bar L)` make F smaller by :math:`\frac\gamma2\|g\|^2` at least, as
steps 1/L do.

In the direction of the gradient F often bends less than in others, and Taylor coefficients along one direction are
exact where balls have bounds of third derivatives in all: such steps are several times as long as those of balls.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.segment.along import Along
from surefoot.certificate.record import Certificate
from surefoot.domains import Ball
from surefoot.enclosure import norm
from surefoot.guarantees import step_from
from surefoot.magnitude import Magnitude, minimum

_DOUBLE, _SINGLE = 2.0**-40, 2.0**-20  # δ at least: others compute the gradient of double precision, or of less
_ORDER, _REFINEMENTS = 5, 6
_FURTHER, _TRIALS = 4.0, 8


def gradient_step(analysis: Analysis, on: Callable[[Ball], Certificate], start: float) -> tuple[float | None, int]:
    """The longest such step that was found, ``None`` if none is proved; and how often the segment was expanded.

    Args:
        analysis: of an objective, with values.
        on: the certificate on a ball around the weights.
        start: up to which step descent is known.

    Raises:
        UnsupportedOperation: if an operation has no rule along segments.
    """
    proved = proved_gradient(analysis)
    leaves = [leaf for leaf in analysis.reading.graph.parameters if leaf.path in proved.slopes]
    down = {leaf.path: -proved.slopes[leaf.path] for leaf in leaves}
    double = all(analysis.values[leaf.name].dtype is torch.float64 for leaf in leaves)
    far = float(norm(tuple(down.values())))
    if not 0 < far < math.inf or not 0 < start < math.inf:
        return None, 0
    off = max(_DOUBLE if double else _SINGLE, 2 * math.hypot(*(proved.errors[path] for path in down)) / far)
    if off > _SINGLE:
        return None, 0
    along = Along(analysis.model, analysis.x, analysis.objective, previous=analysis)
    bound = along.majorant(down, start, _ORDER)
    for _ in range(_TRIALS):
        if bound.step < bound.length:
            break
        bound = along.majorant(down, bound.length * _FURTHER, _ORDER)
    bound = along.longest(down, bound, _ORDER, _REFINEMENTS)
    for _ in range(_TRIALS):
        if not bound.step > 0:
            break
        length = bound.length * (1 - 2 * off)
        size = far * (1 - 2.0**-30)
        around = on(Ball(bound.length * far))
        aside = minimum(around.smoothness * (1 + off), around.lipschitz * 2.0 / (start * size)) * (2 * off)
        bend = Magnitude.of(max(bound.curvature, 0.0)) / size**2 + aside
        bend = bend * ((1 + 2.0**-30) / (1 - off) ** 2)
        step = min(length, step_from(bend))
        if step > 0.5 * bound.step:
            return step, along.expansions
        bound = along.majorant(down, 0.5 * bound.step, _ORDER)
    return None, along.expansions
