r"""Losses: means over n samples of convex functions of the outputs.

With rows :math:`\hat y_i` and :math:`h(\hat y) = \frac1n\sum_i h_i(\hat y_i)` the gradient is the stack of
the :math:`\frac1n\nabla h_i` and the Hessian is block-diagonal with blocks :math:`\frac1n\nabla^2h_i`, so the
curvature is the largest of :math:`\frac1n\|\nabla^2h_i\|`. Gradients over the domain: the one at the centre, plus
curvature times spread.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.enclosure import Enclosure, norm
from surefoot.magnitude import Magnitude, minimum
from surefoot.rules.common import ZERO, root
from surefoot.rules.registry import Bounds, Call, register_rule
from surefoot.rules.softmax import STEEPEST

_UNIT = 2.0**-52


@register_rule("surefoot.square")
def square(call: Call) -> Bounds:
    r""":math:`\frac1{2n}\sum_i\|\hat y_i - y_i\|^2`: gradient :math:`\frac1n(\hat y - y)`, curvature 1/n."""
    outputs, targets = call["outputs"], call["targets"]
    count = outputs.shape[0]
    distance = outputs.bound + targets.bound
    if isinstance(outputs.value, Tensor) and isinstance(targets.value, Tensor):
        gap = outputs.value - targets.value
        distance = minimum(distance, norm(gap) * (1 + 4 * _UNIT) + outputs.spread)
    return Bounds(
        jacobian={"outputs": distance / count},
        curvature={("outputs", "outputs"): Magnitude.of(1.0) / count},
        bound=distance**2 / (2 * count),
        reduction=outputs.numel,
        rows_along=lambda costate: {("outputs", "outputs"): Magnitude.of(np.ones(count)) * costate.bound / count},
        change_along=lambda costate: {("outputs", "outputs"): costate.row_spread(count) / count},
        row_slots=("outputs",),
    )


@register_rule("surefoot.cross_entropy")
def cross_entropy(call: Call) -> Bounds:
    r""":math:`\frac1n\sum_i(\log\sum_k e^{\hat y_{ik}} - \langle y_i, \hat y_i\rangle)`, y a distribution.

    With p the soft-max, the gradient of a row is :math:`p - y`, of norm at most :math:`\sqrt2` (two
    distributions), and its Hessian :math:`\mathrm{diag}(p) - pp^\top` has norm at most

    * 1/2: Böhning, Multinomial logistic regression algorithm, Ann. Inst. Statist. Math. 44 (1992); reached at
      two classes of probability 1/2;
    * :math:`\max_k p_k`, as :math:`pp^\top \succeq 0`;
    * :math:`2\max_k p_k(1 - p_k)`, by the circles of Gershgorin.

    A row that moves by r changes differences of its entries by at most :math:`\sqrt2 r`, so each probability by a
    factor between :math:`e^{-\sqrt2 r}` and :math:`e^{\sqrt2 r}` (:mod:`surefoot.rules.softmax`);
    :math:`t(1-t)` is largest at the point nearest to 1/2.
    """
    outputs = call["outputs"]
    count, classes = outputs.shape
    curvature = Magnitude.of(0.5) / count
    curvatures = Magnitude.of(np.full(count, 0.5)) / count
    slope = (Magnitude.of(2.0) / count).sqrt()
    bound = Magnitude.of(math.log(classes) * (1 + _UNIT)) + slope * outputs.bound  # at zero it is log k
    if isinstance(outputs.value, Tensor):
        curvatures = minimum(curvatures, _curvature(outputs) / count)
        curvature = curvatures.max()
        slope = minimum(slope, _gradient(outputs, call["targets"]) + curvature * outputs.spread)
    return Bounds(
        jacobian={"outputs": slope},
        curvature={("outputs", "outputs"): curvature},
        bound=bound,
        reduction=outputs.numel,
        rows_along=lambda costate: {("outputs", "outputs"): curvatures * costate.bound},
        change_along=lambda costate: {
            ("outputs", "outputs"): costate.row_spread(count) * curvature + _change(outputs) * costate.bound
        },
        row_slots=("outputs",),
    )


def _curvature(outputs: Enclosure) -> Magnitude:
    """The curvature of every row over the domain."""
    probability = torch.softmax(outputs.value, dim=1)
    reach = math.sqrt(2.0) * outputs.row_spread(outputs.shape[0]).tensor(outputs.value)[:, None]
    slack = 1 + (outputs.shape[1] + 64) * _UNIT  # of the soft-max, its argument and the exponential
    high = (probability * torch.exp(reach) * slack).clamp(max=1.0)
    low = probability * torch.exp(-reach) / slack
    nearest = torch.minimum(torch.maximum(low, torch.tensor(0.5, dtype=low.dtype, device=low.device)), high)
    best = torch.minimum(high.amax(dim=1), 2 * (nearest * (1 - nearest)).amax(dim=1))
    return Magnitude.of(best * (1 + 8 * _UNIT))


def _change(outputs: Enclosure) -> Magnitude:
    """How far the second derivative in a row may be from that at the centre: it is the Jacobian of the soft-max,
    of curvature 0.2722 (:mod:`surefoot.rules.softmax`).
    """
    return STEEPEST * outputs.row_spread(outputs.shape[0]) / outputs.shape[0]


def _gradient(outputs: Enclosure, targets: Enclosure) -> Magnitude:
    """The norm of the gradient at the centre."""
    difference = gradient(outputs.value, targets.value)
    # every entry of the soft-max is off by a relative (k + 64) u, so a row by that much, as its norm is at most 1
    slack = (outputs.shape[1] + 64) * _UNIT
    return norm(difference) + root(outputs.shape[0]) * (slack / outputs.shape[0]) if outputs.numel else ZERO


def gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the cross-entropy, stacked."""
    difference = torch.softmax(outputs, dim=1)
    if targets.is_floating_point():
        difference = difference - targets
    else:
        difference[torch.arange(len(difference), device=difference.device), targets.long()] -= 1.0
    return difference / len(difference)
