"""Linear operators: known by what they do to vectors, a matrix on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.oracles.problem import OracleError

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Operator:
    """A linear map between vectors.

    Attributes:
        shape: how many numbers it returns and reads.
        matvec: the product with a vector.
        rmatvec: the product of the transpose with a vector.
        dtype: type of the vectors.
        device: where they are.

    >>> turn = Operator((2, 2), lambda v: v.flip(0), lambda v: v.flip(0), torch.float64, torch.device("cpu"))
    >>> turn @ torch.tensor([1.0, 2.0]).double(), turn.T.dense()
    (tensor([2., 1.], dtype=torch.float64), tensor([[0., 1.], [1., 0.]], dtype=torch.float64))
    """

    shape: tuple[int, int]
    matvec: Apply
    rmatvec: Apply
    dtype: torch.dtype
    device: torch.device

    @property
    def T(self) -> Operator:
        """The transpose."""
        return Operator((self.shape[1], self.shape[0]), self.rmatvec, self.matvec, self.dtype, self.device)

    def __matmul__(self, vector: Tensor) -> Tensor:
        if tuple(vector.shape) != (self.shape[1],):
            rows, columns = self.shape
            raise OracleError(
                f"an operator of shape {rows}×{columns} reads a vector of {columns}, got {tuple(vector.shape)}"
            )
        return self.matvec(vector.to(self.dtype))

    def dense(self) -> Tensor:
        """The matrix, from one product per row or per column, whichever are fewer."""
        rows, columns = self.shape
        if rows < columns:
            return self.T.dense().T
        matrix = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        for k in range(columns):
            unit = torch.zeros(columns, dtype=self.dtype, device=self.device)
            unit[k] = 1.0
            matrix[:, k] = self.matvec(unit)
        return matrix
