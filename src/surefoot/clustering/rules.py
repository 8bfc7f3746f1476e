r"""Clustering objectives: :math:`h(\hat y) = s\min_z\frac12\|\hat y - z\|^2 + \Omega(z)`, s = 1/n for a mean.

See :mod:`surefoot.clustering.envelope`. Without a penalty h is :math:`\frac s2` times the squared
distance from a set that contains zero. A distance is 1-Lipschitz and at most the norm, so over the domain

.. math:: \|\nabla h\| = s\,\mathrm{dist}(\hat y) \le s\min(\sup\|\hat y\|,\ \|\hat y^* - z\| + \text{spread})

for *any* z of the set: that the solver may have missed the nearest one makes the bound looser, not wrong. At kinks
this is the Lipschitz constant of h, by continuity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.clustering.envelope import Nearest
from surefoot.clustering.fused import Fused
from surefoot.clustering.kmeans import Partition
from surefoot.clustering.spectral import Factors, Truncation
from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call
from surefoot.operations.common import ONE, ZERO
from surefoot.operations.record import register_rule

_UNIT = 2.0**-52
_PAIR = ("outputs", "outputs")
_KMEANS = (
    "k-means has a kink where two assignments are equally good: take steps on KMeans.majoriser(outputs), a square "
    "loss above it, or use ConvexClustering"
)
_SPECTRAL = (
    "the domain may contain outputs with σ_k = σ_{k+1}, where spectral clustering has a kink: shrink it, choose k "
    "at a larger gap, take steps on Spectral.majoriser(outputs), a square loss above it, or use ConvexClustering"
)


@register_rule("surefoot.kmeans")
def kmeans(call: Call) -> Bounds:
    r"""k-means: slope as above.

    The curvature is that of one assignment, s, for k = 1 (:math:`h = \frac s2\|(I - \frac1n11^\top)\hat y\|^2`),
    zero for k = n (h = 0), and otherwise infinite: which assignment is the best cannot be followed over a domain.
    """
    proximity: Partition = call["proximity"]
    count = call["outputs"].shape[0]
    if proximity.k >= count:
        return _bounds(call, ZERO, ZERO)
    curvature = _scale(call) if proximity.k == 1 else Magnitude.infinity()
    return _bounds(call, _distance(call, _centre(call)), curvature, _KMEANS)


@register_rule("surefoot.spectral")
def spectral(call: Call) -> Bounds:
    r"""Spectral clustering: slope as above; curvature :math:`s\max(1, \sigma_{k+1}/(\sigma_k - \sigma_{k+1}))`.

    (:mod:`surefoot.clustering.spectral`.) Over outputs within a distance r of the centre,
    :math:`\sum_i(\sigma_i - \sigma_i^*)^2 \le r^2` (Mirsky, Quart. J. Math. 11, 1960), so :math:`\sigma_{k+1} \le
    \sigma_{k+1}^* + r` and the gap shrinks by at most :math:`\sqrt2r`. If it stays positive, h is twice
    continuously differentiable on the ball, and the largest ratio bounds its second derivative there. The
    round-off of the singular values is added to r. Where k is at least the smaller side, h = 0.
    """
    proximity: Truncation = call["proximity"]
    outputs, nearest = call["outputs"], _centre(call)
    if proximity.k >= min(outputs.shape):
        return _bounds(call, ZERO, ZERO)
    curvature = Magnitude.infinity()
    if nearest is not None and outputs.spread.is_finite:
        parts: Factors = nearest.result
        reach = float(outputs.spread + parts.error)
        gap = (parts.gap - 1.5 * reach) * (1 - 4 * _UNIT)  # 1.5 > √2 covers the rounding of the difference
        if gap > 2 * _UNIT * float(parts.values[0]):
            ratio = (Magnitude.of(parts.next) + reach) / gap
            curvature = _scale(call) * (ratio if ratio > ONE else ONE)
    return _bounds(call, _distance(call, nearest), curvature, _SPECTRAL)


@register_rule("surefoot.convex_clustering")
def convex_clustering(call: Call) -> Bounds:
    r"""Convex clustering: curvature s; slope :math:`s\|\hat y - z\|`, at most s times the constant of the weights.

    (:mod:`surefoot.clustering.fused`.) :math:`\hat y - z` is 1-Lipschitz and zero at zero, so it is at
    most :math:`\sup\|\hat y\|`, and at most its norm at the centre plus the spread. The solver is off by e there:
    that is added to the slope. Where it is more than the round-off that the calculus adds to a gradient,
    :math:`16(\sqrt r + 16)u\,s\|\hat y\|` for a reduction of r, the curvature becomes
    :math:`s(1 + e/\text{spread})`, so that curvature times spread covers the gradients over the domain, seen from
    the one that was computed. The value is at most :math:`\frac s2\|\hat y\|^2`, by z = 0, and at most the
    constant of the weights times the norm.
    """
    proximity: Fused = call["proximity"]
    outputs, scale, nearest = call["outputs"], _scale(call), _centre(call)
    steepest = proximity.steepest(outputs.shape[0])
    slope = minimum(outputs.bound, steepest)
    value = minimum(outputs.bound**2 / 2, steepest * outputs.bound)
    reduction = max(outputs.numel, 4096)
    curvature, error = scale, ZERO
    if nearest is not None and nearest.gap is not None and nearest.error is not None:
        here = norm(outputs.value - nearest.point) * (1 + 4 * _UNIT) + nearest.error
        slope = minimum(slope, here + outputs.spread)
        error = scale * nearest.gap
        covered = 8 * (reduction**0.5 + 16) * _UNIT * float(torch.linalg.vector_norm(outputs.value)) * (1 - 1e-6)
        if nearest.error > covered:
            reach = float(outputs.spread)
            extra = Magnitude.of(nearest.error) / reach * (1 + 8 * _UNIT) if reach else Magnitude.infinity()
            curvature = scale * (ONE + extra)
    return Bounds(
        jacobian={"outputs": slope * scale},
        curvature={_PAIR: curvature},
        bound=value * scale,
        reduction=reduction,
        error=error,
        reason="convex clustering is not solved exactly enough for a domain this small: lower its tolerance",
    )


def _bounds(call: Call, distance: Magnitude, curvature: Magnitude, reason: str = "") -> Bounds:
    """A squared distance, halved and scaled."""
    scale = _scale(call)
    return Bounds(
        jacobian={"outputs": distance * scale},
        curvature={_PAIR: curvature},
        bound=distance**2 * scale / 2,
        reduction=call["outputs"].numel,
        reason=reason,
    )


def _scale(call: Call) -> Magnitude:
    """s."""
    return ONE / call["outputs"].shape[0] if call["reduction"] == "mean" else ONE


def _centre(call: Call) -> Nearest | None:
    """The solution at the centre, where that is known."""
    value = call["outputs"].value
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return None
    found: Nearest = call["proximity"].solved(value)
    return found


def _distance(call: Call, nearest: Nearest | None) -> Magnitude:
    """The largest distance from the set over the domain."""
    outputs = call["outputs"]
    if nearest is None:
        return outputs.bound
    # z is off the set by the round-off of a mean or of a product with singular vectors
    off = outputs.centre_norm * (16.0 * (sum(outputs.shape) + 16) * _UNIT)
    return minimum(outputs.bound, norm(outputs.value - nearest.point) + off + outputs.spread)
