r"""Soft-max and its logarithm.

Let :math:`p` be the soft-max of :math:`x`, and :math:`v` a direction, seen as a random variable under :math:`p`.

* **Jacobian of soft-max at most 1/2.** :math:`\mathrm{diag}(p) - pp^\top` has absolute row sums :math:`2p_i(1 -
  p_i) \le 1/2` (Gershgorin); reached at two classes with equal probability.
* **Curvature at most** :math:`\sqrt2/(3\sqrt3) \approx 0.2722`. Soft-max is the gradient of log-sum-exp, so its
  second derivative is a symmetric tensor whose norm is reached on the diagonal: the third central moment
  :math:`E(v - Ev)^3` with :math:`\|v\|_2 = 1`. The entries of :math:`v` lie in an interval of length
  :math:`\max_{i,j}|v_i - v_j| \le \sqrt2`. A variable on an interval of length :math:`\delta` has
  :math:`|E(v-Ev)^3| \le \delta^3/(6\sqrt3)`: for a given mean the supremum is the concave envelope of a
  function that is concave and then convex, reached by two points at distance :math:`\delta' \le \delta`, with
  value :math:`\delta'^3 q(1-q)(1-2q) \le \delta'^3/(6\sqrt3)`. Reached for two classes.
* **Log-soft-max.** :math:`I - \mathbf 1p^\top` is an oblique projection, of norm :math:`\|\mathbf 1\|\|p\| \le
  \sqrt k`; its second derivative is :math:`-\mathbf 1\otimes\nabla^2\mathrm{lse}`, of norm at most :math:`\sqrt
  k/2`.

Fibres (the classes of one position of one sample) are separate, so the norms are the largest over them.
"""

from __future__ import annotations

import math

from surefoot.magnitude import Magnitude
from surefoot.rules.common import ONE, normalized_dim, root
from surefoot.rules.registry import Bounds, Call, register_rule

_CURVATURE = Magnitude.of(math.sqrt(2) / (3 * math.sqrt(3))) * (1 + 1e-15)


@register_rule("aten.softmax", "aten._softmax", "surefoot.masked_softmax")
def softmax(call: Call) -> Bounds:
    """Slope 1/2, curvature √2/(3√3); each fibre has norm at most 1. Masked entries are left out of the fibre."""
    dim = call["dim"] if call["dim"] is not None else -1
    classes = _classes(call, dim)
    fibres = call.numel // max(1, classes)
    slot = next(iter(call.slots))
    return Bounds(
        jacobian={slot: Magnitude.of(0.5) if classes > 1 else Magnitude.zero()},
        curvature={(slot, slot): _CURVATURE if classes > 1 else Magnitude.zero()},
        bound=root(fibres),
        peak=ONE,
        rowwise=normalized_dim(dim, len(call.shape)) != 0,
        reduction=classes,
    )


@register_rule("aten.log_softmax", "aten._log_softmax")
def log_softmax(call: Call) -> Bounds:
    """Slope √k, curvature √k/2; at zero every entry is -log k."""
    dim = call["dim"]
    classes = _classes(call, dim)
    return Bounds(
        jacobian={"self": root(classes)},
        curvature={("self", "self"): root(classes) * 0.5},
        offset=Magnitude.of(math.log(max(classes, 1))) * root(call.numel),
        rowwise=normalized_dim(dim, len(call.shape)) != 0,
        reduction=classes,
    )


def _classes(call: Call, dim: int) -> int:
    return call.shape[dim] if call.shape else 1
