r"""What each layer adds to the Gram matrix :math:`R^\top JM^{-1}J^\top R`, without the whole J.

For a linear layer on vectors, :math:`z_i = Wx_i + b`, the row is :math:`(G_{ij}x_i^\top, G_{ij})`, so inner
products are :math:`\langle G_{ij}, G_{i'j'}\rangle(\langle x_i, x_{i'}\rangle + 1)`, see :class:`Outers`. Rows of
all other layers are formed (:mod:`surefoot.operations.gram`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.graph import Graph, Node
from surefoot.graph.nodes import Ref
from surefoot.operations.call import Use
from surefoot.operations.gram import Piece, Slots
from surefoot.operations.record import record_of

_BLOCK = 32  # samples in a block of rows of a Gram matrix


@dataclass(frozen=True)
class Outer:
    """A linear layer on one vector per sample.

    Attributes:
        x: what it reads, samples × features.
        outputs: how many numbers it makes of them.
        weight: path of its weight, if that varies.
        bias: path of its bias, if that varies.
    """

    x: Tensor
    outputs: int
    weight: str | None
    bias: str | None

    def kernel(self, inverse: Callable[[str], float], dtype: torch.dtype) -> Tensor:
        """⟨x_i, x_i'⟩ and 1, each over the metric of its parameter: samples × samples."""
        x, n = self.x.to(dtype), self.x.shape[0]
        found = x.new_zeros(n, n) if self.weight is None else x @ x.T * inverse(self.weight)
        return found if self.bias is None else found + inverse(self.bias)


@dataclass(frozen=True)
class Outers:
    """All such layers: their part of the Gram matrix as factors, side by side.

    Attributes:
        layers: the layers.
        slopes: G, samples × columns × the outputs of all layers.
    """

    layers: tuple[Outer, ...]
    slopes: Tensor

    @cached_property
    def _room(self) -> Tensor:
        n, _, outputs = self.slopes.shape
        return self.slopes.new_empty(2, n, 1, outputs)

    def apply(self, kernels: Sequence[Tensor], z: Tensor) -> Tensor:
        """Their part of the Gram matrix times z, samples × columns: 2n² + 4nc operations per output feature."""
        pulled, mixed = self._room
        torch.bmm(z.unsqueeze(1), self.slopes, out=pulled)
        start = 0
        for layer, kernel in zip(self.layers, kernels, strict=True):
            stop = start + layer.outputs
            torch.mm(kernel, pulled[:, 0, start:stop], out=mixed[:, 0, start:stop])
            start = stop
        return torch.bmm(mixed, self.slopes.transpose(1, 2)).squeeze(1)

    def add_to(self, total: Tensor, kernels: Sequence[Tensor]) -> None:
        """Add their part of the Gram matrix to another one: right in the lower triangle."""
        n, c, _ = self.slopes.shape
        parts = self.slopes.reshape(n * c, -1).split([layer.outputs for layer in self.layers], dim=1)
        for first in range(0, n, _BLOCK):
            last = min(first + _BLOCK, n)
            for part, kernel in zip(parts, kernels, strict=True):
                found = (part[first * c : last * c] @ part[: last * c].T).view(last - first, c, last, c)
                found *= kernel[first:last, :last].view(last - first, 1, last, 1)
                total[first * c : last * c, : last * c] += found.view(-1, last * c)


def whole_rows(node: Node, values: Mapping[str, Any], several: Sequence[Tensor]) -> Tensor:
    """All pieces of a parameter as one, in the order of its entries."""
    rows = several[0] if len(several) == 1 else torch.cat(list(several), dim=1)
    gram = record_of(node).gram
    return rows if gram is None else gram.whole(arguments_of(node, values), rows)


def arguments_of(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a node, by slot."""
    return {key: values[a.name] if isinstance(a, Ref) else a for key, a in node.arguments.items()}


def pieces(node: Node, values: Mapping[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    """The rows of a layer's parameters, piece by piece.

    Args:
        node: an operation for which :func:`slots_of` names these slots.
        values: what it reads, by name.
        slopes: G, samples × columns × the rest of the shape of the result.
        slots: which of its arguments are the parameters asked for.
    """
    gram = record_of(node).gram
    assert gram is not None
    yield from gram.pieces(arguments_of(node, values), slopes, slots)


def slots_of(graph: Graph, node: Node) -> Slots:
    """The arguments that may be parameters whose rows are known; empty if none."""
    gram = record_of(node).gram
    return frozenset(gram.slots) if gram is not None and gram.covers(Use(node, graph.spec)) else frozenset()


__all__ = ["Outer", "Outers", "Piece", "arguments_of", "pieces", "slots_of", "whole_rows"]
