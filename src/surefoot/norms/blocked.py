r"""A symmetric matrix by panels of rows, its Cholesky factor, and how far the product of the factor is from it.

Rows of the matrix are computed with bounds on the errors of their entries, panel by panel. Only lower triangles of
:math:`4n^2` bytes are stored (400 MB for 10,000 rows): the matrix and its errors where it is kept, and two factors
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from surefoot.norms.hermitian import gamma, product_error, up
from surefoot.scalar import Rounded

_PANEL = 512
_SWEEPS = 60


@dataclass(frozen=True, eq=False)
class Symmetric:
    """A symmetric matrix by panels of rows."""

    size: int  # the number of rows
    # rows from one number to another, columns up to the second: the lower triangle, and a little more
    rows: Callable[[int, int], Rounded]
    panel: int = _PANEL  # the number of rows that are computed together

    @staticmethod
    def dense(matrix: Rounded) -> Symmetric:
        """The symmetric matrix with the lower triangle of a matrix."""
        value, error = matrix.value, matrix.error.expand(matrix.value.shape)

        def rows(start: int, stop: int) -> Rounded:
            return Rounded(value[start:stop, :stop], error[start:stop, :stop])

        return Symmetric(len(value), rows)

    def __neg__(self) -> Symmetric:
        return Symmetric(self.size, lambda start, stop: -self.rows(start, stop), self.panel)

    def panels(self) -> Iterator[tuple[int, int, Rounded]]:
        """First row, last row and rows."""
        for start in range(0, self.size, self.panel):
            stop = min(start + self.panel, self.size)
            rows = self.rows(start, stop)
            yield start, stop, rows.expand(rows.value.shape)

    @cached_property
    def size_and_error(self) -> tuple[float, float]:
        """About the trace of absolute values, and a bound on the norm of the error, by rows or Frobenius."""
        sums, squares, trace = torch.zeros(self.size, dtype=torch.float64), 0.0, 0.0
        for start, stop, rows in self.panels():
            lower = rows.error.tril(start)
            sums[start:stop] += lower.sum(1)
            sums[:stop] += lower.tril(start - 1).sum(0)
            squares += float(lower.square().sum())
            trace += float(rows.value[:, start:].diagonal().abs().sum())
        most = min(float(sums.max()), math.sqrt(2 * squares)) if self.size else 0.0
        return trace, up(most * (1 + gamma(self.size**2 + 16)), 8) if math.isfinite(squares) else math.inf

    def shifted(self, shift: float) -> Iterator[tuple[int, int, Tensor]]:
        """The panels of the matrix minus a multiple of the identity, rounded once on the diagonal."""
        for start, stop, rows in self.panels():
            value = rows.value.clone()
            value[:, start:].diagonal().sub_(shift)
            yield start, stop, value

    @cached_property
    def plain(self) -> Factor | None:
        """The factor of the matrix itself, for guesses."""
        return self.factor(0.0)

    def factor(self, shift: float) -> Factor | None:
        """The factor of the matrix minus a multiple of the identity; ``None`` if it is not positive definite."""
        rows: list[Tensor] = []
        for start, _, value in self.shifted(shift):
            row = torch.zeros_like(value)
            for k, other in enumerate(rows):
                first, last = k * self.panel, k * self.panel + len(other)
                left = value[:, first:last] - row[:, :first] @ other[:, :first].mT
                row[:, first:last] = torch.linalg.solve_triangular(
                    other[:, first:].mT, left, upper=True, left=False
                )
            corner, failed = torch.linalg.cholesky_ex(value[:, start:] - row[:, :start] @ row[:, :start].mT)
            row[:, start:] = corner
            if int(failed) or not bool(torch.isfinite(row).all()):
                return None
            rows.append(row)
        return Factor(rows)

    def apart(self, factor: Factor, shift: float) -> float:
        r"""A bound on :math:`\|RR^\top - (\hat A - sI)\|`, whatever R is.

        :math:`M = \mathrm{fl}(\hat A - sI)` is off by at most :math:`2u\max_i|M_{ii}|`, and
        :math:`\mathrm{fl}(RR^\top)` by :math:`c|R||R|^\top`, of norm at most :math:`c\|R\|_F^2`. The residual is
        symmetric, so its Frobenius norm is at most :math:`\sqrt2` times that of its lower triangle.
        """
        total, squares, largest = 0.0, 0.0, 0.0
        for (start, _, value), row in zip(self.shifted(shift), factor.rows, strict=True):
            largest = max(largest, float(value[:, start:].diagonal().abs().max()))
            squares += float(row.square().sum())
            for k, other in enumerate(factor.rows[: start // self.panel + 1]):
                first, last = k * self.panel, k * self.panel + len(other)
                left = row[:, :last] @ other.mT - value[:, first:last]
                total += float((left.tril() if first == start else left).square().sum())
        rounded = 4 * 2.0**-53 * largest + math.sqrt(total) * 2.0**-50
        wrong = math.sqrt(2 * total) + product_error(self.size) * squares + rounded
        return up(wrong * (1 + gamma(self.size**2 + 16)), 8) if math.isfinite(wrong) else math.inf

    def times(self, vector: Tensor) -> Rounded:
        r"""A product with an exact vector, :math:`\gamma_n|A||w| + E|w|` its error; n + 8 roundings, and one more
        where the two triangles are added.
        """
        value = torch.zeros(self.size, dtype=torch.float64)
        bound, apart = torch.zeros_like(value), torch.zeros_like(value)
        sizes = vector.abs()
        for start, stop, rows in self.panels():
            lower, inner, error = rows.value.tril(start), rows.value.abs().tril(start), rows.error.tril(start)
            above, above_size, above_error = (part.tril(start - 1).mT for part in (lower, inner, error))
            value[start:stop] += lower @ vector[:stop]
            value[:stop] += above @ vector[start:stop]
            bound[start:stop] += inner @ sizes[:stop]
            bound[:stop] += above_size @ sizes[start:stop]
            apart[start:stop] += error @ sizes[:stop]
            apart[:stop] += above_error @ sizes[start:stop]
        slack = gamma(2 * self.size + 64)
        return Rounded(value, (apart + slack * bound) * (1 + 4 * slack) + self.size * 2.0**-1021)


@dataclass(frozen=True, eq=False)
class Factor:
    """A lower triangular matrix by panels of rows, each up to its last column; nobody has to trust it."""

    rows: list[Tensor]

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.rows[-1].shape[1]

    def solve(self, right: Tensor) -> Tensor:
        """Approximately :math:`(RR^\\top)^{-1}` times a vector."""
        w = right.clone()
        for row in self.rows:
            start, stop = row.shape[1] - len(row), row.shape[1]
            left = (w[start:stop] - row[:, :start] @ w[:start])[:, None]
            w[start:stop] = torch.linalg.solve_triangular(row[:, start:], left, upper=False)[:, 0]
        for row in reversed(self.rows):
            start, stop = row.shape[1] - len(row), row.shape[1]
            left = w[start:stop, None]
            w[start:stop] = torch.linalg.solve_triangular(row[:, start:].mT, left, upper=True)[:, 0]
            w[:start] -= row[:, :start].mT @ w[start:stop]
        return w

    def times(self, vector: Tensor) -> Tensor:
        """Approximately :math:`RR^\\top` times a vector."""
        middle = torch.zeros_like(vector)
        for row in self.rows:
            middle[: row.shape[1]] += row.mT @ vector[row.shape[1] - len(row) : row.shape[1]]
        return torch.cat([row @ middle[: row.shape[1]] for row in self.rows])

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue of :math:`RR^\\top`, approximately and without proof."""
        low = high = torch.ones(self.size, dtype=torch.float64)
        for _ in range(_SWEEPS):
            low, high = self.solve(low / low.norm()), self.times(high / high.norm())
        return 1 / float(low.norm()), float(high.norm())
