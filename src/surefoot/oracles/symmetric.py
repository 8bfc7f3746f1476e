"""Symmetric matrices in little more than half the memory: Gram matrices are the largest that oracles hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

_BLOCKS = 6  # of rows
_SMALL = 128  # rows of a block, below which calls cost more than the numbers that they save


class Symmetric:
    """A sum of products XᵀX: blocks of rows, each up to the end of its diagonal block.

    Args:
        like: of whose type and on whose device the numbers are.
        size: of the matrix, which is zero at first.

    >>> X = torch.randn(3, 500, dtype=torch.float64)
    >>> matrix, z = Symmetric(X, 500).add(X), torch.randn(500, dtype=torch.float64)
    >>> bool(torch.allclose(matrix @ z, X.T @ (X @ z)))
    True
    >>> bool(torch.allclose(matrix.lower().tril(), (X.T @ X).tril()))
    True
    """

    def __init__(self, like: Tensor, size: int) -> None:
        count, self._size = min(_BLOCKS, max(1, size // _SMALL)), size
        self._edges = list(pairwise(k * size // count for k in range(count + 1)))
        self._blocks = [like.new_zeros(last - first, last) for first, last in self._edges]

    def add(self, rows: Tensor) -> Symmetric:
        """Add XᵀX for a matrix X."""
        for (first, last), block in zip(self._edges, self._blocks, strict=True):
            block.addmm_(rows[:, first:last].T, rows[:, :last])
        return self

    def __matmul__(self, z: Tensor) -> Tensor:
        """The product with a vector."""
        result = torch.zeros_like(z)
        for (first, last), block in zip(self._edges, self._blocks, strict=True):
            result[first:last].addmv_(block, z[:last])
            if first:
                result[:first].addmv_(block[:, :first].T, z[first:last])
        return result

    def lower(self, factor: float = 1.0, onto: Tensor | None = None) -> Tensor:
        """The factor times the matrix, perhaps added to another one: right in the lower triangle."""
        total = self._blocks[0].new_zeros(self._size, self._size) if onto is None else onto
        for (first, last), block in zip(self._edges, self._blocks, strict=True):
            total[first:last, :last].add_(block, alpha=factor)
        return total


def cholesky(formed: Callable[[], Tensor]) -> Tensor:
    """The Cholesky factor of a matrix, in double precision if its own is not enough: lower triangles.

    Args:
        formed: makes the matrix, which is written over.
    """
    matrix = formed()
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix.mT, upper=True, out=(matrix.mT, failed))  # by columns: nothing is copied
    if not int(failed):
        return matrix
    matrix = formed()
    unit, matrix = torch.finfo(matrix.dtype).eps, matrix.double()
    matrix.diagonal().add_(unit * float(matrix.diagonal().sum()))
    return torch.linalg.cholesky(matrix)
