r"""Gauss-Newton from the Gram matrix of the parameters: :math:`(J^\top RR^\top J + M)v = -\nabla F` by Cholesky.

For few parameters. The rows of :math:`R^\top J` come layer by layer (:mod:`surefoot.oracles.gram`), once for all
κ. What is returned is judged by the automatic-differentiation oracle and refined, as in
:mod:`surefoot.oracles.dual_gram`.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from surefoot.oracles.dual import DualSystem
from surefoot.oracles.factor import factor_of
from surefoot.oracles.gram import jacobian
from surefoot.oracles.problem import Problem, Step, reached_status
from surefoot.oracles.symmetric import Symmetric, cholesky

_ROUNDS = 8  # of refinement


class PrimalGram:
    """The Gauss-Newton oracle of a problem for as many κ as one likes.

    Args:
        problem: the objective around a point.
        accumulate: the precision of vectors; that of the model if ``None``.
    """

    def __init__(self, problem: Problem, accumulate: torch.dtype | None = torch.float64) -> None:
        self.problem = problem
        dtype = problem.output.dtype if accumulate is None else accumulate
        self.system = DualSystem(problem, 1.0, accumulate, factor_of(problem, dtype))
        self._factor: Tensor | None = None

    @cached_property
    def _matrix(self) -> Symmetric:
        """JᵀRRᵀJ."""
        rows = jacobian(self.problem, self.system.factor)
        return Symmetric(rows, rows.shape[1]).add(rows)

    def solve(self, kappa: float, tolerance: float) -> Step:
        """The Gauss-Newton oracle for one κ.

        Args:
            kappa: the weight of the proximal term.
            tolerance: of the gradient of the model at the result, relative to that at 0.
        """
        system, before = self.system, self.problem.autodiff.calls
        system.metric = system.space.metric(kappa)
        v = torch.zeros_like(system.gradient)
        change = torch.zeros_like(self.problem.output, dtype=v.dtype)
        if system.scale == 0:
            return Step(system.space.split(v), kappa, 0.0, "the gradient is zero", residual=0.0)
        self._factor = None  # no two of them are held
        factor = self._factor = cholesky(self._damped)
        best = (1.0, v, system.gradient, change)
        rounds = 0
        while best[0] > tolerance and rounds <= _ROUNDS:
            _, v, slope, _ = best
            correction = torch.cholesky_solve(slope[:, None].to(factor.dtype), factor)[:, 0]
            v = v - correction.to(v.dtype)
            change = system.push(v)
            slope = system.slope_at(v, change)
            rounds += 1
            reached = float(slope.norm()) / system.scale
            stalled = not reached < 0.5 * best[0]
            best = min(best, (reached, v, slope, change), key=lambda one: one[0])
            if stalled:
                break
        residual, v, slope, change = best
        self._change = change
        how = "a Cholesky factor of the Gram matrix of the parameters"
        return Step(
            direction=system.space.split(v),
            kappa=kappa,
            model_decrease=system.decrease(v, slope),
            status=reached_status(how, residual, tolerance, rounds),
            solved=residual <= tolerance,
            calls=self.problem.autodiff.calls - before,
            iterations=rounds,
            residual=residual,
            output_change=change,
        )

    def correct(self, secant: Tensor) -> dict[str, Tensor]:
        """The minimiser of ½‖Rᵀ(Ja + c)‖² + ½aᵀMa for c = secant − Jv, with the step v and κ of the last solve."""
        assert self._factor is not None
        slope = self.system.pull(self.system.factor.back(secant.to(self._change) - self._change))
        found = torch.cholesky_solve(slope[:, None].to(self._factor.dtype), self._factor)[:, 0]
        return self.system.space.split(found.neg_())

    def _damped(self) -> Tensor:
        """JᵀRRᵀJ + M, its lower triangle."""
        matrix = self._matrix.lower()
        matrix.diagonal().add_(self.system.metric.to(matrix.dtype))
        return matrix
