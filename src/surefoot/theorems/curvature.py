r"""The Hessian of an objective at the weights and over balls, with proved bounds.

:math:`F = h\circ\psi + R` with a convex loss h and a ridge R with weights between :math:`\lambda` and
:math:`\Lambda`, so :math:`\nabla^2F = D\psi^\top\nabla^2h\,D\psi + \langle\nabla h, D^2\psi\rangle + \nabla^2R`.
On :math:`B(u_0, \rho)` let :math:`D^2\psi` be at most K, so that :math:`\|D\psi - J\| \le \tau = K\rho`, and
:math:`\|D\psi\| \le S = \|J\| + \tau`; let :math:`\nabla^2h` be at most C and have the Lipschitz constant c, and
:math:`g = \nabla h` at the weights, which moves by at most :math:`CS\rho`. With :math:`P_0` a bound on
:math:`\langle g, D^2\psi\rangle` on the ball, that of the adjoint pass of this scalar function or :math:`\|g\|K`,
the three parts of the Hessian

* are between 0 and :math:`CS^2`, between :math:`\pm P`, :math:`P = P_0 + CS\rho K`, and between :math:`\lambda`
  and :math:`\Lambda`;
* move by at most :math:`C(S + \|J\|)\tau + cS\rho\|J\|^2` (as :math:`D^\top\nabla^2h\,D - J^\top\nabla^2h_0J =
  D^\top\nabla^2h\,D - J^\top\nabla^2h\,J + J^\top(\nabla^2h - \nabla^2h_0)J`), by 2P, and not at all; the sum of
  these is V.

So on the ball :math:`\lambda_{\min}(\nabla^2F)` is at least

1. :math:`\lambda_{\min}(\nabla^2F(u_0)) - V` where the Hessian is written out, in all weights together
   (:mod:`surefoot.bounds.hessian`); then V is how far it moves;
2. the same for networks that are affine in what is trained, with the Hessian :math:`J^\top\nabla^2h_0J +
   \nabla^2R`;
3. :math:`\lambda - P`, at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.adjoint.bounds import scalar_bounds
from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.adjoint.whole import Whole
from surefoot.calculus.effort import HIGH
from surefoot.domains import Ball
from surefoot.norms import frobenius_norm, nonnegative_norm
from surefoot.norms.hermitian import up
from surefoot.norms.verified import largest_eigenvalue, norm_of, product, smallest_eigenvalue, solution
from surefoot.objectives import CrossEntropy, Objective, Ridge, Square
from surefoot.operations.losses.cross_entropy import masses
from surefoot.scalar import Rounded
from surefoot.theorems.network import Network

DENSE = 5000  # parameters of a matrix that is written out


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


@dataclass(frozen=True)
class Curvature:
    """Bounds on the Hessian over a ball."""

    low: float  # a lower bound on its eigenvalues
    high: float  # an upper bound on them
    variation: float  # a bound on its distance from the Hessian at the weights


@dataclass(frozen=True)
class Bound:
    """One of the lower bounds on the Hessian."""

    start: float  # the lower bound at the weights
    meaning: str  # what that number is, in words
    on: Callable[[float], Curvature]  # the bounds on a ball of this radius
    # bounds on the length η and the decrease δ of the Newton step at the weights
    newton: tuple[float, float] = (math.inf, math.inf)


class Regularised:
    """An objective with its ridge."""

    def __init__(self, network: Network, regularizer: Ridge | None) -> None:
        self.network, self.regularizer = network, regularizer
        weights = {p: 0.0 if regularizer is None else regularizer.weight_of(p) for p in network.order}
        self.least, self.most = min(weights.values()), max(weights.values())
        self.diagonal = torch.cat(
            [torch.full((n,), weights[p], dtype=torch.float64) for p, n in network.order.items()]
        )
        self.loss = loss_derivatives(network.objective, network.outputs)

    @cached_property
    def slopes(self) -> tuple[Tensor, float]:
        """The gradient in the order of the parameters, and a bound on the norm of its error."""
        network = self.network
        if network.is_affine and self.loss is not None:
            column = self.loss.gradient.rearranged(lambda t: t.reshape(-1, 1))
            exact = product(network.jacobian.rearranged(lambda t: t.mT), column)
            slope, error = exact.value.reshape(-1), norm_of(exact.error)
        else:
            gradient = proved_gradient(network.whole)
            slope = torch.cat([gradient.slopes[path].reshape(-1) for path in network.order])
            error = up(math.hypot(*(gradient.errors[path] for path in network.order)), len(network.order))
        named = dict(network.model.named_parameters())
        values = torch.cat([named[path].detach().double().reshape(-1) for path in network.order])
        ridge = self.diagonal.to(slope) * values
        slope = slope + ridge
        return slope, up(error + 2.0**-51 * (frobenius_norm(ridge) + frobenius_norm(slope)))

    def gradient(self) -> tuple[float, float]:
        """A lower and an upper bound on the norm of the gradient at the weights."""
        slope, error = self.slopes
        size = frobenius_norm(slope)
        return max(size * (1 - 1e-9) - error, 0.0), up(size * (1 + 1e-12) + error)

    def bounds(self) -> Iterator[Bound]:
        """The lower bounds that this problem has."""
        if self.network.is_affine:
            yield self._normal()
        elif self.network.parameters <= DENSE:
            dense = self._dense()
            if dense is not None:
                yield dense
        if self.least > 0:
            yield self._by_ridge()

    def _normal(self) -> Bound:
        loss, rows = self.loss, self.network.jacobian
        assert loss is not None
        width = loss.hessian.value.shape[1]
        blocks = product(
            loss.hessian.expand(loss.hessian.value.shape), rows.rearranged(lambda t: t.unflatten(0, (-1, width)))
        )
        matrix = product(rows.rearranged(lambda t: t.mT), blocks.rearranged(lambda t: t.flatten(0, 1)))
        return self._written(matrix, 0.0, None)

    def _dense(self) -> Bound | None:
        """The Hessian, written out; ``None`` if an operation has no second derivative with a proved error."""
        together = Whole.of_analysis(self.network.whole, HIGH, keep=True)
        if together is None or together.hessian is None:
            return None
        hessian = together.hessian
        apart: dict[float, float] = {}

        def moved(radius: float) -> float:
            """How far the Hessian anywhere on a ball may be from the matrix."""
            if radius not in apart:
                apart[radius] = float(together.moved(radius) + hessian.error)
            return apart[radius]

        return self._written(Rounded.exact(hessian.matrix), moved(0.0), moved)

    def _written(self, matrix: Rounded, wrong: float, moved: Callable[[float], float] | None) -> Bound:
        """The bound from the Hessian of the loss as written, which is within ``wrong`` of the exact one.

        ``moved`` says how far that on a ball may be from it; ``None`` if the Hessian is the same everywhere.
        """
        matrix = Rounded(matrix.value + torch.diag(self.diagonal.to(matrix.value)), matrix.error)
        value, rounding = matrix.value, 2.0**-52 * (frobenius_norm(matrix.value) + frobenius_norm(self.diagonal))
        symmetric = Rounded(value, matrix.error.expand(value.shape))
        wrong = up(wrong + rounding)
        lowest = smallest_eigenvalue(symmetric)
        highest = largest_eigenvalue(symmetric) if lowest > 0 else math.inf
        start = less(lowest, wrong)
        slope, error = self.slopes
        step = solution(0.5 * (value + value.mT), up(wrong + 2 * norm_of(symmetric.error)), slope, error, start)

        def on(radius: float) -> Curvature:
            away = wrong if moved is None else up(moved(radius) + rounding)
            variation = 0.0 if moved is None else up(away + wrong)
            return Curvature(less(lowest, away), up(highest + away), variation)

        return Bound(start, "the smallest eigenvalue of the Hessian", on, step)

    def _by_ridge(self) -> Bound:
        loss, network = self.loss, self.network
        assert loss is not None
        gradient = loss.gradient.expand(loss.gradient.value.shape)
        wrong = frobenius_norm(gradient.error)
        scalar = network.along(gradient.value.reshape(-1))

        def on(radius: float) -> Curvature:
            bend = network.bending(radius).constant
            if not math.isfinite(bend):
                return Curvature(-math.inf, math.inf, math.inf)
            most = up((frobenius_norm(gradient.value) + wrong) * bend)
            adjoint = scalar_bounds(scalar.over(Ball(radius)))
            if adjoint is not None:
                most = min(most, up(float(nonnegative_norm(adjoint.matrix)) + wrong * bend))
            turned = up(bend * radius)
            steep = up(network.norm + turned)
            bent = up(most + loss.smoothness * steep * radius * bend, 8)
            first = loss.smoothness * (steep + network.norm) * turned
            first += loss.variation * steep * radius * network.norm**2
            high = up(loss.smoothness * steep**2 + bent + self.most, 8)
            return Curvature(less(self.least, bent), high, up(first + 2 * bent, 16))

        return Bound(self.least, "the weight of the ridge", on)


def less(value: float, loss: float) -> float:
    """A difference, rounded down."""
    left = value - loss
    return math.nextafter(left - abs(left) * 2.0**-50, -math.inf) if math.isfinite(left) else -math.inf
