r"""Losses along a segment: of every sample, then their mean.

**Square.** :math:`\frac12\|r\|^2` with :math:`r = \hat y - y` has the coefficients
:math:`\frac12\sum_{a+b=j}\langle r_a, r_b\rangle`; with :math:`\delta = \eta^mR + E` it moves by at most
:math:`(\|r\| + \frac12\|\delta\|)\|\delta\|`.

**Cross-entropy.** Let :math:`\pi` be the soft-max at the beginning, :math:`q_j = \hat y_j - \langle\pi, \hat
y_j\rangle` the centred coefficients of the scores and :math:`M(\eta) = \sum_k\pi_ke^{q_k(\eta)}`. Then the loss is
:math:`h(\eta) = h(0) + \sum_{j\ge1}(\langle\pi, \hat y_j\rangle - \langle y, \hat y_j\rangle)\eta^j + \log
M(\eta)`, and :math:`M \ge e^{\langle\pi, q\rangle} = 1` by Jensen's inequality. At any point of the segment the
Taylor coefficients of M are at most :math:`X_i = \sum_k\pi_ke^{Q_k}b_i(P_k)`, with :math:`Q_k` the farthest move
of :math:`q_k`, :math:`P_k` bounds of its Taylor coefficients and :math:`b_i` the coefficients of
:math:`\exp(\sum_j P_{kj}t^j)`; the first one, zero at the beginning, is at most :math:`2\bar\eta X_2`, too. As the
Taylor coefficients of the logarithm at M ≥ 1 are at most 1/i, what the coefficients of :math:`\log M` leave out is
at most the coefficient of :math:`t^m` in :math:`\sum_i\frac1i(\sum_jX_jt^j)^i`. The rests of the scores are
multiplied by the norm of the gradient, :math:`\|p - y\| \le \min(\sqrt2, \|\pi - y\| + \frac12\|\hat y - \hat
y_0\|)`, soft-max having Lipschitz constant 1/2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.calculus.segment.model import UNIT, TaylorModel, rounded_up, row_norms
from surefoot.calculus.segment.series import compose, shifted

_SOFTMAX_ERROR = 2.0**-40


def square(outputs: TaylorModel, targets: Tensor, order: int) -> TaylorModel:
    """The mean of half the squared distances."""
    residual, *others = _dense(outputs, outputs.order)
    flat = [(residual - targets).flatten(1), *(c.flatten(1) for c in others)]
    products = [torch.zeros_like(flat[0][:, :1]) for _ in range(max(order, 2 * len(flat) - 1))]
    for a, c in enumerate(flat):
        for b, d in enumerate(flat[a:], start=a):
            products[a + b] += (0.5 if a == b else 1.0) * (c * d).sum(dim=1, keepdim=True)
    length = outputs.length
    start = row_norms(flat[0], rowwise=True)
    rest = torch.zeros_like(start)
    for degree, c in enumerate(products[order:], start=order):
        rest = rest + c.abs() * length ** (degree - order)
    error = (start + outputs.move).square() * ((flat[0].shape[1] + 16) * UNIT)
    own = torch.cat([rest, error], dim=1)
    if outputs.tail is not None:
        own = own + (start + outputs.polynomial_move + 0.5 * outputs.reach_of_tail) * outputs.tail
    return _mean(products[:order], own, length)


def cross_entropy(outputs: TaylorModel, targets: Tensor, order: int) -> TaylorModel:
    """The mean of the logistic losses; targets are class numbers or distributions."""
    scores, *others = _dense(outputs, order)
    length = outputs.length
    probability = torch.softmax(scores, dim=1)
    if targets.is_floating_point():
        target = targets.to(torch.float64)
    else:
        target = torch.zeros_like(scores).scatter_(1, targets.long()[:, None], 1.0)
    means = [_weighted(probability, c) for c in others]
    centred = [torch.zeros_like(scores), *(c - mean for c, mean in zip(others, means, strict=True))]
    coefficients = [torch.logsumexp(scores, dim=1, keepdim=True) - _weighted(target, scores)]
    bent = _log_moment(probability, centred)
    for c, mean, log in zip(others, means, bent[1:], strict=True):
        coefficients.append(mean - _weighted(target, c) + log)
    rest = _left_out(probability, centred, length)
    slope = row_norms(probability - target, rowwise=True) + 0.5 * outputs.move + _SOFTMAX_ERROR
    slope = slope.clamp(max=math.sqrt(2.0) * (1 + 4 * UNIT))
    size = 1.0 + scores.abs().amax(dim=1, keepdim=True) + outputs.move
    error = size * ((scores.shape[1] + 64) * 16 * UNIT) + rest * (length**order * _SOFTMAX_ERROR)
    own = torch.cat([rest, error], dim=1)
    if outputs.tail is not None:
        own = own + slope * outputs.tail
    return _mean(coefficients, own, length)


def _dense(model: TaylorModel, order: int) -> list[Tensor]:
    """The coefficients up to an order with zeros written out."""
    known = [*model.coefficients, *[None] * (order - model.order)]
    return [torch.zeros_like(model.value) if c is None else c for c in known]


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


def _left_out(probability: Tensor, centred: list[Tensor], length: float) -> Tensor:
    """What the coefficients of log M leave out, per sample."""
    order = len(centred)
    moves = shifted(centred, length)
    farthest = moves[0]
    assert farthest is not None  # an order is at least two
    one = torch.ones_like(probability[:1, :1])
    bells = compose([one / math.factorial(i) for i in range(order + 1)], [*moves, None], 1, order)
    weight = probability * torch.exp(farthest)
    moments = [_weighted(weight, b) for b in bells if b is not None]
    moments[0] = torch.minimum(moments[0], 2 * length * moments[1])
    (rest,) = compose([one / max(i, 1) for i in range(order + 1)], [None, *moments], order, order)
    assert rest is not None
    return rest


def _mean(coefficients: list[Tensor], tail: Tensor, length: float) -> TaylorModel:
    """The mean over the samples."""
    count = tail.shape[0]
    means = tuple(c.sum() / count for c in coefficients)
    return TaylorModel(means, length, rounded_up(tail.sum(dim=0, keepdim=True) / count), rowwise=False)
