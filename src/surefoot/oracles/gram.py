r"""Gauss-Newton steps from the rows of the Jacobian, :math:`X = R^\top J`, by a Cholesky factor of the smaller
side.

With the metric :math:`M = \kappa I + \nabla^2r` the step solves :math:`(X^\top X + M)v = -\nabla F`. Either that
matrix is factored, or that of the dual, :math:`S = I + XM^{-1}X^\top`: with :math:`\nabla F = X^\top\bar w + q`
the step is :math:`v = -M^{-1}(q + X^\top z)` where :math:`z = \bar w + Xv`, and for any z the gradient of the
model is :math:`X^\top(\bar w + Xv - z)`; so nothing large cancels. The rows come once for all κ
(:mod:`surefoot.oracles.samples`) and are compared with the gradient. Then products with them take the place of
passes, and a step is refined as long as that halves the gradient of the model.

In the dual, linear layers with one vector per sample, :math:`z_i = Wx_i + b`, are stored as factors: inner
products of their rows are :math:`\langle G_{ij}, G_{i'j'}\rangle\langle x_i, x_{i'}\rangle`. A product with S
then costs far less than one with X, so conjugate gradients on S come first, until they have cost as much as its
factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from surefoot.linear_solve import Conjugate, Flat, Products, norm
from surefoot.oracles.gauss_newton import Model
from surefoot.oracles.problem import Problem, Step
from surefoot.oracles.samples import Outer, rows_of

Side = Literal["parameters", "dual"]
_ROUNDS = 8  # of refinement
_BLOCK = 32  # samples in a block of rows of a Gram matrix
_AIM = 0.5  # of the tolerance at which conjugate gradients aim
_APART = 1e-3  # of a gradient in single precision, that from rows and that by a pull-back


class Gram:
    """The minimiser of the Gauss-Newton model of a problem for as many κ as one likes.

    Args:
        problem: the objective around a point, of one batch.
        side: of which matrix the Cholesky factor is.
    """

    def __init__(self, problem: Problem, side: Side) -> None:
        self._calls = problem.autodiff.calls
        self.problem, self.side, self.model = problem, side, Model(problem)
        self.rows = rows_of(problem, self.model.factor, outers=side == "dual")
        # the gradient is Xᵀw̄, where there is such a w̄, and what no row contributes to
        start, ridge = self.model.factor.slope, {p: problem.weight(p) * u for p, u in problem.parameters.items()}
        self._fixed = self.model.gradient if start is None else problem.join(ridge)
        self._start = self._fixed.new_zeros(self.rows.shape) if start is None else start
        if not self._agrees():
            self.rows = rows_of(problem, self.model.factor, whole=True)
        self._slopes = torch.cat(
            [outer.slopes for outer in self.rows.outers] or [self.rows.dense[None, :, :0]], dim=2
        )
        self._matrix: Tensor | None = None  # XᵀX
        self._factor: Tensor | None = None

    def solve(self, kappa: float, tolerance: float, most: int | None = None) -> Step:
        """The minimiser for one κ, up to a residual relative to the gradient."""
        model, before = self.model, self._calls
        model.damped(kappa)
        if model.scale == 0:
            return model.at_rest()
        self._factor, self.iterations = None, 0  # no two factors are stored
        self._kernels = [self._kernel(outer) for outer in self.rows.outers]
        self._goal = tolerance * model.scale
        v, slope, rounds = torch.zeros_like(model.gradient), model.gradient, 0
        z, rest = torch.zeros_like(self._start), self._start
        if self.side == "dual" and bool(self._fixed.any()):
            v = -self._fixed / model.metric
            rest = rest + self._push(v)
        while norm(slope) > self._goal and rounds <= _ROUNDS:
            if self.side == "dual":
                change = self._dual(rest)
                z, trial = z + change, v - self._pull(change) / model.metric
                rest = self._start + self._push(trial) - z
                left = self._pull(rest)
            else:
                trial = v - self._primal(slope)
                left = self._pull(self._push(trial)).add_(model.gradient).addcmul_(model.metric, trial)
            rounds, halved = rounds + 1, norm(left) < 0.5 * norm(slope)
            if norm(left) < norm(slope) or rounds == 1:
                v, slope = trial, left
            if not halved:
                break
        if not self.is_factored:
            how = f"{self.iterations} iterations of conjugate gradients on the Gram matrix of the dual"
        else:
            how = f"a Cholesky factor of the Gram matrix of the {self.side}"
        how += f" and {rounds - 1} rounds of refinement" if rounds > 1 else ""
        step = model.step(v, slope, tolerance, how, max(rounds, self.iterations))
        self._calls = self.problem.autodiff.calls
        return replace(step, calls=self._calls - before)

    def correct(self, v: Tensor, secant: Tensor) -> Tensor:
        """The minimiser of ½‖Rᵀ(Ja + c)‖² + ½aᵀMa for c = secant − Jv, with the κ of the last solve."""
        bent = self.model.factor.back(secant.to(v.dtype)) - self._push(v)
        if self.side == "dual":  # (XᵀX + M)⁻¹Xᵀ = M⁻¹XᵀS⁻¹
            return -self._pull(self._dual(bent)) / self.model.metric
        return -self._primal(self._pull(bent))

    def _primal(self, right: Tensor) -> Tensor:
        """The solution of (XᵀX + M)v = b by the factor."""
        if self._factor is None:
            self._factor = _cholesky(self._damped())
        return torch.cholesky_solve(right[:, None].to(self._factor.dtype), self._factor)[:, 0].to(right.dtype)

    @property
    def is_factored(self) -> bool:
        """Whether a factor was needed for the last κ."""
        return self._factor is not None

    def _push(self, v: Tensor) -> Tensor:
        """Xv, samples × columns."""
        return self.rows.push(self.problem.split(v)).to(v.dtype)

    def _pull(self, z: Tensor) -> Tensor:
        """Xᵀz."""
        return self.problem.join(self.rows.pull(z.to(self.rows.dense.dtype), self.problem.parameters))

    def _agrees(self) -> bool:
        """Whether the rows give the gradient of the loss, or another sum of all of them."""
        problem, slope = self.problem, self.model.factor.slope
        if slope is None:
            slope = torch.randn(self.rows.shape, generator=torch.Generator().manual_seed(0)).to(self._fixed)
            expected = self.model.pull(self.model.factor.forth(slope))
        else:
            expected = self.model.gradient - self._fixed
        unit = torch.finfo(problem.output.dtype).eps ** 0.5
        lengths = norm(self.rows.dense) + sum(norm(o.slopes) * norm(o.x) for o in self.rows.outers)
        apart, size = norm(self._pull(slope) - expected), norm(self._pull(slope.abs())) + norm(expected)
        return apart <= unit * (size + unit * lengths * norm(slope))

    def _damped(self) -> Tensor:
        """XᵀX + M."""
        if self._matrix is None:
            self._matrix = self.rows.dense.T @ self.rows.dense
        matrix = self._matrix.clone()
        matrix.diagonal().add_(self.model.metric.to(matrix.dtype))
        return matrix

    def _weight(self, path: str | None) -> float:
        return self.model.kappa + (0.0 if path is None else self.problem.weight(path))

    def _kernel(self, outer: Outer) -> Tensor:
        """⟨x_i, x_i'⟩, with 1 for the bias, each over the metric of its parameter: samples × samples."""
        kernel = outer.x @ outer.x.T / self._weight(outer.weight)
        return kernel if outer.bias is None else kernel + 1.0 / self._weight(outer.bias)

    def _apply(self, z: Tensor) -> Tensor:
        """XM⁻¹Xᵀz, samples × columns: 2n² + 4nc operations per output of a layer that is stored as factors."""
        rows, flat = self.rows, z.reshape(-1)
        result = torch.zeros_like(z)
        if rows.paths:
            pulled = (flat @ rows.dense) / self._dense_metric()
            result += (rows.dense @ pulled).view_as(z)
        if rows.outers:
            pulled = torch.bmm(z.unsqueeze(1), self._slopes).squeeze(1)
            parts = pulled.split([outer.slopes.shape[2] for outer in rows.outers], dim=1)
            mixed = torch.cat([kernel @ part for kernel, part in zip(self._kernels, parts, strict=True)], dim=1)
            result += torch.bmm(self._slopes, mixed.unsqueeze(2)).squeeze(2)
        return result

    def _dense_metric(self) -> Tensor:
        """The metric of the parameters whose rows are stored."""
        like = self.rows.dense
        weights = like.new_tensor([self._weight(path) for path in self.rows.paths])
        if bool((weights == weights[0]).all()):
            return weights[0]
        sizes = [self.problem.parameters[path].numel() for path in self.rows.paths]
        return weights.repeat_interleave(torch.tensor(sizes, device=like.device))

    def _dual(self, right: Tensor) -> Tensor:
        r"""The solution of Sz = r.

        Conjugate gradients stop where the residual s has :math:`\|M^{-1/2}X^\top s\|^2 = s^\top(S - I)s` small
        enough for the tolerance. It is known without a product with s: the search directions satisfy :math:`s = p
        - \beta p'` and are conjugate, so :math:`s^\top Ss = p^\top Sp + \beta^2p'^\top Sp'`.
        """
        if self._factor is None:
            aim = _AIM * self._goal / float(self.model.metric.max()) ** 0.5
            run = Conjugate(
                Products(lambda z: self._apply(z).add_(z), Flat()), torch.zeros_like(right), right, Flat()
            )
            for _ in range(self._worth()):
                curved = run.look() if run.square else 0.0
                self.iterations += 1
                if max(curved + run.beta**2 * run.before - run.square, 0.0) <= aim**2:
                    return run.x
                run.step()
            self._factor = _cholesky(self._formed())
        z, rest = torch.zeros_like(right), right
        for _ in range(2):  # the second time removes round-off in single precision
            column = rest.reshape(-1, 1).to(self._factor.dtype)
            z = z + torch.cholesky_solve(column, self._factor).to(right.dtype).view_as(right)
            rest = right - z - self._apply(z)
        return z

    def _worth(self) -> int:
        """How many iterations of conjugate gradients cost as much as forming and factoring S.

        Operations are counted; those of an iteration count twice, for they are made in small portions, and those
        of a product of a matrix and a vector eight times, for they wait for memory.
        """
        n, c = self.rows.shape
        d, features, columns = n * c, sum(o.slopes.shape[2] for o in self.rows.outers), self.rows.dense.shape[1]
        forming = d * d * (1.5 * features + columns) + d**3 / 3
        return int(forming / (2 * features * (4 * d + 2 * n * n) + 8 * 4 * d * columns + 1e6))

    def _formed(self) -> Tensor:
        """S, its lower triangle."""
        n, c = self.rows.shape
        scaled = self.rows.dense / self._dense_metric().sqrt() if self.rows.paths else self.rows.dense
        total = scaled @ scaled.T
        for outer, kernel in zip(self.rows.outers, self._kernels, strict=True):
            flat = outer.slopes.reshape(n * c, -1)
            for first in range(0, n, _BLOCK):
                last = min(first + _BLOCK, n)
                block = (flat[first * c : last * c] @ flat[: last * c].T).view(last - first, c, last, c)
                block *= kernel[first:last, :last].view(last - first, 1, last, 1)
                total[first * c : last * c, : last * c] += block.view(-1, last * c)
        total.diagonal().add_(1.0)
        return total


def _cholesky(matrix: Tensor) -> Tensor:
    """The Cholesky factor, in double precision if its own is not enough."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not int(failed):
        return factor
    unit, matrix = torch.finfo(matrix.dtype).eps, matrix.double()
    matrix.diagonal().add_(unit * float(matrix.diagonal().sum()))
    return torch.linalg.cholesky(matrix)
