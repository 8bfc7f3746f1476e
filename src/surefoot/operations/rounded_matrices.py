r"""Matrices as computed, each with a proved bound on the Frobenius norm of its error.

A product of matrices with inner dimension k, :math:`A' = A + E_A` and :math:`B' = B + E_B`, is computed as
:math:`\mathrm{fl}(AB)` with :math:`|\mathrm{fl}(AB) - AB| \le \gamma_k|A||B|` in whatever order products are added
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.5), so it is off by

.. math:: \|A\|_F\|E_B\|_F + \|E_A\|_F(\|B\|_F + \|E_B\|_F) + \gamma_{k+4}\|A\|_F\|B\|_F + \eta

with :math:`\eta` what underflow takes. A sum rounds each entry once. Bounds are raised by :math:`2^{-40}`, more
than their own round-off: they are sums of fewer than :math:`2^{10}` terms, and norms of matrices with fewer than
:math:`2^{12}` rows and columns have a relative error below :math:`2^{-42}` where entries are summed pairwise or in
blocks, :math:`2^{-28}` in any order; :func:`size_of` adds the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.norms.hermitian import gamma

_UP = 1 + 2.0**-40
_SMALL = 2.0**-1000  # more than what underflows in a product of matrices


def size_of(matrices: Tensor) -> Tensor:
    """Frobenius norms, rounded up, one for each matrix of a stack."""
    matrices = matrices.detach()
    count = matrices.shape[-1] * matrices.shape[-2]
    largest = matrices.abs().amax(dim=(-2, -1)).clamp_min(2.0**-500)  # no square leaves the range of doubles
    norm = torch.linalg.matrix_norm(matrices / largest[..., None, None]) * largest
    return norm * (1 + (count + 8) * 2.0**-52) + _SMALL


@dataclass(frozen=True, eq=False)
class RoundedMatrices:
    """Computed matrices in double precision, and for each a bound on the norm of its error."""

    value: Tensor
    error: Tensor

    @staticmethod
    def exact(value: Tensor) -> RoundedMatrices:
        """Matrices that are what they are."""
        wide = value.double()
        return RoundedMatrices(wide, wide.new_zeros(wide.shape[:-2]))

    @property
    def size(self) -> Tensor:
        """On the norms of the exact matrices."""
        return (size_of(self.value) + self.error) * _UP

    @property
    def transposed(self) -> RoundedMatrices:
        """The transposed matrices."""
        return RoundedMatrices(self.value.mT, self.error)

    def __matmul__(self, other: RoundedMatrices) -> RoundedMatrices:
        a, b = size_of(self.value), size_of(other.value)
        rounding = gamma(self.value.shape[-1] + 4) * a * b + _SMALL
        error = a * other.error + self.error * (b + other.error) + rounding
        return RoundedMatrices(self.value @ other.value, error * _UP)

    def __add__(self, other: RoundedMatrices) -> RoundedMatrices:
        value = self.value + other.value
        return RoundedMatrices(value, (self.error + other.error + 2.0**-53 * size_of(value)) * _UP)

    def scaled(self, factor: float) -> RoundedMatrices:
        """The product with a number that is off by at most a relative u."""
        value = self.value * factor
        return RoundedMatrices(value, (abs(factor) * _UP * self.error + 2.0**-51 * size_of(value)) * _UP)

    def enlarged(self, error: Tensor | float) -> RoundedMatrices:
        """The same, off by so much more."""
        return RoundedMatrices(self.value, (self.error + error) * _UP)

    def below(self, halved: bool = False) -> RoundedMatrices:
        """The part on and below the diagonal, which may be halved: a map of norm 1."""
        value = self.value.tril()
        if halved:
            value = value - 0.5 * torch.diag_embed(value.diagonal(dim1=-2, dim2=-1))  # exact, but for underflow
        return RoundedMatrices(value, self.error + (_SMALL if halved else 0.0))

    def block(self, rows: slice, columns: slice) -> RoundedMatrices:
        """A part of each matrix."""
        return RoundedMatrices(self.value[..., rows, columns], self.error)


def residual(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Bounds of the Frobenius norms of AX - I, one for each matrix of a stack."""
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64, device=matrix.device).expand(matrix.shape)
    product = RoundedMatrices.exact(matrix) @ RoundedMatrices.exact(inverse)
    return (product + RoundedMatrices.exact(-eye)).size
