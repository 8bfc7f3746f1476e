r"""The norm of a symmetric matrix A from a few products with it: attained, or bounded but for a small probability.

Lanczos steps from g give orthonormal :math:`q_{j+1} = \pi_j(A)g/\|g\|` with polynomials of degree j,
:math:`\beta_{j+1}\pi_{j+1}(\lambda) = (\lambda - \alpha_{j+1})\pi_j(\lambda) - \beta_j\pi_{j-1}(\lambda)`.

*From below.* Ritz values, the eigenvalues of :math:`Q^\top AQ`, are at most :math:`\|A\|` in size (Cauchy).

*From above.* Let :math:`Au = \lambda u`, :math:`\|u\| = 1`, :math:`|\lambda| = \|A\|`. Then
:math:`|\pi_j(\lambda)||u^\top g| = |u^\top\pi_j(A)g| \le \|g\|` for every j. If g is Gaussian, so is
:math:`u^\top g`, whose density is at most :math:`1/\sqrt{2\pi}`, so :math:`|u^\top g| \ge \epsilon` but for a
probability of :math:`\epsilon\sqrt{2/\pi}`, and then :math:`\max_j|\pi_j(\lambda)| \le \|g\|/\epsilon`: one event,
whatever j. Zeros of :math:`\pi_j` lie among the Ritz values, so :math:`|\pi_j|` grows outside of them, and
bisection finds where :math:`\pm\lambda` must end. The same as for the power method, :math:`\|A\|^k \le
\|A^kg\|/\epsilon`, with the best of all polynomials that were met (J. Kuczyński and H. Woźniakowski, *Estimating
the largest eigenvalue by the power and Lanczos algorithms with a random start*, SIAM J. Matrix Anal. 13, 1992).
Round-off is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.lower.function import unit

_NOTHING = 1e-12  # what is left of a product, as a part of it, is round-off below this


@dataclass(frozen=True)
class Krylov:
    """The numbers α, β of Lanczos steps, one more β than is between the α, and the norm of the start."""

    diagonal: list[float]
    beside: list[float]
    length: float

    @property
    def largest(self) -> float:
        """The largest Ritz value in size."""
        off = torch.tensor(self.beside[:-1], dtype=torch.float64)
        matrix = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64)) + torch.diag(off, 1)
        return float(torch.linalg.eigvalsh(matrix + torch.diag(off, -1)).abs().max())

    def most_likely(self, failure: float) -> float:
        """An upper bound of the norm that fails with at most this probability if the start was Gaussian."""
        ritz, most = self.largest, self.length / (failure * math.sqrt(math.pi / 2))
        return max(self._end(sign, ritz, most) for sign in (1.0, -1.0))

    def _end(self, sign: float, low: float, most: float) -> float:
        """Where the polynomials have passed a size, outwards from the Ritz values; bisection, rounded up."""
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
    """Lanczos steps with so many products; three vectors are kept. ``None`` if the first product shows nothing."""
    direction, before = unit(start), torch.zeros_like(start)
    found = Krylov([], [], float(torch.linalg.vector_norm(start)))
    for _ in range(count):
        image = product(direction)
        size = float(torch.linalg.vector_norm(image))
        if not 0 < size < math.inf:
            break
        found.diagonal.append(float(direction @ image))
        last = found.beside[-1] if found.beside else 0.0
        rest = image - found.diagonal[-1] * direction - last * before
        left = float(torch.linalg.vector_norm(rest))
        found.beside.append(max(left, _NOTHING * size))
        if left <= _NOTHING * size:
            break
        before, direction = direction, rest / left
    return found if found.diagonal else None
