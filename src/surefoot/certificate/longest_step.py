r"""The ball around the weights on which the longest gradient step can be proved.

With L(r) a bound of the smoothness on the ball of radius r and :math:`g = \|\nabla F\|` at its centre, the step
:math:`\gamma(r) = \min(1/L(r),\ r/g)` is proved to descend (:func:`surefoot.guarantees.longest_step`). The first
is non-increasing in r and the second grows, so the longest step is where they meet: :math:`r = g/L(r)`. It lies
between :math:`g/L(r_0)` and :math:`r_0 = g/L(0)`, as :math:`L(0) \le L(r)`, and is searched there. Any radius
makes a valid certificate; the search only chooses one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from surefoot.certificate.record import Certificate
from surefoot.domains import Ball

_EVALUATIONS = 6  # certificates after the one at the weights
_CLOSE = 1.1  # the ratio of two radii that are as good as equal
_SHORTER = 1 / 16  # where the curvature is infinite within reach, as beyond a kink


def longest_proved(certify: Callable[[Ball], Certificate]) -> Certificate:
    """The certificate, among those of some balls around the weights, whose step is the longest.

    Where the curvature is infinite on every ball that was tried, it is that of the last one, which says why.
    """
    at_weights = certify(Ball(0.0))
    gradient = math.hypot(*(at_weights.block_gradients or {}).values())
    slowest = at_weights.inverse_smoothness
    if slowest == math.inf:  # flat or affine: any radius will do
        return certify(Ball(1.0))
    if not 0 < gradient < math.inf or not slowest > 0:
        return at_weights
    high = gradient * slowest
    best, radius, low = None, high, 0.0
    for _ in range(_EVALUATIONS):
        certificate = certify(Ball(radius))
        if best is None or certificate.step_size > best.step_size:
            best = certificate
        meets = gradient * certificate.inverse_smoothness  # the radius up to which 1/L(radius) would reach
        if meets == 0:
            high, radius = radius, radius * _SHORTER
            continue
        low, high = (max(low, radius), high) if meets >= radius else (max(low, meets), radius)
        if high <= low * _CLOSE:
            break
        radius = math.sqrt(low * high)
    assert best is not None
    return best
