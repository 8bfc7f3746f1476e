r"""Gauss-Newton by preconditioned conjugate gradients on the parameters.

The minimiser v of the model of :mod:`surefoot.oracles.dual` solves :math:`(J^\top RR^\top J + M)v = -\nabla F`.
The residual of this system is minus the gradient of the model, so the tolerance is judged by what is at hand, and
:math:`m(v) = -\frac12\langle r - \nabla F, v\rangle`. Each iteration lowers the model in exact arithmetic: however
early one stops, the last point is the best. One iteration is a push-forward and a pull-back. Another κ changes the
residual by :math:`(\kappa - \kappa')v`, which costs no call: so the next solve at the same point starts where the
last one ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.linear_solve import Conjugate, InPlace, norm
from surefoot.oracles.dual import DualSystem
from surefoot.oracles.factor import factor_of
from surefoot.oracles.kronecker import Kronecker
from surefoot.oracles.problem import OracleError, Problem, Step, curved_along, reached_status

LOOSE = 1e-3  # from here on residuals are taken as conjugate gradients update them, in the model's precision
_ROUNDS = 4  # of refinement
_PATIENCE = 50  # iterations without a smaller residual before round-off is taken to be in the way

Precondition = Callable[[Tensor], Tensor]


class Primal:
    """The Gauss-Newton oracle of a problem for as many κ as one likes.

    Args:
        problem: the objective around a point.
        accumulate: the precision of vectors where the tolerance is tight; that of the model if ``None``.
        preconditioner: approximate inverses of the matrix, or ``None``.
    """

    def __init__(
        self,
        problem: Problem,
        accumulate: torch.dtype | None = torch.float64,
        preconditioner: Kronecker | None = None,
    ) -> None:
        self.problem, self.accumulate, self._preconditioner = problem, accumulate, preconditioner
        self._system: DualSystem | None = None
        self._at: tuple[float, Tensor, Tensor] | None = None  # κ, v, minus the gradient of the model
        self._steepest = 0.0

    def solve(self, kappa: float, tolerance: float, most: int | None = None) -> Step:
        """The Gauss-Newton oracle for one κ.

        Args:
            kappa: the weight of the proximal term.
            tolerance: of the gradient of the model at the result, relative to that at 0.
            most: how many iterations are made at most.
        """
        before = self.problem.autodiff.calls
        run = self._begin(kappa, tolerance)
        system, rounds = run.system, 0
        if system.scale == 0:
            return Step(system.space.split(-system.gradient), kappa, 0.0, "the gradient is zero", calls=1)
        most = min(most or 10**9, 10 * self.problem.size + 100)
        inverse, space = self._preconditioner, system.space
        precondition = None
        if inverse is not None:
            precondition = lambda r: space.join(inverse.inverse(kappa, space.split(r)))  # noqa: E731
        while run.iterate(tolerance, most, precondition) and rounds < _ROUNDS:
            rounds += 1
        self._at = kappa, run.v, run.rest
        self._steepest = max(self._steepest, run.steepest)
        reached = space.norm(run.rest) / system.scale
        return Step(
            direction=system.space.split(run.v),
            kappa=kappa,
            model_decrease=max(0.5 * run.gain(run.v, run.rest), 0.0),
            status=_status(reached, tolerance, run.iterations, most, inverse is not None),
            solved=reached <= tolerance,
            calls=self.problem.autodiff.calls - before,
            iterations=run.iterations,
            residual=reached,
            output_change=run.change,
        )

    def resolves(self, part: float) -> bool:
        r"""Whether the residual of the last step, not preconditioned, seems to be right up to this part of ‖∇F‖.

        This is an estimate of round-off, not a bound. It has two terms, and takes rows of J and outputs z to have
        relative errors of :math:`\varepsilon^{3/4}`, far more than usual.

        * In the gradient: with λ the slope of the loss and H its curvature, the error is of the size of
          :math:`\varepsilon^{3/4}(\sum|\lambda_i|\|J_i\| + \sum|z_i|\|J^\top H_i\|)`. The pull-back of λ and Hz
          with random signs in λ and z has the mean square :math:`\sum\lambda_i^2\|J_i\|^2 +
          \sum z_i^2\|J^\top H_i\|^2`; its norm times the root of the number of rows stands for the sum.
        * In the products with v: the same part of ‖A‖‖v‖, and the relative error of H that a product with z
          shows. The largest curvature that conjugate gradients met stands for ‖A‖.
        """
        if self._system is None or self._at is None:
            return False
        system, output, generator = self._system, self.problem.output, torch.Generator().manual_seed(0)
        signs, others = torch.empty(2, *output.shape).bernoulli_(generator=generator).mul_(2).sub_(1).to(output)
        slope, curved = curved_along(self.problem.objective, output, others.mul_(output))
        unit, rows = torch.finfo(output.dtype).eps ** 0.75, output.numel() ** 0.5 / system.scale
        apart = norm(system.factor.curved(others) - curved) / max(norm(curved), 1e-300)
        of_products = (unit + apart) * rows * self._steepest * norm(self._at[1])
        if of_products > part:
            return False
        pulled = self.problem.autodiff.pullback(signs.mul_(slope).add_(curved))
        return of_products + unit * rows * math.hypot(*map(norm, pulled.values())) <= part

    def _begin(self, kappa: float, tolerance: float) -> _Run:
        dtype = None if tolerance >= LOOSE else self.accumulate
        if self._system is None or (dtype is not None and self._system.space.dtype != dtype):
            precision = self.problem.space.dtype if dtype is None else dtype
            factor = factor_of(self.problem, precision, slope=False)  # which only the dual needs
            self._system, self._at = DualSystem(self.problem, kappa, dtype, factor), None
            if dtype is None:
                self.problem.forget_slope()
        system = self._system
        system.metric = system.space.metric(kappa)
        if self._at is not None:
            last, v, rest = self._at
            return _Run(system, v.clone(), torch.add(rest, v, alpha=last - kappa))
        return _Run(system, torch.zeros_like(system.gradient), -system.gradient)


class _Run:
    """Conjugate gradients from a point; a system for :class:`~surefoot.linear_solve.Conjugate`.

    Attributes:
        v: the point.
        rest: minus the gradient of the model there.
        change: Jv, where the tolerance is not loose.
        steepest: the largest ⟨p, Ap⟩/⟨r, z⟩ met, no more than the norm of A where there is no preconditioner.
    """

    def __init__(self, system: DualSystem, v: Tensor, rest: Tensor) -> None:
        self.system, self.v, self.rest = system, v, rest
        self.change: Tensor | None = None
        self.iterations, self.steepest = 0, 0.0
        self._bent: list[Tensor] = []  # PᵀJp of the direction p with PPᵀ = RRᵀ, as long as it is needed

    def gain(self, v: Tensor, rest: Tensor) -> float:
        """Twice the decrease of the model at a point."""
        return self.system.space.dot(rest, v) - self.system.space.dot(self.system.gradient, v)

    def curvature(self, direction: Tensor) -> float:
        """⟨p, Ap⟩, by a push-forward."""
        self._bent = [self.system.factor.halved(self.system.push(direction))]
        size = float(torch.linalg.vector_norm(self._bent[0]))
        curved = size * size + self.system.weighed(direction)
        if not math.isfinite(curved):
            raise OracleError("derivatives are not finite at this point")
        return curved

    def residual(self, before: Tensor, direction: Tensor, length: float) -> Tensor:
        """The residual after a step, by a pull-back."""
        self.steepest = max(self.steepest, 1 / length) if length else self.steepest
        rest = before.clone() if before is direction else before
        rest.addcmul_(self.system.metric, direction, value=-length)
        slope = self.system.factor.completed(self._bent.pop().mul_(-length))  # nobody else holds it
        return self.system.pull_onto(rest, slope)

    def iterate(self, tolerance: float, most: int, precondition: Precondition | None) -> bool:
        """Until the tolerance is met or the iterations are spent; whether it is worth to refine what was reached.

        Where residuals are updated, round-off adds up; so a tight tolerance is judged by the gradient of the model
        as it is defined.
        """
        goal = tolerance * self.system.scale
        length, slack = self.system.space.norm, 64 * torch.finfo(self.rest.dtype).eps
        run = Conjugate(self, self.v, self.rest, InPlace(self.system.space.dot), precondition)
        plain = precondition is None
        size = length(run.residual, run.square if plain else None)
        first, smallest, waited, loose = size, math.inf, 0, tolerance >= LOOSE
        best = (-math.inf, self.v) if loose else (self.gain(self.v, self.rest), self.v.clone())
        while size > goal and self.iterations < most and waited <= _PATIENCE:
            run.step()
            self.iterations += 1
            if not loose and (reached := self.gain(run.x, run.residual)) >= best[0] * (1 - slack):
                best = reached, run.x.clone()
            size = length(run.residual, run.square if plain else None)
            waited, smallest = (0, size) if size < smallest else (waited + 1, smallest)
        self.v, self.rest = best[1], run.residual
        if loose:
            return False
        self.change = self.system.push(self.v)
        self.rest = -self.system.slope_at(self.v, self.change)
        size = length(self.rest)
        return goal < size < 0.5 * first and self.iterations < most


def _status(residual: float, tolerance: float, iterations: int, most: int, preconditioned: bool) -> str:
    how = f"{iterations} iteration{'s' if iterations != 1 else ''} of conjugate gradients on the parameters"
    how += ", preconditioned by Kronecker factors" if preconditioned else ""
    if residual > tolerance and iterations >= most:
        return f"stopped after {how}, as many as were allowed, with a relative residual of {residual:.2g}"
    return reached_status(how, residual, tolerance)
