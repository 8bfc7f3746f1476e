r"""Rows of the Jacobian in the parameters of a layer, from what it reads and the slopes in its result.

Let samples be apart: row i of the output depends on row i of a layer's result only. With :math:`G_{ij}` the slope
of column j of the output of sample i in that layer's result, the row (i, j) in the layer's parameters is

* linear layer, :math:`z_{it} = Wx_{it} + b`: :math:`\sum_tG_{ijt}x_{it}^\top` and :math:`\sum_tG_{ijt}`; likewise
  for convolutions, which are linear layers on patches, formed for a few output features at a time
  (:func:`patches`);
* scale and shift: :math:`\sum_tG_{ijt}\circ x_{it}` and :math:`\sum_tG_{ijt}`; likewise for a parameter that is
  added;
* embedding: the sum of the :math:`G_{ijt}` with the same entry; entries that do not occur have no row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.operations.call import Use

_CHUNK = 1 << 24  # numbers of a piece of a layer's rows, at most


def wide(rows: int) -> int:
    """How many columns of so many rows are multiplied at a time: enough for speed, few beside the product."""
    return max(256, (1 << 18) // max(rows, 1))


Piece = tuple[str, Tensor]  # the slot of a parameter, and some columns of its rows: (samples · columns) × numbers
Slots = frozenset[str]


def linear_rows(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    """Rows of a linear layer on several vectors per sample: sums over them."""
    n, c, o = slopes.shape[0], slopes.shape[1], slopes.shape[-1]
    places = math.prod(slopes.shape[2:-1])  # written out: a layer may have no entries at all
    x = arguments["input"].reshape(n, 1, places, arguments["input"].shape[-1])
    flat = slopes.reshape(n, c, places, o)
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
    n, c, groups, outputs, places = slopes.shape
    size = max(1, min(_CHUNK, n * c * wide(n * c)) // max(1, n * c * x.shape[2]))
    for group in range(groups):
        for start in range(0, outputs, size):
            some = slopes[:, :, group, start : start + size]
            o = some.shape[2]
            wanted = n * c, o * x.shape[2]
            yield "weight", torch.bmm(some.reshape(n, c * o, places), x[:, group].transpose(1, 2)).reshape(wanted)


def convolution_rows(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    """A convolution is a linear layer on patches."""
    n, c, o = slopes.shape[:3]
    groups = arguments["groups"]
    flat = slopes.reshape(n, c, groups, o // groups, -1)
    if "weight" in slots:
        yield from patches(unfolded(arguments), flat)
    if "bias" in slots:
        yield "bias", flat.sum(-1).reshape(n * c, o)


def unfolded(arguments: dict[str, Any]) -> Tensor:
    """The patches that a convolution reads: samples × groups × inputs × places."""
    x, weight, groups = arguments["input"], arguments["weight"], arguments["groups"]
    options = [_pair(arguments[key], fill) for key, fill in (("dilation", 1), ("padding", 0), ("stride", 1))]
    image = x if x.dim() == 4 else x.unsqueeze(2)
    kernel = tuple(weight.shape[2:]) if x.dim() == 4 else (1, weight.shape[2])
    found = F.unfold(image, kernel, dilation=options[0], padding=options[1], stride=options[2])
    return found.reshape(len(x), groups, found.shape[1] // groups, -1)


def _pair(given: Any, fill: int) -> tuple[int, int]:
    """An option of a convolution in two dimensions; one in one dimension has ``fill`` before it."""
    values = [given] if isinstance(given, int) else list(given)
    return (values[0], values[1]) if len(values) == 2 else (fill, values[0])


def scale_rows(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    """Rows of a scale and a shift."""
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


def shift_rows(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    """Rows of a shift that is the same for all samples: sums over the dimensions along which it is repeated."""
    shape = arguments["other"].shape
    shape = (1,) * (slopes.dim() - 1 - len(shape)) + tuple(shape)
    others = [d + 1 for d in range(1, len(shape)) if shape[d] == 1]
    yield "other", (slopes.sum(others) if others else slopes).reshape(slopes.shape[0] * slopes.shape[1], -1)


def is_shift(use: Use) -> bool:
    """Whether an addition shifts all samples alike."""
    shape = use.shapes.get("other")
    if use.op != "aten.add" or shape is None or use["alpha"] not in (None, 1):
        return False
    return len(shape) < len(use.shape) or (len(shape) == len(use.shape) and shape[:1] == (1,) != use.shape[:1])


def lookup_rows(arguments: dict[str, Any], slopes: Tensor, slots: Slots) -> Iterator[Piece]:
    """Rows of an embedding; entries that do not occur have none."""
    n, c, e = slopes.shape[0], slopes.shape[1], slopes.shape[-1]
    entries, places = arguments["indices"].reshape(n, -1).unique(return_inverse=True)
    flat = slopes.reshape(n, c, -1, e)
    if arguments["padding_idx"] >= 0:
        flat = flat * (entries[places] != arguments["padding_idx"]).to(flat.dtype)[:, None, :, None]
    chosen = F.one_hot(places, len(entries)).to(flat.dtype)  # samples × places × entries
    yield from patches(chosen.permute(0, 2, 1).unsqueeze(1), flat.permute(0, 1, 3, 2).unsqueeze(2))


def whole_table(arguments: dict[str, Any], rows: Tensor) -> Tensor:
    """All pieces of :func:`lookup_rows` side by side as rows of the whole table: zero where there were none."""
    count, size = arguments["weight"].shape
    entries = arguments["indices"].unique()
    full = rows.new_zeros(len(rows), count, size)
    full[:, entries] = rows.view(len(rows), size, len(entries)).transpose(1, 2)
    return full.view(len(rows), -1)
