r"""What each layer adds to the Gram matrix :math:`R^\top JM^{-1}J^\top R`, without the whole J.

Let samples be apart: row i of the output depends on row i of a layer's result only. Then one pull-back of column
j of all blocks of R together gives, for every sample at once, the slope :math:`G_{ij}` of :math:`R_i^\top\psi_i`
in that layer's result. The row (i, j) of :math:`R^\top J` in the layer's parameters follows from it:

* linear layer on vectors, :math:`z_i = Wx_i + b`: the row is :math:`(G_{ij}x_i^\top, G_{ij})`, so inner products
  are :math:`\langle G_{ij}, G_{i'j'}\rangle(\langle x_i, x_{i'}\rangle + 1)`, see :class:`Outers`;
* linear layer on several vectors per sample and convolutions, which are linear layers on patches: the sum over
  them, :math:`\sum_tG_{ijt}x_{it}^\top`, formed for a few output features at a time (:func:`patches`);
* scale and shift: :math:`\sum_tG_{ijt}\circ x_{it}` and :math:`\sum_tG_{ijt}`;
* embedding: the sum of the :math:`G_{ijt}` with the same entry; entries that do not occur have no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.graph import Node

_BLOCK = 32  # samples in a block of rows of a Gram matrix
_CHUNK = 1 << 24  # numbers of a piece of a layer's rows

Piece = tuple[str, Tensor]  # the slot of a parameter, and some columns of its rows: (samples · columns) × numbers
Slots = frozenset[str]


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

    def kernel(self, inverse: Callable[[str], float]) -> Tensor:
        """⟨x_i, x_i'⟩ and 1, each over the metric of its parameter: samples × samples."""
        n = self.x.shape[0]
        found = self.x.new_zeros(n, n) if self.weight is None else self.x @ self.x.T * inverse(self.weight)
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

    def dense(self, kernels: Sequence[Tensor]) -> Tensor:
        """Their part of the Gram matrix: its lower triangle; above the diagonal there may be zeros."""
        n, c, _ = self.slopes.shape
        total = self.slopes.new_zeros(n * c, n * c)
        parts = self.slopes.reshape(n * c, -1).split([layer.outputs for layer in self.layers], dim=1)
        for first in range(0, n, _BLOCK):
            last = min(first + _BLOCK, n)
            for part, kernel in zip(parts, kernels, strict=True):
                found = (part[first * c : last * c] @ part[: last * c].T).view(last - first, c, last, c)
                found *= kernel[first:last, :last].view(last - first, 1, last, 1)
                total[first * c : last * c, : last * c] += found.view(-1, last * c)
        return total


def pieces(node: Node, values: Mapping[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    """The rows of a layer's parameters, piece by piece.

    Args:
        node: an operation for which :func:`slots_of` names these slots.
        values: what it reads, by name.
        slopes: G, samples × columns × the rest of the shape of the result.
        slots: which of its arguments are the parameters asked for.
    """
    arguments = {
        key: values[value.name] if hasattr(value, "name") else value for key, value in node.arguments.items()
    }
    yield from _KINDS[node.op][1](arguments, slopes, slots)


def slots_of(node: Node) -> Slots:
    """The arguments that may be parameters whose rows are known; empty if none."""
    if node.op not in _KINDS or not _is_plain(node):
        return frozenset()
    return frozenset(_KINDS[node.op][0])


def _is_plain(node: Node) -> bool:
    arguments, rank = node.arguments, len(node.specs[0].shape)
    if node.op == "aten.linear":
        return rank > 1
    if node.op == "surefoot.scale_shift":
        return arguments["dim"] > 0
    if node.op == "aten.embedding":
        return not arguments["scale_grad_by_freq"] and not arguments["sparse"]
    return not isinstance(arguments["padding"], str) and rank == (3 if node.op == "aten.conv1d" else 4)


def _linear(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    n, c, o = slopes.shape[0], slopes.shape[1], slopes.shape[-1]
    x = arguments["input"].reshape(n, 1, -1, arguments["input"].shape[-1])
    flat = slopes.reshape(n, c, -1, o)
    if "weight" in slots:
        yield from patches(x.permute(0, 1, 3, 2), flat.permute(0, 1, 3, 2).unsqueeze(2))
    if "bias" in slots:
        yield "bias", flat.sum(2).reshape(n * c, o)


def patches(x: Tensor, slopes: Tensor) -> Iterator[Piece]:
    """Rows of a weight from patches.

    Args:
        x: samples × groups × inputs × places.
        slopes: samples × columns × groups × outputs × places.
    """
    n, c, groups, outputs, _ = slopes.shape
    size = max(1, _CHUNK // max(1, n * c * x.shape[2]))
    for group in range(groups):
        for start in range(0, outputs, size):
            some = slopes[:, :, group, start : start + size]
            o = some.shape[2]
            rows = torch.bmm(some.reshape(n, c * o, -1), x[:, group].transpose(1, 2))
            yield "weight", rows.reshape(n * c, -1)


def _convolution(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    x, weight, groups = arguments["input"], arguments["weight"], arguments["groups"]
    n, c, o = slopes.shape[:3]
    flat = slopes.reshape(n, c, groups, o // groups, -1)
    if "weight" in slots:
        options = [_pair(arguments[key], fill) for key, fill in (("dilation", 1), ("padding", 0), ("stride", 1))]
        image = x if x.dim() == 4 else x.unsqueeze(2)
        kernel = tuple(weight.shape[2:]) if x.dim() == 4 else (1, weight.shape[2])
        found = F.unfold(image, kernel, dilation=options[0], padding=options[1], stride=options[2])
        yield from patches(found.reshape(n, groups, found.shape[1] // groups, -1), flat)
    if "bias" in slots:
        yield "bias", flat.sum(-1).reshape(n * c, o)


def _pair(given: Any, fill: int) -> tuple[int, int]:
    """An option of a convolution in two dimensions; one in one dimension has ``fill`` before it."""
    values = [given] if isinstance(given, int) else list(given)
    return (values[0], values[1]) if len(values) == 2 else (fill, values[0])


def _scale_shift(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    x, first = arguments["x"], arguments["dim"]
    like = arguments["weight"] if "weight" in slots else arguments["bias"]
    rank = like.dim()
    n, c = slopes.shape[:2]
    others = [d for d in range(2, slopes.dim()) if not first <= d - 1 < first + rank]
    if "weight" in slots:
        product = slopes * x.unsqueeze(1)
        yield "weight", (product.sum(others) if others else product).reshape(n * c, -1)
    if "bias" in slots:
        yield "bias", (slopes.sum(others) if others else slopes).reshape(n * c, -1)


def _embedding(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    n, c, e = slopes.shape[0], slopes.shape[1], slopes.shape[-1]
    entries, places = arguments["indices"].reshape(n, -1).unique(return_inverse=True)
    flat = slopes.reshape(n, c, -1, e)
    if arguments["padding_idx"] >= 0:
        flat = flat * (entries[places] != arguments["padding_idx"]).to(flat.dtype)[:, None, :, None]
    chosen = F.one_hot(places, len(entries)).to(flat.dtype)  # samples × places × entries
    yield from patches(chosen.permute(0, 2, 1).unsqueeze(1), flat.permute(0, 1, 3, 2).unsqueeze(2))


_Rows = Callable[[dict[str, Any], Tensor, Slots], Iterator[Piece]]
_KINDS: dict[str, tuple[tuple[str, ...], _Rows]] = {
    "aten.linear": (("weight", "bias"), _linear),
    "aten.conv1d": (("weight", "bias"), _convolution),
    "aten.conv2d": (("weight", "bias"), _convolution),
    "surefoot.scale_shift": (("weight", "bias"), _scale_shift),
    "aten.embedding": (("weight",), _embedding),
}


__all__ = ["Outer", "Outers", "Piece", "pieces", "slots_of"]
