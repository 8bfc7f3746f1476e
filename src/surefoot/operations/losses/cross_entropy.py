r"""The logistic loss of several classes, with everything torch knows about it.

Class weights :math:`w`, label smoothing :math:`\epsilon`, ignored samples, labels or distributions: all of them
are non-negative *masses* :math:`M_{ik}`, and the loss is

.. math:: h(\hat y) = -\sum_{ik}M_{ik}\log p_{ik}
    = \sum_i\Big(m_i\log\sum_je^{\hat y_{ij}} - \langle M_i, \hat y_i\rangle\Big), \qquad m_i = \sum_kM_{ik}

with p the soft-max of a row. So a row is :math:`m_i` times the logistic loss of the distribution
:math:`M_i/m_i`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.enclosure import Enclosure, norm
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.operations.call import Bounds, Call, Moving, Slot
from surefoot.operations.losses.factor import Factor, modest
from surefoot.operations.losses.sums import (
    UNIT,
    as_tensor,
    compared,
    dense,
    keywords,
    near_loss,
    row_bounds,
    samples,
    weighted_sum,
)
from surefoot.operations.record import LossFacts, operation
from surefoot.operations.softmax import STEEPEST, moderate, probabilities, summed
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL
from surefoot.taylor import FLOOR, TaylorModel, compose, passed_on, row_norms, shifted

ClassWeights: TypeAlias = tuple[float, ...] | None
_SMALLEST = 2.0**-1022  # of the normal numbers in double precision
_SOFTMAX_ERROR = 2.0**-40
_FEW = 32  # classes up to which a soft-max over columns is several times as fast as one over rows


def value(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: ClassWeights = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
) -> Tensor:
    """The loss as torch computes it; targets are class numbers or distributions."""
    labels = not targets.is_floating_point()
    options: dict[str, Any] = {
        "weight": None if weight is None else as_tensor(weight, outputs),
        "ignore_index": ignore_index if labels and ignore_index is not None else -100,
        "reduction": reduction,
    }
    few = outputs.dtype == torch.float64 and outputs.shape[1] <= _FEW  # in single, numbers are those of torch
    if labels and not label_smoothing and few:
        value = F.nll_loss(torch.log_softmax(outputs.T.contiguous(), dim=0).T, targets.long(), **options)
    else:
        given = targets.long() if labels else targets.to(outputs.dtype)
        value = F.cross_entropy(outputs, given, label_smoothing=label_smoothing, **options)
    return value if scale == 1.0 else scale * value


def masses(
    targets: Tensor,
    classes: int,
    *,
    weight: ClassWeights = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
) -> Tensor:
    r"""M, samples × classes, in double precision; every entry has a relative error below (n + 16) 2⁻⁵³.

    For class numbers :math:`M_{ik} \propto w_{y_i}(1 - \epsilon)[k = y_i] + \epsilon w_k/K`, zero for ignored
    samples; the mean divides by the sum of the :math:`w_{y_i}` of the others. For distributions :math:`M_{ik}
    \propto w_k((1 - \epsilon)y_{ik} + \epsilon/K)`; the mean divides by the number of samples. These are the
    definitions of torch.nn.CrossEntropyLoss.
    """
    count, device = targets.shape[0], targets.device
    weights = torch.ones(classes, dtype=torch.float64, device=device)
    if weight is not None:
        weights = as_tensor(weight, weights)
    if targets.is_floating_point():
        found = weights * ((1 - label_smoothing) * targets.double() + label_smoothing / classes)
        return found * (scale / count) if reduction == "mean" else found * scale
    labels, counted = targets.long(), torch.ones(count, dtype=torch.bool, device=device)
    if ignore_index is not None:
        counted = labels != ignore_index
        labels = labels.where(counted, 0)
    own = weights[labels].where(counted, 0.0)
    found = (label_smoothing / classes) * weights * counted[:, None]
    found = found.scatter_add(1, labels[:, None], (1 - label_smoothing) * own[:, None])
    return found * (scale / own.sum()) if reduction == "mean" else found * scale


def taylor(moving: Moving) -> TaylorModel | None:
    r"""The logistic losses of all samples along a segment, times their masses.

    Let :math:`\pi` be the soft-max at the beginning, :math:`q_j = \hat y_j - \langle\pi, \hat y_j\rangle` the
    centred coefficients of the scores and :math:`M(\eta) = \sum_k\pi_ke^{q_k(\eta)}`. Then the loss of a row is
    :math:`h(\eta) = h(0) + \sum_{j\ge1}(\langle\pi, \hat y_j\rangle - \langle y, \hat y_j\rangle)\eta^j + \log
    M(\eta)` with :math:`y = M_i/m_i`, and :math:`M \ge e^{\langle\pi, q\rangle} = 1` by Jensen's inequality. At
    any point of the segment the Taylor coefficients of M are at most :math:`X_i = \sum_k\pi_ke^{Q_k}b_i(P_k)`,
    with :math:`Q_k` the farthest move of :math:`q_k`, :math:`P_k` bounds of its Taylor coefficients and
    :math:`b_i` the coefficients of :math:`\exp(\sum_j P_{kj}t^j)`; the first one, zero at the beginning, is at
    most :math:`2\bar\eta X_2`, too. As the Taylor coefficients of the logarithm at M ≥ 1 are at most 1/i, what the
    coefficients of :math:`\log M` leave out is at most the coefficient of :math:`t^m` in
    :math:`\sum_i\frac1i(\sum_jX_jt^j)^i`. The rests of the scores are multiplied by the norm of the gradient,
    :math:`\|p - y\| \le \min(\sqrt2, \|\pi - y\| + \frac12\|\hat y - \hat y_0\|)`, soft-max having Lipschitz
    constant 1/2. With scores of speed :math:`S_1` that turn by :math:`S_2` (:mod:`surefoot.taylor`) p turns
    by at most :math:`\frac12S_1` and bends by :math:`\frac12S_2 + \frac12tS_1^2`, t the Lipschitz constant of the
    derivative of the soft-max.

    *Round-off.* The entries of :math:`\pi` have relative errors of at most :math:`(t_k + k + 10)u` with k classes,
    :math:`t_k = \max\hat y - \hat y_k` and :math:`\pi_kt_k < 1`, so means of the scores are off by :math:`(2k +
    10)u` of the largest of them, and the others are sums and products. So the slope is off by some units times
    :math:`S_1`. The other coefficients are at most those of :math:`-\log(2 - e^Q)`, :math:`Q(t) = 2\sum_j\|\hat
    y_j\|t^j` (M - 1 has at most those of :math:`e^Q - 1`, and :math:`-\log(1 - t)` those of the logarithm), so
    they are off by some units times these. As a series in Q it begins with coefficients below 1.1 up to
    :math:`Q^4`, so beyond the slope, divided by :math:`\eta^2`, all are below :math:`1.1(q_2 + q_1^2(1 + \rho +
    \rho^2))` with :math:`q_1 = 2S_1`, :math:`q_2 = 2S_2`, :math:`\rho = q_1\bar\eta`.
    """
    pair = compared(moving)
    if pair is None:
        return None
    (outputs, targets), order = pair, moving.order
    scores, *others = dense(outputs, order)
    length = outputs.length
    probability = torch.softmax(scores, dim=1)
    mass = masses(targets, scores.shape[1], **moving.node.kwargs)
    weight = mass.sum(dim=1, keepdim=True)
    target = torch.where(weight > 0, mass / weight, probability)  # a row without mass counts for nothing
    means = [_weighted(probability, c) for c in others]
    centred = [torch.zeros_like(scores), *(c - mean for c, mean in zip(others, means, strict=True))]
    coefficients = [torch.logsumexp(scores, dim=1, keepdim=True) - _weighted(target, scores)]
    bent = _log_moment(probability, centred)
    for c, mean, log in zip(others, means, bent[1:], strict=True):
        coefficients.append(mean - _weighted(target, c) + log)
    rest = _left_out(probability, centred, outputs)
    slope = row_norms(probability - target, rowwise=True) + 0.5 * outputs.move + _SOFTMAX_ERROR
    slope = slope.clamp(max=math.sqrt(2.0) * (1 + 2 * UNIT))
    size = 1.0 + scores.abs().amax(dim=1, keepdim=True)
    first, second = 2 * outputs.speed, 2 * outputs.turn
    farthest = first * length
    later = second + first.square() * (1.0 + farthest * (1.0 + farthest))
    errors = torch.cat([size, first, 2 * later], dim=1) * ((sum(scores.shape) + 64) * 4 * UNIT)
    tail = torch.cat([rest * (1 + _SOFTMAX_ERROR), errors], dim=1)
    if outputs.tail is not None:
        bend = 0.25 * second + (0.125 * float(STEEPEST)) * first.square()
        tail = tail + passed_on(outputs.tail, slope, 0.25 * first, bend)
    return weighted_sum(coefficients, tail, length, weight)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    return (weights * values).sum(dim=1, keepdim=True)


def _log_moment(probability: Tensor, centred: list[Tensor]) -> list[Tensor]:
    """Taylor coefficients of log Σ π exp q with q(0) = 0, by the recurrences of exp and log."""
    exponential = [torch.ones_like(probability)]
    moment = [torch.ones_like(probability[:, :1])]
    logarithm = [torch.zeros_like(moment[0])]
    for j in range(1, len(centred)):
        terms = [(i / j) * centred[i] * exponential[j - i] for i in range(1, j + 1)]
        exponential.append(sum(terms[1:], terms[0]))
        moment.append(_weighted(probability, exponential[j]))
        known = [(i / j) * logarithm[i] * moment[j - i] for i in range(1, j)]
        logarithm.append(moment[j] - sum(known, torch.zeros_like(moment[0])))
    return logarithm


def _left_out(probability: Tensor, centred: list[Tensor], outputs: TaylorModel) -> Tensor:
    """What the coefficients of log M leave out, per sample.

    The centred coefficients are off by some units of the norms, and probabilities may underflow.
    """
    order, length = len(centred), outputs.length
    wrong = shifted([*outputs.norms, *[None] * (order - outputs.order)], length)
    least = [FLOOR if size is None else size * _SOFTMAX_ERROR + FLOOR for size in wrong]
    moves = shifted(centred, length, least)
    farthest = moves[0]
    assert farthest is not None  # an order is at least two
    one = torch.ones_like(probability[:1, :1])
    bells = compose([one / math.factorial(i) for i in range(order + 1)], [*moves, None], 1, order)
    weight = (probability + 2 * _SMALLEST) * torch.exp(farthest)
    moments = [_weighted(weight, b) for b in bells if b is not None]
    moments[0] = torch.minimum(moments[0], 2 * length * moments[1])
    (rest,) = compose([one / max(i, 1) for i in range(order + 1)], [None, *moments], order, order)
    assert rest is not None
    return rest


def root(outputs: Tensor, targets: Tensor, slope: Tensor | None, **options: Any) -> Factor | None:
    r"""R for two classes and more.

    With the probabilities p of a row and :math:`s = \sqrt p`, a unit vector: :math:`\mathrm{diag}(p) - pp^\top =
    \mathrm{diag}(s)(I - ss^\top)\mathrm{diag}(s)`, and :math:`I - ss^\top = UU^\top` for an orthonormal basis U of
    the complement of s: all but the first column of the reflection :math:`I - uu^\top/(1 + s_1)`,
    :math:`u = s + e_1`, which takes s to :math:`-e_1` (its first column is :math:`-s`). So :math:`R_i =
    \sqrt{m_i}\,\mathrm{diag}(s)U`, one column less than classes; and :math:`R_i\bar w_i = g_i` for
    :math:`\bar w_i = U^\top(g_i/s)/\sqrt{m_i}`, because the entries of :math:`g_i` add up to 0,
    so that :math:`g_i/s` is orthogonal to s.
    """
    if outputs.shape[1] < 2:
        return None
    if targets.is_floating_point() or options.get("weight") or options.get("ignore_index") is not None:
        mass = masses(targets, outputs.shape[1], **options).sum(dim=1, keepdim=True).to(outputs.dtype)
    else:  # all rows have the same
        count = len(targets) if options.get("reduction", "mean") == "mean" else 1
        mass = outputs.new_tensor(options.get("scale", 1.0) / count)
    few = outputs.shape[1] <= _FEW
    s = (torch.softmax(outputs.T.contiguous(), dim=0).T.contiguous() if few else torch.softmax(outputs, 1)).sqrt_()
    factor = Factor(mass.sqrt(), outputs.shape, unit=s)
    if slope is None:
        return factor
    ratio = torch.where(mass > 0, slope / (s * factor.scale), 0.0)
    return replace(factor, slope=factor.reflected(ratio)) if modest(ratio) else factor


def pullback(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    r"""The gradient :math:`m_ip_{ik} - M_{ik} = (m_i - M_{ik})p_{ik} - M_{ik}(1 - p_{ik})`.

    The second form does not cancel for a label: :math:`m_i - M_{ik}` is zero, and :math:`1 - p_{ik}` is the sum of
    the other probabilities where :math:`p_{ik}` is the largest of its row, and otherwise at least 1/2; so for the
    masses, of which the entries have relative errors below :math:`(n + 16)u`.
    """
    outputs, targets = call["outputs"].value, call["targets"].value
    computed = masses(targets, outputs.shape[1], **call.node.kwargs)
    mass = Rounded(computed, computed.abs() * ((len(computed) + 16) * UNIT) + SMALL * (computed != 0).double())
    p = probabilities(outputs, 1)
    rest = _others(p, Rounded.exact(torch.ones((), dtype=torch.float64)))
    slope = _others(mass, summed(mass, 1)) * p - mass * rest
    return {"outputs": slope * costate}


def _second(call: Call, move: Tensor) -> tuple[Tensor, float]:
    r""":math:`\sum_im_i(\langle p, d^2\rangle - \langle p, d\rangle^2)`, the Hessian being
    :math:`m(\mathrm{diag}(p) - pp^\top)`: off by :math:`4m\|\hat p - p\|` and a few units of m for each class.
    """
    outputs, targets = call["outputs"].value, call["targets"].value
    mass = masses(targets, outputs.shape[1], **call.node.kwargs).sum(dim=1, keepdim=True)
    p = moderate(outputs, 1)
    variance = (p.value * move.square()).sum(dim=1, keepdim=True) - (p.value * move).sum(dim=1, keepdim=True) ** 2
    wrong = 4 * torch.linalg.vector_norm(p.error, dim=1, keepdim=True) + (sum(outputs.shape) + 32) * 8 * UNIT
    return (mass * variance).sum(), float((mass.abs() * wrong).max()) * (1 + 2.0**-40) if mass.numel() else 0.0


def _others(shares: Rounded, total: Rounded) -> Rounded:
    """The total of a row less each of its entries, which are not negative: by subtraction, but for the largest
    entry by adding up the others.
    """
    largest = shares.value.argmax(dim=1, keepdim=True)
    is_largest = torch.zeros_like(shares.value, dtype=torch.bool).scatter(1, largest, True)
    value, error = (part.masked_fill(is_largest, 0.0) for part in (shares.value, shares.error))
    apart = total - shares
    others, zeros = summed(Rounded(value, error), 1), torch.zeros_like(is_largest)
    return others.choose(apart, is_largest, zeros)


def error(call: Call, computed: Tensor) -> Magnitude:
    r"""How far the computed loss is from the exact one, measured by :math:`\sum_{ik}M_{ik}(t_{ik} + \log(1 +
    \sum_{j\ne a_i}e^{-t_{ij}}))`, where :math:`t_{ik} = \hat y_{ia_i} - \hat y_{ik} \ge 0` and :math:`a_i` is the
    largest entry of row i.

    All terms are non-negative. In a row, t is off by a relative u, so its exponential by :math:`te^{-t}2u` and a
    relative 4u, the sum of k of them by a relative ku more, and the rest rounds a few times; the masses are off by
    a relative :math:`(n + 16)u`, or 16u where no sum of class weights is taken. The rows are added without
    round-off (``math.fsum``).
    """
    outputs, targets = call["outputs"].value.detach(), call["targets"].value
    mass = masses(targets, outputs.shape[1], **call.node.kwargs).abs()
    largest, place = outputs.max(dim=1, keepdim=True)
    apart = largest - outputs
    others = torch.exp(-apart).scatter(1, place, 0.0)
    moved = (apart * others).nan_to_num(nan=0.0).sum(dim=1)
    row = torch.where(mass > 0, mass * (apart + torch.log1p(others.sum(dim=1, keepdim=True))), 0.0).sum(dim=1)
    total, wide = math.fsum(row.tolist()), float((mass.sum(dim=1) * moved).sum())
    weighted = call.node.kwargs.get("weight") is not None
    relative = (3 * outputs.shape[1] + (outputs.shape[0] if weighted else 0) + 64) * 2 * UNIT
    wrong = (
        abs(float(computed.detach()) - total) + total * relative + wide * 4 * UNIT * (1 + outputs.numel() * UNIT)
    )
    if not wrong < math.inf:
        return Magnitude.infinity()
    return Magnitude.of(wrong) * (1 + 8 * UNIT) + norm(mass) * (outputs.numel() * 2.0**-1000) + 2.0**-1000


@operation("surefoot.cross_entropy", error=error,
           loss=LossFacts(value, convex=True, smooth=True, nonnegative=True, options=keywords(value)),
           rows=samples, taylor=taylor, pullback=pullback, near=near_loss(pullback, _second), factor=root,
           errata=(12, 13))  # fmt: skip
def cross_entropy(call: Call) -> Bounds:
    r""":math:`\sum_i(m_i\log\sum_k e^{\hat y_{ik}} - \langle M_i, \hat y_i\rangle)` with masses :math:`M \ge 0`
    and :math:`m_i = \sum_kM_{ik}`; for a plain mean :math:`m_i = 1/n`.

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
    mass = masses(targets.value, classes, **call.node.kwargs) if isinstance(targets.value, Tensor) else None
    weights = _unknown_masses(call, outputs) if mass is None else _row_masses(mass)
    curvatures, slope = weights * 0.5, weights.norm() * math.sqrt(2) * (1 + UNIT)
    if classes == 1:
        curvatures, slope = Magnitude.zero((count,)), Magnitude.zero()
    bound = weights.sum() * math.log(classes) * (1 + 2 * UNIT) + slope * outputs.bound
    if isinstance(outputs.value, Tensor):
        curvatures = minimum(curvatures, _curvature(outputs) * weights)
        if mass is not None:
            slope = minimum(slope, _gradient(outputs, mass) + curvatures.max() * outputs.spread)
    change = STEEPEST * outputs.row_spread(count) * weights  # the Hessian of a row is the Jacobian of the soft-max
    return row_bounds(call, slope, curvatures, change, bound=bound)


def _row_masses(mass: Tensor) -> Magnitude:
    """m, rounded up; (n + k + 32) roundings."""
    return Magnitude.of(mass.sum(dim=1)) * (1 + (sum(mass.shape) + 32) * UNIT)


def _unknown_masses(call: Call, outputs: Enclosure) -> Magnitude:
    r"""m for targets that are not known.

    A sum has :math:`m_i \le \max w`, and a mean of distributions :math:`\max w/n`; distributions may add up to a
    little more than one. A mean of class numbers divides by at least :math:`n\min w` if no sample is ignored, and
    in any case by the weight of the sample itself: :math:`m_i \le 1 - \epsilon + \epsilon\bar w/w_{y_i}`.
    """
    options, count = call.node.kwargs, outputs.shape[0]
    weights = options.get("weight") or (1.0,)
    largest, least = Magnitude.of(max(weights)), min(weights)
    distributions = call["targets"].spec.dtype.is_floating_point
    size = largest * (1 + (3e-5 if distributions else 8 * UNIT)) * options.get("scale", 1.0)
    if options.get("reduction", "mean") == "mean":
        size = size / count
        if not distributions:
            ratio = largest / least if least else Magnitude.infinity()
            alone = ratio if options.get("label_smoothing", 0.0) else Magnitude.of(1.0)
            found = alone if options.get("ignore_index") is not None else minimum(alone, ratio / count)
            size = maximum(size, found * options.get("scale", 1.0) * (1 + 8 * UNIT))
    return Magnitude.of(np.ones(count)) * size


def _curvature(outputs: Enclosure) -> Magnitude:
    """The norm of the Hessian of every row over the domain, for a mass of 1.

    A probability is computed with a relative error, and where it is below the smallest normal number with one of
    at most that number, so that the sum of both is above it; an exponential that overflows leaves it at 1. The
    arguments of exponentials that neither over- nor underflow are at most 746, off by a relative unit or two.
    """
    probability = torch.softmax(outputs.value, dim=1)
    reach = math.sqrt(2.0) * outputs.row_spread(outputs.shape[0]).tensor(outputs.value)[:, None]
    slack = 1 + (outputs.shape[1] + 4096) * UNIT  # of the soft-max, its argument and the exponential
    high = ((probability + _SMALLEST) * torch.exp(reach) * slack).clamp(max=1.0)
    low = probability * torch.exp(-reach) / slack
    nearest = torch.minimum(torch.maximum(low, torch.tensor(0.5, dtype=low.dtype, device=low.device)), high)
    best = torch.minimum(high.amax(dim=1), 2 * (nearest * (1 - nearest)).amax(dim=1))
    return Magnitude.of(best * (1 + 8 * UNIT))


def _gradient(outputs: Enclosure, mass: Tensor) -> Magnitude:
    """The norm of the gradient at the centre."""
    rows = mass.sum(dim=1, keepdim=True)
    difference = torch.softmax(outputs.value, dim=1) * rows - mass
    # entries of the soft-max are off by a relative (k + 64) u, masses by (n + k + 32) u; a row of p has norm ≤ 1
    slack = (2 * sum(outputs.shape) + 128) * UNIT
    return norm(difference) + _row_masses(mass).norm() * slack
