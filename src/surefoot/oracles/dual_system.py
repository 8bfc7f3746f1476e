"""The dual of the Gauss-Newton model as a linear system, and what its solution says about the model.

The notation is that of :mod:`surefoot.oracles.dual`, where the system is derived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.oracles.factor import Factor, factor_of
from surefoot.oracles.problem import OracleError, Problem
from surefoot.oracles.space import ParameterSpace


class DualSystem:
    """S as an operator, and what its solution says about the primal problem.

    Args:
        problem: the objective around a point.
        kappa: the weight of the proximal term.
        accumulate: the precision of the vectors; that of the parameters if ``None``.
        factor: R, if it is known already.

    Attributes:
        gradient: ∇F(u), as a vector.
        scale: its norm.
        calls: how often the automatic-differentiation oracle was called since the system was made.
    """

    def __init__(
        self, problem: Problem, kappa: float, accumulate: torch.dtype | None = None, factor: Factor | None = None
    ) -> None:
        self.problem, self.kappa = problem, kappa
        self.space = ParameterSpace(problem, accumulate)
        self.factor = factor_of(problem, self.space.dtype) if factor is None else factor
        self.metric = self.space.metric(kappa)
        self._calls_before = problem.autodiff.calls
        self.gradient = self.space.gradient()
        self.scale = float(self.gradient.norm())
        ridge = problem.regularizer
        self._regulariser = None if ridge is None else self.space.join(ridge.gradient(problem.parameters))

    @property
    def calls(self) -> int:
        """How often the automatic-differentiation oracle was called since the system was made."""
        return self.problem.autodiff.calls - self._calls_before

    def pull(self, z: Tensor) -> Tensor:
        """JᵀRz, a vector of parameters, for z of samples × columns: one call."""
        slope = self.factor.forth(z).to(self.problem.output.dtype)
        return self.space.join(self.problem.autodiff.pullback(slope))

    def push(self, v: Tensor) -> Tensor:
        """Jv, of the shape of the output: one call."""
        return self.problem.autodiff.pushforward(self.space.split(v)).to(self.space.dtype)

    def start(self, warm_start: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        r"""A first w, v(w), and Jv if it is known without a call.

        A guess of Jv gives :math:`w = R^\top Jv`. Without one and without a regulariser, w = −w̄ with
        :math:`R\bar w = g` has v = 0, the start of least calls: there :math:`J^\top Rr = J^\top R\bar w = \nabla
        F`. Else w = 0, :math:`v = v_0`.

        Raises:
            OracleError: if the guess has not the shape of the output.
        """
        if warm_start is None and self.problem.regularizer is None and self.factor.slope is not None:
            change = torch.zeros_like(self.problem.output, dtype=self.space.dtype)
            return -self.factor.slope, torch.zeros_like(self.gradient), change
        v = -self.gradient / self.metric
        if warm_start is None:
            return v.new_zeros(self.factor.samples, self.factor.columns), v, None
        if warm_start.shape != self.factor.shape:
            expected, given = tuple(self.factor.shape), tuple(warm_start.shape)
            raise OracleError(f"a warm start has the shape of the output, {expected}, got {given}")
        w = self.factor.back(warm_start.to(v))
        return w, self.primal(w), None

    def primal(self, w: Tensor) -> Tensor:
        """v(w): one call."""
        return (self.gradient + self.pull(w)).div_(self.metric).neg_()

    def square(self, pulled: Tensor) -> float:
        """⟨x, M⁻¹x⟩ for a vector of parameters."""
        if self.metric.dim() == 0:
            return float(torch.linalg.vector_norm(pulled, dtype=torch.float64)) ** 2 / float(self.metric)
        return float((pulled * pulled / self.metric).sum())

    def descend(self, v: Tensor, pulled: Tensor, length: float) -> None:
        """v − length·M⁻¹x, in place of v."""
        if self.metric.dim() == 0:
            v.add_(pulled, alpha=-length / float(self.metric))
        else:
            v.addcdiv_(pulled, self.metric, value=-length)

    def slope_at(self, v: Tensor, change: Tensor) -> Tensor:
        """The gradient of the model at v, from its definition: one call."""
        output = self.problem.output
        curved = self.problem.slope + self.factor.forth(self.factor.back(change)).to(output.dtype)
        found = self.space.join(self.problem.autodiff.pullback(curved)).addcmul_(self.metric, v)
        return found if self._regulariser is None else found.add_(self._regulariser)

    def decrease(self, v: Tensor, slope: Tensor) -> float:
        """−m(v), from the gradient of the model at v."""
        return max(-0.5 * float(torch.dot(self.gradient, v) + torch.dot(slope, v)), 0.0)


__all__ = ["DualSystem"]
