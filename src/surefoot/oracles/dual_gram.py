r"""Gauss-Newton from the Gram matrix of the dual problem.

The system :math:`Sw = R^\top Jv_0` of :mod:`surefoot.oracles.dual`, with :math:`S = I + R^\top JM^{-1}J^\top R`
assembled layer by layer (:mod:`surefoot.oracles.gram`). A linear layer on one vector per sample is kept as the two
factors of its part, and a product with S costs far less than a pull-back and a push-forward. So conjugate
gradients on it come first; once they have cost as much as a Cholesky factor of S, that is formed: so at most twice
what the better of the two would have cost.

S is assembled and solved in the precision of the model, and w is corrected by the solution of
:math:`S\delta = r`, :math:`r = R^\top Jv - w`, until the tolerance is met or round-off stops it (iterative
refinement). What is returned is judged by the automatic-differentiation oracle: the gradient of the model at v is
evaluated from its definition. Where the tolerance is loose, or the step is measured in double precision later,
the residual of the last system says when to stop: that saves these passes.

The parts of S do not depend on κ, so other values of κ cost no further assembling.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.linear_solve import Conjugate, Flat, Products
from surefoot.oracles.dual import DualSystem, solve_dual
from surefoot.oracles.factor import Factor, factor_of
from surefoot.oracles.gram import Gram, assemble
from surefoot.oracles.gram_pieces import assemble_pieces
from surefoot.oracles.primal import LOOSE
from surefoot.oracles.problem import Problem, Step, reached_status
from surefoot.oracles.symmetric import cholesky

_ROUNDS = 8  # of refinement
_FRACTION = 0.5  # of the tolerance that conjugate gradients aim at, so that the measured residual is below it


class DualGram:
    """The Gauss-Newton oracle of a problem for as many κ as one likes.

    Args:
        problem: the objective around a point.
        accumulate: the precision of vectors of parameters and of residuals; that of the model if ``None``.
    """

    def __init__(self, problem: Problem, accumulate: torch.dtype | None = torch.float64) -> None:
        self.problem, self.accumulate = problem, accumulate
        self._last: tuple[DualSystem, _Matrix, float, Tensor] | None = None  # with w

    @cached_property
    def factor(self) -> Factor:
        """The factor R of the curvature of the loss."""
        dtype = self.problem.output.dtype if self.accumulate is None else self.accumulate
        return factor_of(self.problem, dtype)

    @cached_property
    def gram(self) -> Gram | None:
        """The Gram matrix; ``None`` where it is too large."""
        return (assemble_pieces if self.problem.in_pieces else assemble)(self.problem, self.factor)

    def solve(self, kappa: float, tolerance: float, warm_start: Tensor | None = None, judged: bool = True) -> Step:
        """The Gauss-Newton oracle for one κ.

        Args:
            kappa: the weight of the proximal term.
            tolerance: of the gradient of the model at the result, relative to that at 0.
            warm_start: a guess of Jv, of the shape of the output.
            judged: whether the residual of the result is measured by passes where the tolerance is not loose; if
                not, vectors of parameters are in the precision of the model.
        """
        before, self._last = self.problem.autodiff.calls, None  # no two Cholesky factors are held
        system = DualSystem(self.problem, kappa, self.accumulate if judged else None, self.factor)
        if self.gram is None:
            return solve_dual(self.problem, kappa, tolerance, self.accumulate, warm_start)
        w, v, known = system.start(warm_start)
        change = system.push(v) if known is None else known
        matrix = _Matrix(self.problem, self.factor, self.gram, kappa)
        passes, rounds, largest = judged and tolerance < LOOSE, 0, float(system.metric.max()) ** 0.5
        aim = _FRACTION * tolerance * system.scale / largest
        best: tuple[Any, ...] = (float("inf") if system.scale > 0 else 0.0, v, w, None, change)
        halved = True
        while best[0] > tolerance and halved and rounds <= _ROUNDS:
            change = system.push(v) if rounds and not passes else change
            r = self.factor.back(change) - w
            correction, rest = matrix.solve(r.to(self.problem.output.dtype), aim)
            w = w + correction.to(w)
            v = system.pull(correction.to(w)).div_(system.metric).neg_().add_(v)
            residual, slope = rest * largest / system.scale, None
            if passes:
                change = system.push(v)
                slope = system.slope_at(v, change)
                residual = float(slope.norm()) / system.scale
            halved, rounds = residual < 0.5 * best[0], rounds + 1
            best = min(best, (residual, v, w, slope, change if passes else None), key=lambda found: found[0])
        residual, v, w, slope, change = best
        self._last = system, matrix, aim, w
        return Step(
            direction=system.space.split(v),
            kappa=kappa,
            model_decrease=system.decrease(v, slope),
            status=reached_status(matrix.how, residual, tolerance, rounds),
            solved=residual <= tolerance,
            calls=self.problem.autodiff.calls - before,
            iterations=matrix.iterations,
            residual=residual,
            output_change=change,
        )

    def correct(self, secant: Tensor) -> dict[str, Tensor]:
        """The minimiser of ½‖Rᵀ(Ja + c)‖² + ½aᵀMa for c = secant − Jv, with the step v and κ of the last solve.

        It is −M⁻¹JᵀRz with Sz = Rᵀc, as for the step itself.
        """
        if self._last is None:  # the matrix is too large
            return {path: torch.zeros_like(value) for path, value in self.problem.parameters.items()}
        system, matrix, aim, rows = self._last
        bent = self.factor.back(secant.to(rows)) - rows
        z = matrix.solve(bent.to(self.problem.output.dtype), aim)[0].to(rows)
        return system.space.split(system.pull(z).div_(system.metric).neg_())


class _Matrix:
    """S for one κ: products, and solutions of linear systems."""

    def __init__(self, problem: Problem, factor: Factor, gram: Gram, kappa: float) -> None:
        def inverse(path: str) -> float:
            return 1.0 / (kappa + problem.weight(path))

        self._outers, dtype = gram.outers, problem.output.dtype
        self._kernels = [layer.kernel(inverse, dtype) for layer in gram.outers.layers] if gram.outers else []
        self._dense = [(1.0 / (kappa + weight), matrix) for weight, matrix in gram.dense.items()]
        self._size = factor.samples * factor.columns
        self._cholesky: Tensor | None = None
        self.iterations = 0

    @property
    def how(self) -> str:
        """How systems were solved, in words."""
        if self._cholesky is not None:
            return "a Cholesky factor of the Gram matrix of the dual"
        return f"{self.iterations} iterations of conjugate gradients on the Gram matrix of the dual"

    def apply(self, z: Tensor) -> Tensor:
        """(S − I)z, for z of samples × columns."""
        parts = [(matrix @ z.reshape(-1)).mul_(scale).view_as(z) for scale, matrix in self._dense]
        if self._outers is not None:
            parts.append(self._outers.apply(self._kernels, z))
        return sum(parts[1:], parts[0]) if parts else torch.zeros_like(z)

    def solve(self, r: Tensor, aim: float) -> tuple[Tensor, float]:
        r"""An approximate solution δ of Sδ = r, and :math:`(s^\top(S - I)s)^{1/2}` for its residual s.

        Conjugate gradients stop where the residual s of this system has :math:`s^\top(S - I)s \le \text{aim}^2`.
        That is :math:`\|M^{-1/2}J^\top Rs\|^2`, so the gradient of the model is at most :math:`\max M^{1/2}`
        times aim. It is known without a product with s: the search directions satisfy :math:`s = p - \beta p'`
        and are conjugate, so :math:`s^\top Ss = p^\top Sp + \beta^2p'^\top Sp'`.
        """
        if self._cholesky is not None:
            return self._by_factor(r, aim)
        run = Conjugate(Products(lambda z: self.apply(z).add_(z), Flat()), torch.zeros_like(r), r, Flat())
        for _ in range(self._worth()):
            if run.square == 0:
                return run.x, 0.0
            curved = run.look()
            self.iterations += 1
            reached = max(curved + run.beta**2 * run.before - run.square, 0.0)
            if reached <= aim**2:
                return run.x, reached**0.5
            run.step()
        self._cholesky = cholesky(lambda: self._formed(r))
        return self._by_factor(r, aim)

    def _worth(self) -> int:
        """How many iterations of conjugate gradients cost as much as forming and factoring S.

        Operations are counted; those of an iteration count twice, for they are made in small portions, and those
        of a product of a matrix and a vector eight times, for they wait for memory.
        """
        d = self._size
        samples, _, features = self._outers.slopes.shape if self._outers else (0, 0, 0)
        forming = 1.5 * d * d * features + d**3 / 3
        iteration = 2 * features * (4 * d + 2 * samples**2) + 8 * 2 * d * d * len(self._dense) + 1e6
        return int(forming / iteration)

    def _formed(self, like: Tensor) -> Tensor:
        """S, its lower triangle."""
        total = like.new_zeros(self._size, self._size)
        for scale, matrix in self._dense:
            matrix.lower(scale, onto=total)
        if self._outers is not None:
            self._outers.add_to(total, self._kernels)
        total.diagonal().add_(1.0)
        return total

    def _by_factor(self, r: Tensor, aim: float) -> tuple[Tensor, float]:
        """By the factor, and by the factor again for what that left, as long as this halves it."""
        x, rest, before = torch.zeros_like(r), r, float("inf")
        while True:
            x = x + self._divided(rest)
            rest = r - x - self.apply(x)
            reached = max(float((rest * self.apply(rest)).sum()), 0.0) ** 0.5
            if reached <= aim or not reached < 0.5 * before:
                return x, reached
            before = reached

    def _divided(self, r: Tensor) -> Tensor:
        assert self._cholesky is not None
        column = r.reshape(-1, 1).to(self._cholesky.dtype)
        half = torch.linalg.solve_triangular(self._cholesky, column, upper=False)
        return torch.linalg.solve_triangular(self._cholesky.mT, half, upper=True).to(r.dtype).view_as(r)
