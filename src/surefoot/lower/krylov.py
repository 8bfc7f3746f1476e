r"""The norm of a symmetric matrix A from a few products with it: a lower bound, and a probable upper bound.

Lanczos steps from g give orthonormal :math:`q_{j+1} = \pi_j(A)g/\|g\|` with polynomials of degree j,
:math:`\beta_{j+1}\pi_{j+1}(\lambda) = (\lambda - \alpha_{j+1})\pi_j(\lambda) - \beta_j\pi_{j-1}(\lambda)`.

*From below.* Ritz values, the eigenvalues of :math:`Q^\top AQ`, are at most :math:`\|A\|` in size (Cauchy).

*From above.* Let :math:`Au = \lambda u`, :math:`\|u\| = 1`, :math:`|\lambda| = \|A\|`. Then
:math:`|\pi_j(\lambda)||u^\top g| = |u^\top\pi_j(A)g| \le \|g\|` for every j. If g is Gaussian, so is :math:`u^\top
g`, whose density is at most :math:`1/\sqrt{2\pi}`, so :math:`|u^\top g| \ge \epsilon` except with probability
:math:`\epsilon\sqrt{2/\pi}`, and then :math:`\max_j|\pi_j(\lambda)| \le \|g\|/\epsilon`: one event for all j. The
zeros of :math:`\pi_j` lie among the Ritz values, so :math:`|\pi_j|` grows outside of them, and bisection finds the
largest possible :math:`\pm\lambda`. For the power method the argument is :math:`\|A\|^k \le \|A^kg\|/\epsilon`;
here the best of all polynomials is used (J. Kuczyński and H. Woźniakowski, *Estimating the largest eigenvalue by
the power and Lanczos algorithms with a random start*, SIAM J. Matrix Anal. 13, 1992). Round-off is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.lower.function import unit

_NOTHING = 1e-12  # a smaller part of a product is taken for round-off


@dataclass(frozen=True)
class Krylov:
    """The numbers of Lanczos steps."""

    diagonal: list[float]  # α
    beside: list[float]  # β, as many as α
    length: float  # the norm of the start

    @property
    def largest(self) -> float:
        """The largest Ritz value in size."""
        off = torch.tensor(self.beside[:-1], dtype=torch.float64)
        matrix = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64)) + torch.diag(off, 1)
        return float(torch.linalg.eigvalsh(matrix + torch.diag(off, -1)).abs().max())

    def most_likely(self, failure: float) -> float:
        """An upper bound on the norm that fails with at most this probability, if the start was Gaussian."""
        ritz, most = self.largest, self.length / (failure * math.sqrt(math.pi / 2))
        return max(self._end(sign, ritz, most) for sign in (1.0, -1.0))

    def _end(self, sign: float, low: float, most: float) -> float:
        """The point beyond the Ritz values where a polynomial reaches a size, by bisection, rounded up."""
        high = 2 * low + math.ulp(0.0)
        while not self._passes(sign * high, most):
            high *= 2.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self._passes(sign * middle, most) else (middle, high)
        return high

    def _passes(self, point: float, most: float) -> bool:
        before, value, last = 0.0, 1.0, 0.0
        for alpha, beta in zip(self.diagonal, self.beside, strict=True):
            before, value, last = value, ((point - alpha) * value - last * before) / beta, beta
            if abs(value) >= most:
                return True
        return False


def krylov(product: Callable[[Tensor], Tensor], start: Tensor, count: int) -> Krylov | None:
    """Lanczos steps with ``count`` products; three vectors are kept. ``None`` if the first product is zero."""
    direction, before = unit(start), torch.zeros_like(start)
    steps = Krylov([], [], float(torch.linalg.vector_norm(start)))
    for _ in range(count):
        image = product(direction)
        size = float(torch.linalg.vector_norm(image))
        if not 0 < size < math.inf:
            break
        steps.diagonal.append(float(direction @ image))
        last = steps.beside[-1] if steps.beside else 0.0
        rest = image - steps.diagonal[-1] * direction - last * before
        left = float(torch.linalg.vector_norm(rest))
        steps.beside.append(max(left, _NOTHING * size))
        if left <= _NOTHING * size:
            break
        before, direction = direction, rest / left
    return steps if steps.diagonal else None
