r"""Second derivatives at the weights with proved errors: of a loss, of an objective, of a layered network.

:class:`Written` is the Hessian of an objective in all weights together, and how far it moves on a ball
(:mod:`surefoot.bounds.hessian`). In a network of two layers without a function
after the second, :math:`\langle g, D^2\psi\rangle`, :math:`g = \nabla h`, couples only the weights into and out of
the same unit: :func:`unit_bends` and :func:`lowest_bend` bound its smallest eigenvalue at any width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.whole import Whole
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.effort import HIGH
from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import eigenvalue_bounds, gamma, up
from surefoot.norms.verified import product
from surefoot.objectives import CrossEntropy, Objective, Square
from surefoot.operations.losses.cross_entropy import masses
from surefoot.scalar import Rounded, rounded_derivatives
from surefoot.theorems.layered import Layered


@dataclass(frozen=True)
class LossDerivatives:
    r"""First and second derivative of a convex loss in the outputs.

    For the log-sum-exp of one sample with probabilities p the second derivative along v is the variance of v under
    p, at most :math:`\frac14(\max v - \min v)^2 \le \frac12\|v\|^2`, and the third along a, b and c is
    :math:`\mathrm E[(a - \bar a)(b - \bar b)(c - \bar c)] \le \max|a - \bar a|\cdot
    (\frac12\|b\|^2)^{1/2}(\frac12\|c\|^2)^{1/2} \le \frac{\sqrt2}2\|a\|\|b\|\|c\|`; the cross-entropy is a sum of
    such terms times the mass of each sample, and linear ones.
    """

    gradient: Rounded  # samples × outputs
    hessian: Rounded  # samples × outputs × outputs; samples do not interact
    smoothness: float  # a bound on the norm of the second derivative, anywhere
    variation: float  # a Lipschitz constant of the second derivative

    def scaled(self, part: float) -> LossDerivatives:
        """The derivatives of the loss times a number that is off by at most a relative 2u, or is exactly one."""
        if part == 1:
            return self
        numbers = (up(part * number) for number in (self.smoothness, self.variation))
        return LossDerivatives(self.gradient.scaled(part), self.hessian.scaled(part), *numbers)


def square_weight(objective: Square, outputs: Tensor) -> float:
    """The number c with h = c/2 ‖ŷ - y‖², up to one rounding."""
    probe = objective.hessian_vector_product(outputs.detach().double(), torch.ones_like(outputs).double())
    weight = float(probe.reshape(-1)[0])
    if not bool((probe - weight).abs().max() <= 1e-12 * weight):
        raise NotImplementedError(f"the Hessian of {objective} is not a multiple of the identity")
    return weight


def loss_derivatives(objective: Objective, outputs: Rounded) -> LossDerivatives | None:
    """The derivatives of a square loss, or of a cross-entropy with one class per sample; ``None`` for others."""
    value, error = outputs.value, outputs.error.expand(outputs.value.shape)
    if isinstance(objective, Square):
        weight = square_weight(objective, value)
        slopes = (outputs - objective.chosen().double().reshape(value.shape)).scaled(weight)
        unit = torch.eye(value.shape[1], dtype=torch.float64).expand(len(value), -1, -1)
        return LossDerivatives(slopes, Rounded(weight * unit, weight * unit * 2.0**-51), up(weight), 0.0)
    targets = objective.chosen()
    if not isinstance(objective, CrossEntropy) or targets.dim() > 1 + targets.is_floating_point():
        return None
    options: dict[str, Any] = dict(objective.options)
    mass = masses(targets, value.shape[1], **options)
    weights = Rounded(mass, mass * ((len(value) + 32) * 2.0**-53))
    ones = torch.ones(value.shape[1], 1, dtype=torch.float64)
    total = product(weights, Rounded.exact(ones))
    exponential: Callable[[Any], Any] = torch.exp
    shifted: Rounded = exponential(Rounded(value, error) - value.amax(1, keepdim=True))
    probability = shifted / product(shifted, Rounded.exact(ones))
    slopes = probability * total - weights
    column, row = (probability.rearranged(lambda t, d=d: t.unsqueeze(d)) for d in (2, 1))  # type: ignore[misc]
    unit = torch.eye(value.shape[1], dtype=torch.float64)
    factor = total.rearranged(lambda t: t[:, :, None])
    most = float(total.bound.max())
    return LossDerivatives(slopes, (column * unit - column * row) * factor, up(most / 2), up(0.7072 * most))


def contract(formula: str, *factors: Rounded) -> Rounded:
    r"""``torch.einsum`` with proved errors.

    With :math:`|A|` the absolute values and :math:`E` the errors, the result is off by at most :math:`C(|A| + E,
    \dots) - C(|A|, \dots)` plus the round-off :math:`\gamma C(|A|, \dots)`, where :math:`\gamma` counts the
    additions and factors. Both contractions are computed themselves, which adds :math:`\gamma` of them once more.
    """
    values = [factor.value for factor in factors]
    sizes: dict[str, int] = {}
    left, right = formula.split("->")
    for letters, value in zip(left.split(","), values, strict=True):
        sizes |= dict(zip(letters, value.shape, strict=True))
    summed = 1
    for letter in sizes.keys() - set(right):
        summed *= sizes[letter]
    absolute = torch.einsum(formula, *(value.abs() for value in values))
    bound = torch.einsum(formula, *(factor.bound.expand(factor.value.shape) for factor in factors))
    error = (bound - absolute).clamp(min=0.0) + 4 * gamma(2 * summed + sum(sizes.values()) + 32) * bound
    return Rounded(torch.einsum(formula, *values), error + 2.0**-1000)


def unit_bends(layered: Layered, gradient: Rounded) -> tuple[Tensor, float] | None:
    r""":math:`\langle g, D^2\psi\rangle` of two layers; ``None`` for other networks.

    It is one matrix per unit, summed over samples, with a bound on the norms of their errors.
    """
    if len(layered.layers) != 2 or layered.layers[1].function is not None or not layered.layers[0].trains:
        return None
    through = layered.sensitivities[0][0]
    assert through is not None
    features = features_of(layered, 0)
    bent = contract("no,now->nw", gradient, through) * second_slopes(layered, 0)
    inner = contract("ni,na,nb->iab", bent, features, features)
    size = inner.value.shape[1]
    outputs = gradient.value.shape[1] if layered.layers[1].trains_weight else 0
    value = torch.zeros(len(inner.value), size + outputs, size + outputs, dtype=torch.float64)
    error = torch.zeros_like(value)
    value[:, :size, :size], error[:, :size, :size] = inner.value, inner.error
    if outputs:
        cross = contract("ni,na,no->iao", layered.states[0][2], features, gradient)
        for whole, part in ((value, cross.value), (error, cross.error)):
            whole[:, :size, size:] = part
            whole[:, size:, :size] = part.mT
    return value, up(float(torch.linalg.matrix_norm(error).max()) * (1 + 1e-9))


def lowest_bend(units: Tensor, error: float) -> float:
    r"""A lower bound on zero and on the eigenvalues of symmetric matrices that are known up to an error.

    The smallest eigenvalue of M is :math:`c - \lambda_{\max}(cI - M)`, with c so large that the diagonal is
    positive. Zero is the eigenvalue of :math:`\langle g, D^2\psi\rangle` for parameters that are coupled to
    nothing.
    """
    most = float(torch.linalg.matrix_norm(units).max()) * 1.01 + 1e-290
    raised = -units
    raised.diagonal(dim1=1, dim2=2).add_(most)
    above = float(eigenvalue_bounds(raised).max()) - most
    return -max(above + error + 8 * 2.0**-52 * most, 0.0)


@dataclass(frozen=True, eq=False)
class Written:
    """The Hessian of an objective at the weights, written out."""

    analysis: Analysis  # the analysis of the objective
    whole: Whole  # the same with how far it moves
    value: Tensor  # the Hessian in the order of the variables, symmetric, as computed
    error: Magnitude  # a bound on the norm of its error

    @staticmethod
    def of(analysis: Analysis) -> Written | None:
        """The Hessian of a real-valued function; ``None`` if an operation has no proved second derivative."""
        whole = Whole.of(analysis, HIGH, keep=True)
        if whole is None or whole.hessian is None:
            return None
        return Written(analysis, whole, whole.hessian.matrix, whole.hessian.error)

    def apart(self, radius: float) -> float:
        """A bound on the distance from what is written to the Hessian anywhere on a ball."""
        return float(self.whole.moved(radius) + self.error)


def second_slopes(layered: Layered, k: int) -> Rounded:
    """The second derivative of the function of a layer, samples × width."""
    function, before = layered.layers[k].function, layered.sums[k]
    if function is None:
        return Rounded.exact(torch.zeros_like(before.value)).expand(before.value.shape)
    return rounded_derivatives(function, before, 2)[2] * 2.0


def flows_of(layered: Layered, slopes: list[Rounded]) -> dict[tuple[int, int], Rounded]:
    """The derivatives :math:`P_{zk}` of the output of linear map z in that of an earlier map k, by sample."""
    flows = {}
    for k, layer in enumerate(layered.layers):
        unit = torch.eye(layer.weight.shape[0], dtype=torch.float64).expand(layered.count, -1, -1)
        flows[k, k] = Rounded.exact(unit).expand(unit.shape)
        for z in range(k + 1, len(layered.layers)):
            moved = slopes[z - 1].rearranged(lambda t: t[:, :, None]) * flows[z - 1, k]
            flows[z, k] = product(Rounded.exact(layered.layers[z].weight), moved)
    return flows


def features_of(layered: Layered, k: int) -> Rounded:
    """The factors of the parameters of a layer, with errors; the ones for the bias are exact."""
    layer, state = layered.layers[k], layered.states[k][0]
    errors = state.expand(state.value.shape).error[:, : None if layer.trains_weight else 0]
    return Rounded(layer.features(state.value), nn.functional.pad(errors, (0, int(layer.trains_bias))))
