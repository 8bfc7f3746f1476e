r"""Losses along a segment: of every sample, then their weighted sum.

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
y_0\|)`, soft-max having Lipschitz constant 1/2. With masses (:mod:`surefoot.objectives.cross_entropy`) a row is
:math:`m_i` times such a loss, with :math:`y_i = M_i/m_i`.

**Sums over the entries** (:mod:`surefoot.objectives.separable`). An entry :math:`\mu\varphi(\omega) - bx` is
expanded like any scalar function (:mod:`surefoot.operations.scalar_taylor`), with suprema over what ω reaches. If
:math:`\varphi''` jumps, two coefficients are known: :math:`\varphi'` is Lipschitz, and the remainder of Taylor's
formula needs no more. The rests of the outputs are multiplied by the norm of the largest gradient of the row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.objectives.cross_entropy import masses
from surefoot.objectives.loss import divisor
from surefoot.objectives.separable import Form, times
from surefoot.operations.losses import SEPARABLE
from surefoot.scalar import derivatives, sup_on
from surefoot.scalar.bounds import HIGHEST_ORDER
from surefoot.taylor.model import UNIT, TaylorModel, rounded_up, row_norms
from surefoot.taylor.series import compose, shifted

_SOFTMAX_ERROR = 2.0**-40
_EVALUATION = 2.0**-44  # relative error of the coefficients, to the sum of the absolute values of their terms


def square(outputs: TaylorModel, targets: Tensor, order: int, **options: Any) -> TaylorModel:
    """The scaled sum of half the squared distances."""
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
    factor = options.get("scale", 1.0) / divisor(outputs.value.shape, options.get("reduction", "mean"))
    return _total(products[:order], own, length, torch.full_like(start, factor))


def cross_entropy(outputs: TaylorModel, targets: Tensor, order: int, **options: Any) -> TaylorModel:
    """The logistic losses of all samples, times their masses."""
    scores, *others = _dense(outputs, order)
    length = outputs.length
    probability = torch.softmax(scores, dim=1)
    mass = masses(targets, scores.shape[1], **options)
    weight = mass.sum(dim=1, keepdim=True)
    target = torch.where(weight > 0, mass / weight, probability)  # a row without mass counts for nothing
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
    error = size * ((sum(scores.shape) + 64) * 32 * UNIT) + rest * (length**order * _SOFTMAX_ERROR)
    own = torch.cat([rest, error], dim=1)
    if outputs.tail is not None:
        own = own + slope * outputs.tail
    return _total(coefficients, own, length, weight)


def separable(operation: str, outputs: TaylorModel, targets: Tensor, order: int, **options: Any) -> TaylorModel:
    """A loss that is a sum over the entries."""
    form = _flat_form(SEPARABLE[operation].form(targets, outputs.value.shape, **options), outputs.value.shape)
    function, factor, form = form.function, form.factor, replace(form, factor=1.0)
    if function is not None:
        order = min(order, 2 if any(step.pieces for step in function.steps) else HIGHEST_ORDER)
    outputs = outputs.truncated(order)
    x = [c.reshape(len(c), -1) for c in _dense(outputs, order)]
    coefficients = [-form.linear * c for c in x]
    coefficients[0] = coefficients[0] + form.constant
    length, rest = outputs.length, torch.zeros_like(x[0])
    farthest = _move(x, length)
    size = form.linear.abs() * (x[0].abs() + farthest) + form.constant.abs()
    if function is not None:
        argument = [form.argument(x[0]), *(form.sign * c for c in x[1:])]
        taylor = derivatives(function, argument[0], order)
        bent = [taylor[0], *compose(taylor, argument, 1, order - 1)]
        coefficients = [a if b is None else a + form.weight * b for a, b in zip(coefficients, bent, strict=True)]
        low, high = form.reach(x[0] - farthest, x[0] + farthest)
        suprema = [sup_on(function, i, low, high) / math.factorial(i) for i in range(order + 1)]
        (left_out,) = compose([None, *suprema[1:]], [*shifted(argument, length), None], order, order)
        if left_out is not None:
            rest = times(form.weight, left_out.nan_to_num(nan=torch.inf))
        terms = [times(_move(argument, length) ** i, suprema[i]) for i in range(1, order)]
        rounded = ((form.sign * x[0]).abs() + form.shift.abs()) * 2.0**-5  # of the argument
        size = size + times(form.weight, sum(terms, suprema[0] + times(rounded, suprema[1])))
    roundings = max(_EVALUATION, (sum(x[0].shape) + 64) * 4 * UNIT)
    own = torch.stack([rest.sum(dim=1), size.sum(dim=1) * roundings], dim=1)
    if outputs.tail is not None:
        reach = outputs.move * (1 + 2.0**-26)
        own = own + row_norms(form.slopes(x[0] - reach, x[0] + reach), rowwise=True) * outputs.tail
    rows = [c.sum(dim=1, keepdim=True) for c in coefficients]
    return _total(rows, own, length, torch.full_like(rows[0], factor))


def _flat_form(form: Form, shape: torch.Size) -> Form:
    """The form with one row per sample."""
    names = ("weight", "sign", "shift", "linear", "constant")
    return replace(form, **{name: getattr(form, name).expand(shape).reshape(shape[0], -1) for name in names})


def _move(coefficients: list[Tensor], length: float) -> Tensor:
    """How far every entry of a polynomial gets from its beginning."""
    farthest = shifted(coefficients, length)[0]
    return torch.zeros_like(coefficients[0]) if farthest is None else farthest


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


def _total(coefficients: list[Tensor], tail: Tensor, length: float, weights: Tensor) -> TaylorModel:
    """The sum over the samples with weights, a column."""
    sums = tuple((weights * c).sum() for c in coefficients)
    return TaylorModel(sums, length, rounded_up(times(weights, tail).sum(dim=0, keepdim=True)), rowwise=False)
