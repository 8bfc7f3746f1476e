"""Parameters by name as one vector in double precision, and back.

Where each of several processes has a part of each parameter, it has that part of vectors too. Products and norms
are those of whole vectors: sums over the processes in one order, so that they are the same on all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.graph.nodes import in_double
from surefoot.graph.placed import Placed, norms
from surefoot.processes import Processes
from surefoot.torch_private import joined, parts_of

Tensors = dict[str, Tensor]
Kinds = dict[tuple[Any, ...], tuple[torch.dtype, tuple[int, ...]]]
"""Where vectors stand in a state, by the keys that lead there: their type, and the dimensions before the last."""


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, of all its groups."""
    return [value for group in optimizer.param_groups for value in group["params"]]


@dataclass(frozen=True)
class Layout:
    """Where each parameter stands in the vector: names and shapes in order.

    Attributes:
        shapes: of what this process has.
        processes: those that have a part each, or ``None``; all of them ask for products at the same time.
        places: how the parameters lie with them.

    >>> layout = Layout.of({"weight": torch.ones(2, 2), "bias": torch.zeros(1)})
    >>> vector = layout.pack({"bias": torch.tensor([5.0]), "weight": torch.ones(2, 2)})
    >>> vector.tolist(), layout.unpack(vector)["bias"].tolist()
    ([1.0, 1.0, 1.0, 1.0, 5.0], [5.0])
    """

    shapes: tuple[tuple[str, torch.Size], ...]
    processes: Processes | None = None
    places: tuple[Placed, ...] = ()

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

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many entries each parameter has, in all parts together."""
        return tuple(place.numel for place in self.places) or tuple(shape.numel() for _, shape in self.shapes)

    def dot(self, first: Tensor, second: Tensor) -> float:
        """The inner product."""
        here = float(self.once(first) @ second)
        return here if self.processes is None else self.processes.total(here, first.device)

    def products(self, vectors: Tensor) -> np.ndarray:
        """The inner products of some vectors, in rows, with each other."""
        return self.summed((self.once(vectors) @ vectors.T).cpu().numpy())

    def norm(self, vector: Tensor) -> float:
        """The Euclidean norm."""
        if self.processes is None:
            return float(torch.linalg.vector_norm(vector))
        return norms(self.processes, [self.once(vector)], [True])[0]

    def summed(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers that are sums over entries, as sums over those of all processes."""
        return numbers if self.processes is None else np.sum(self.processes.gathered(lambda: numbers), axis=0)

    def everywhere(self, holds: bool) -> bool:
        """Whether something holds on all processes."""
        return holds if self.processes is None else all(self.processes.gathered(lambda: holds))

    def once(self, vectors: Tensor) -> Tensor:
        """The same vector, or rows, with zeros where another process has the entries too, and counts them."""
        return vectors.masked_fill(self._copied.to(vectors.device), 0.0) if self.copies else vectors

    @cached_property
    def copies(self) -> frozenset[str]:
        """The names of parameters of which another process has the same part, which counts."""
        return frozenset(name for name, place in zip(self._names, self.places, strict=False) if not place.counts)

    @cached_property
    def _copied(self) -> Tensor:
        """Which entries these are."""
        return torch.cat([torch.full((shape.numel(),), name in self.copies) for name, shape in self.shapes])

    def counted(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Those that count here."""
        return {name: value for name, value in tensors.items() if name not in self.copies}
