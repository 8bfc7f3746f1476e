r"""Derivatives of minimisers with proved errors.

With :math:`g = \nabla_\beta\zeta` as a graph of operations (:mod:`surefoot.implicit.derived`), :math:`H =
\partial_\beta g` and the declared :math:`\mu`, so :math:`H \succeq \mu I`:

* the computed :math:`\hat\beta` is within :math:`\epsilon = \|g(\alpha, \hat\beta)\|/\mu` of the minimiser,
  round-off of g included. All that follows is bounded over the ball of this radius, in which the minimiser lies;
* *pulled back*, a costate :math:`\lambda` becomes :math:`-(\partial_\alpha g)^\top H^{-1}\lambda`. Whatever q is,
  :math:`\|H^{-1}\lambda - q\| \le \|\lambda - Hq\|/\mu`. The costates of :math:`\langle q, g\rangle` in
  :math:`\beta` and :math:`\alpha` are :math:`Hq` and :math:`(\partial_\alpha g)^\top q`, and one pass back finds
  both with their errors (:mod:`surefoot.calculus.adjoint.costates`). The error of the result is that of the second
  and :math:`\ell_\alpha\|\lambda - Hq\|/\mu`;
* *pushed forward*, a tangent :math:`\tau` becomes :math:`-H^{-1}w`, :math:`w = \partial_\alpha g[\tau]`, and is
  off by :math:`\|w - Hq\|/\mu` if q is taken for :math:`H^{-1}w`.

The solver that finds q need not be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.calculus.adjoint.backward import backward
from surefoot.calculus.adjoint.costates import costates
from surefoot.calculus.adjoint.gradient import push
from surefoot.calculus.forward import Pass
from surefoot.enclosure import constant, norm
from surefoot.implicit.constants import BETA
from surefoot.implicit.derived import Gradient, in_graph
from surefoot.implicit.problem import Problem, Tensors
from surefoot.implicit.solvers import inverse_product
from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import eigenvalue_bounds, times_power
from surefoot.operations.pushing import Pushed
from surefoot.scalar import Rounded

_UP = 1 + 2.0**-40


@dataclass(frozen=True)
class Minimum:
    """The gradient of an inner problem at computed minimisers, over a ball that contains the exact ones."""

    problem: Problem  # the problem
    values: Tensors  # its tensors
    beta: Tensor  # the computed minimisers, rows × size
    mu: float  # a lower bound on the strong convexity
    result: Pass  # the forward pass through the gradient, with centre values
    error: Magnitude  # a bound on the distance between the computed and the exact minimisers, all rows together

    @classmethod
    def of(cls, problem: Problem, values: Tensors, beta: Tensor, mu: float) -> Minimum:
        """The gradient at computed minimisers; refused if one of its operations has no rule."""
        tensors = [constant(value, 1) for value in values]
        gradient = Gradient.of(problem, tensors, [value.is_floating_point() for value in values], beta.device)
        slope = gradient.result(gradient.around(beta, keep=True))
        error = (norm(slope.value) + slope.error) / mu
        return cls(problem, values, beta, mu, gradient.around(beta, error, keep=True, error=error), error)

    def pulled(self, costate: Tensor) -> dict[str, Rounded] | None:
        """A costate of the minimisers pulled back, by name of the tensor; ``None`` if nothing is proved."""
        right = costate.reshape(self.beta.shape).double()
        q = inverse_product(self.problem, self.beta, self.values, right)
        size = float(torch.linalg.vector_norm(q))
        power = math.frexp(size)[1] + 1 if 0 < size < math.inf else 0
        slopes = self._slopes(times_power(q, -power))
        if slopes is None:
            return None
        left = norm(times_power(right, -power) - slopes[BETA].value) * _UP + norm(slopes[BETA].error)
        lengths = self.result.enclosures[self.result.outputs[0]].lipschitz
        pulled = {}
        for k, name in enumerate(self.result.region.variables[:-1]):
            error = norm(slopes[name].error) + lengths[k] * left / self.mu
            value = times_power(-slopes[name].value, power)
            pulled[name] = Rounded(value, torch.full_like(value, float(error * 2.0**power)))
        return pulled

    def _slopes(self, q: Tensor) -> dict[str, Rounded] | None:
        """The gradient of ⟨q, g⟩ in all variables, for q of norm at most 1; errors are norms over all entries."""
        at = backward(self.result, q)
        if at is None:
            return None
        at_nodes = costates(self.result, at)
        slopes = {}
        for name in self.result.region.variables:
            value = self.result.enclosures[name].value
            if name in at_nodes:
                slopes[name] = Rounded(at_nodes[name].value, value.new_full((), float(at_nodes[name].spread)))
            else:
                slopes[name] = Rounded.exact(torch.zeros_like(value))
        return slopes

    def pushed(self, tangents: Mapping[str, Tensor]) -> Pushed | None:
        """The derivative of the minimisers along tangents of the tensors of the problem, by name."""
        output = self.result.outputs[0]
        moves = {in_graph(name): tangent.double() for name, tangent in tangents.items()}
        slope = push(self.result, moves, output)
        if slope is None:
            return None
        q = inverse_product(self.problem, self.beta, self.values, slope.value)
        again = push(self.result, {BETA: q}, output)
        if again is None:
            return None
        left = norm(slope.value - again.value) * _UP + slope.error + again.error
        return Pushed(-q, left / self.mu)

    def least_curvature(self) -> float:
        """A lower bound on the eigenvalues of all Hessians over the ball; minus infinity if there is none.

        H is computed column by column with errors; then the largest eigenvalue of cI - H is bounded, with c at
        least the norm of H.
        """
        columns, wrong = [], Magnitude.zero()
        for k in range(self.problem.size):
            seed = torch.zeros_like(self.beta)
            seed[:, k] = 2.0 ** -math.ceil(math.log2(len(seed)) / 2)
            slopes = self._slopes(seed)
            if slopes is None:
                return -math.inf
            columns.append(slopes[BETA].value / seed[0, k])
            wrong = wrong + (norm(slopes[BETA].error) / float(seed[0, k])) ** 2
        hessian = torch.stack(columns, dim=-1)
        hessian = 0.5 * (hessian + hessian.mT)
        top = float(torch.linalg.matrix_norm(hessian).max()) * 2
        if not 0 < top < math.inf:
            return -math.inf
        shifted = top * torch.eye(self.problem.size, dtype=hessian.dtype, device=hessian.device) - hessian
        rounded = 4 * self.problem.size * top * 2.0**-53
        return top - float(eigenvalue_bounds(shifted).max()) - rounded - float(wrong.sqrt())
