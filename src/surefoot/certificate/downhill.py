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

import torch

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.segment.along import Along
from surefoot.enclosure import norm

_DOUBLE, _SINGLE = 2.0**-40, 2.0**-20  # relative errors of other programs' gradients, in double and in single
_ORDER, _REFINEMENTS = 5, 6
_FURTHER, _TRIALS = 4.0, 8
_HAIR = 2.0**-30  # more than norms are rounded by


def gradient_step(analysis: Analysis, start: float) -> tuple[float | None, int]:
    """The longest such step that the search proves, or ``None``; and how often the segment was expanded.

    Args:
        analysis: an objective with values.
        start: a step to begin with.

    Raises:
        UnsupportedOperation: if an operation has no rule along segments.
    """
    proved = proved_gradient(analysis)
    leaves = [leaf for leaf in analysis.reading.graph.parameters if leaf.path in proved.slopes]
    down = {leaf.path: -proved.slopes[leaf.path] for leaf in leaves}
    error, size = math.hypot(*(proved.errors[path] for path in down)), float(norm(tuple(down.values())))
    shortest = size * (1 - _HAIR) - error * (1 + _HAIR)  # at most the norm of the exact gradient
    if not (0 < shortest < math.inf and 0 < start < math.inf):
        return None, 0
    unit = {
        leaf.path: _DOUBLE if analysis.values[leaf.name].dtype is torch.float64 else _SINGLE for leaf in leaves
    }
    aside = {path: unit[path] * float(norm(move)) + 2 * proved.errors[path] for path, move in down.items()}
    along = Along(analysis.model, analysis.x, analysis.objective, aside=aside, previous=analysis)
    bound = along.majorant(down, start, _ORDER)
    for _ in range(_TRIALS):
        if bound.step < bound.length:
            break
        bound = along.majorant(down, bound.length * _FURTHER, _ORDER)
    bound = along.longest(down, bound, _ORDER, _REFINEMENTS)
    if not bound.step > 0:
        return None, along.expansions
    most = shortest**2 / bound.curvature * (1 - _HAIR) if bound.curvature > 0 else math.inf
    return min(bound.length, most), along.expansions
