r"""Losses: sums over n samples of convex functions of the outputs.

With rows :math:`\hat y_i` and :math:`h(\hat y) = \sum_i h_i(\hat y_i)` the gradient is the stack of the
:math:`\nabla h_i` and the Hessian is block-diagonal with blocks :math:`\nabla^2h_i`, so the curvature is the
largest of :math:`\|\nabla^2h_i\|`; for a mean, 1/n of it. Gradients over the domain: the one at the centre, plus
curvature times spread.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, norm
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.objectives.cross_entropy import masses
from surefoot.objectives.further import Absolute, Divergence, NegativeLogLikelihood, Poisson, SoftMargin
from surefoot.objectives.loss import divisor
from surefoot.objectives.losses import BinaryCrossEntropy, Huber
from surefoot.objectives.separable import Form, SeparableLoss
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import root, top
from surefoot.operations.record import LossFacts, operation
from surefoot.operations.softmax import STEEPEST

_UNIT = 2.0**-52
_SMALLEST = 2.0**-1022  # of the normal numbers in double precision
SEPARABLE: dict[str, type[SeparableLoss]] = {
    loss.operation: loss
    for loss in (Absolute, BinaryCrossEntropy, Divergence, Huber, NegativeLogLikelihood, Poisson, SoftMargin)
}


def _samples(use: Use) -> tuple[Slot]:
    """Row i of the outputs enters the i-th summand."""
    return ("outputs",)


def options_of(call: Call) -> dict[str, Any]:
    """The options of a loss."""
    return dict(call.node.kwargs)


@operation("surefoot.square", rows=_samples, loss=LossFacts(quadratic=True), errata=(12,))
def square(call: Call) -> Bounds:
    r""":math:`\frac c2\sum_i\|\hat y_i - y_i\|^2`, c = 1/n for a mean: gradient :math:`c(\hat y - y)`,
    curvature c.
    """
    outputs, targets = call["outputs"], call["targets"]
    count, factor = outputs.shape[0], _factor(call, outputs)
    distance = outputs.bound + targets.bound
    if isinstance(outputs.value, Tensor) and isinstance(targets.value, Tensor):
        gap = outputs.value - targets.value
        distance = minimum(distance, norm(gap) * (1 + 4 * _UNIT) + outputs.spread)
    return Bounds(
        jacobian={"outputs": distance * factor},
        curvature={("outputs", "outputs"): factor},
        bound=distance**2 * factor / 2,
        reduction=outputs.numel,
        rows_along=lambda costate: {("outputs", "outputs"): Magnitude.of(np.ones(count)) * factor * costate.bound},
        change_along=lambda costate: {("outputs", "outputs"): costate.row_spread(count) * factor},
    )


def _factor(call: Call, outputs: Enclosure) -> Magnitude:
    """What the sum over all entries is multiplied by."""
    options = options_of(call)
    return Magnitude.of(options.get("scale", 1.0)) / divisor(outputs.shape, options.get("reduction", "mean"))


@operation("surefoot.cross_entropy", rows=_samples, loss=LossFacts(), errata=(12, 13))
def cross_entropy(call: Call) -> Bounds:
    r""":math:`\sum_i(m_i\log\sum_k e^{\hat y_{ik}} - \langle M_i, \hat y_i\rangle)` with masses :math:`M \ge 0`
    and :math:`m_i = \sum_kM_{ik}` (:mod:`surefoot.objectives.cross_entropy`); for a plain mean :math:`m_i = 1/n`.

    With p the soft-max, the gradient of a row is :math:`m_i(p - M_i/m_i)`, of norm at most :math:`\sqrt2m_i` (two
    distributions), and its Hessian :math:`m_i(\mathrm{diag}(p) - pp^\top)`, where the matrix has norm at most

    * 1/2: Böhning, Multinomial logistic regression algorithm, Ann. Inst. Statist. Math. 44 (1992); reached at
      two classes of probability 1/2;
    * :math:`\max_k p_k`, as :math:`pp^\top \succeq 0`;
    * :math:`2\max_k p_k(1 - p_k)`, by the circles of Gershgorin.

    A row that moves by r changes differences of its entries by at most :math:`\sqrt2 r`, so each probability by a
    factor between :math:`e^{-\sqrt2 r}` and :math:`e^{\sqrt2 r}` (:mod:`surefoot.operations.softmax`);
    :math:`t(1-t)` is largest at the point nearest to 1/2. At zero the loss is :math:`\sum_im_i\log k`.
    """
    outputs, targets = call["outputs"], call["targets"]
    count, classes = outputs.shape
    mass = masses(targets.value, classes, **options_of(call)) if isinstance(targets.value, Tensor) else None
    weights = _unknown_masses(call, outputs) if mass is None else _row_masses(mass)
    curvatures, slope = weights * 0.5, weights.norm() * math.sqrt(2) * (1 + _UNIT)
    if classes == 1:
        curvatures, slope = Magnitude.zero((count,)), Magnitude.zero()
    bound = weights.sum() * math.log(classes) * (1 + 2 * _UNIT) + slope * outputs.bound
    if isinstance(outputs.value, Tensor):
        curvatures = minimum(curvatures, _curvature(outputs) * weights)
        if mass is not None:
            slope = minimum(slope, _gradient(outputs, mass) + curvatures.max() * outputs.spread)
    return Bounds(
        jacobian={"outputs": slope},
        curvature={("outputs", "outputs"): curvatures.max()},
        bound=bound,
        reduction=outputs.numel,
        rows_along=lambda costate: {("outputs", "outputs"): curvatures * costate.bound},
        change_along=lambda costate: {
            ("outputs", "outputs"): costate.row_spread(count) * curvatures
            + _change(outputs) * weights * costate.bound
        },
    )


def _row_masses(mass: Tensor) -> Magnitude:
    """m, rounded up; (n + k + 32) roundings."""
    return Magnitude.of(mass.sum(dim=1)) * (1 + (sum(mass.shape) + 32) * _UNIT)


def _unknown_masses(call: Call, outputs: Enclosure) -> Magnitude:
    r"""m for targets that are not known.

    A sum has :math:`m_i \le \max w`, and a mean of distributions :math:`\max w/n`; distributions may add up to a
    little more than one. A mean of class numbers divides by at least :math:`n\min w` if no sample is ignored, and
    in any case by the weight of the sample itself: :math:`m_i \le 1 - \epsilon + \epsilon\bar w/w_{y_i}`.
    """
    options, count = options_of(call), outputs.shape[0]
    weights = options.get("weight") or (1.0,)
    largest, least = Magnitude.of(max(weights)), min(weights)
    distributions = call["targets"].spec.dtype.is_floating_point
    size = largest * (1 + (3e-5 if distributions else 8 * _UNIT)) * options.get("scale", 1.0)
    if options.get("reduction", "mean") == "mean":
        size = size / count
        if not distributions:
            ratio = largest / least if least else Magnitude.infinity()
            alone = ratio if options.get("label_smoothing", 0.0) else Magnitude.of(1.0)
            found = alone if options.get("ignore_index") is not None else minimum(alone, ratio / count)
            size = maximum(size, found * options.get("scale", 1.0) * (1 + 8 * _UNIT))
    return Magnitude.of(np.ones(count)) * size


def _curvature(outputs: Enclosure) -> Magnitude:
    """The norm of the Hessian of every row over the domain, for a mass of 1.

    A probability is computed with a relative error, and where it is below the smallest normal number with one of
    at most that number, so that the sum of both is above it; an exponential that overflows leaves it at 1. The
    arguments of exponentials that neither over- nor underflow are at most 746, off by a relative unit or two.
    """
    probability = torch.softmax(outputs.value, dim=1)
    reach = math.sqrt(2.0) * outputs.row_spread(outputs.shape[0]).tensor(outputs.value)[:, None]
    slack = 1 + (outputs.shape[1] + 4096) * _UNIT  # of the soft-max, its argument and the exponential
    high = ((probability + _SMALLEST) * torch.exp(reach) * slack).clamp(max=1.0)
    low = probability * torch.exp(-reach) / slack
    nearest = torch.minimum(torch.maximum(low, torch.tensor(0.5, dtype=low.dtype, device=low.device)), high)
    best = torch.minimum(high.amax(dim=1), 2 * (nearest * (1 - nearest)).amax(dim=1))
    return Magnitude.of(best * (1 + 8 * _UNIT))


def _change(outputs: Enclosure) -> Magnitude:
    """How far the second derivative in a row of mass 1 may be from that at the centre: it is the Jacobian of the
    soft-max, of curvature 0.2722 (:mod:`surefoot.operations.softmax`).
    """
    return STEEPEST * outputs.row_spread(outputs.shape[0])


def _gradient(outputs: Enclosure, mass: Tensor) -> Magnitude:
    """The norm of the gradient at the centre."""
    rows = mass.sum(dim=1, keepdim=True)
    difference = torch.softmax(outputs.value, dim=1) * rows - mass
    # entries of the soft-max are off by a relative (k + 64) u, masses by (n + k + 32) u; a row of p has norm ≤ 1
    slack = (2 * sum(outputs.shape) + 128) * _UNIT
    return norm(difference) + _row_masses(mass).norm() * slack


@operation(*SEPARABLE, rows=_samples, loss=LossFacts())
def separable(call: Call) -> Bounds:
    r"""A sum over the entries, :math:`c\sum_e(\mu_e\varphi(s_ex_e - t_e) - b_ex_e + k_e)`
    (:mod:`surefoot.objectives.separable`).

    The Hessian is diagonal, so that its norm is the largest of its entries, of a row as of all; an entry of the
    gradient is between its values at the ends of an interval, as :math:`\varphi` is convex. Where targets are not
    known, every entry has the largest slope and curvature there are.
    """
    outputs, targets, options = call["outputs"], call["targets"], options_of(call)
    count, loss = outputs.shape[0], SEPARABLE[call.node.op]
    steepest, bend = (_factor(call, outputs) * size * (1 + 4 * _UNIT) for size in loss.extremes(**options))
    steepest = steepest * root(outputs.numel)
    if not isinstance(targets.value, Tensor):
        return Bounds(
            jacobian={"outputs": steepest},
            curvature={("outputs", "outputs"): bend},
            reduction=outputs.numel,
            reason="" if bend.is_finite else _reason(call),
        )
    form = loss.form(targets.value, outputs.shape, **options)
    low, high = (end.to(targets.value.device).expand(outputs.shape) for end in outputs.interval())
    if isinstance(outputs.value, Tensor):
        least, most = form.bends_around(outputs.value, low, high)
        here = form.curvatures(outputs.value)
        changes = top(torch.maximum(most - here, here - least).nan_to_num(nan=torch.inf).clamp(min=0.0), count)
    else:
        _, most = form.bends(low, high)
        changes = Magnitude.infinity()
    curvatures = minimum(top(most, count), bend)
    slope = minimum(norm(form.slopes(low, high)), steepest)
    if isinstance(outputs.value, Tensor):
        slope = minimum(slope, _centre_slope(form, outputs.value, most) + curvatures.max() * outputs.spread)
    return Bounds(
        jacobian={"outputs": slope},
        curvature={("outputs", "outputs"): curvatures.max()},
        offset=Magnitude.of(form.size_at_zero(outputs.shape)),
        reduction=outputs.numel,
        rows_along=lambda costate: {("outputs", "outputs"): curvatures * costate.bound},
        change_along=lambda costate: {
            ("outputs", "outputs"): costate.row_spread(count) * curvatures + changes * costate.bound
        },
        reason="" if curvatures.max().is_finite else _reason(call),
    )


def _centre_slope(form: Form, x: Tensor, bends: Tensor) -> Magnitude:
    """The norm of the gradient at the centre; with a relative 2⁻⁴⁰ of its parts for round-off, and the curvature
    times that of its argument.
    """
    gradient = form.gradient(x)
    error = (gradient.abs() + 2 * form.factor * form.linear.abs()) * 2.0**-40
    own = torch.where(form.sign == 0, 0.0, form.shift / form.sign).abs() + x.abs()
    error = error + (bends * own * 2.0**-49).nan_to_num(nan=torch.inf)
    return norm(gradient) + norm(error.expand(x.shape))


def _reason(call: Call) -> str:
    if call.node.op == "surefoot.poisson":
        return (
            "the exponential of 'poisson' has no bounded curvature: shrink the domain, so that outputs are bounded"
        )
    return f"'{call.label}' has a kink where an output meets its target: use surefoot.objectives.Huber"
