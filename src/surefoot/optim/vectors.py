"""Parameters by name as one vector in double precision, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.graph.nodes import in_double
from surefoot.torch_private import joined, parts_of

Tensors = dict[str, Tensor]


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, of all its groups."""
    return [value for group in optimizer.param_groups for value in group["params"]]


@dataclass(frozen=True)
class Layout:
    """Where each parameter stands in the vector: names and shapes in order.

    Attributes:
        shapes: by name.

    >>> layout = Layout.of({"weight": torch.ones(2, 2), "bias": torch.zeros(1)})
    >>> vector = layout.pack({"bias": torch.tensor([5.0]), "weight": torch.ones(2, 2)})
    >>> vector.tolist(), layout.unpack(vector)["bias"].tolist()
    ([1.0, 1.0, 1.0, 1.0, 5.0], [5.0])
    """

    shapes: tuple[tuple[str, torch.Size], ...]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of these tensors."""
        return Layout(tuple((name, value.shape) for name, value in tensors.items()))

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """All of them in one vector."""
        return joined([in_double(tensors[name]) for name in self._names])

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shapes)

    @cached_property
    def _lent(self) -> list[Tensor]:
        """Tensors of these shapes, without entries."""
        return [torch.empty(shape, device="meta") for _, shape in self.shapes]

    def unpack(self, vector: Tensor) -> Tensors:
        """The parts of a vector, as views."""
        return dict(zip(self._names, parts_of(vector, self._lent), strict=True))

    def dot(self, first: Tensor, second: Tensor) -> float:
        """The inner product."""
        return float(first @ second)

    def products(self, vectors: Tensor) -> np.ndarray:
        """The inner products of some vectors, in rows, with each other."""
        products: np.ndarray = (vectors @ vectors.T).cpu().numpy()
        return products

    def norm(self, vector: Tensor) -> float:
        """The Euclidean norm."""
        return float(torch.linalg.vector_norm(vector))
