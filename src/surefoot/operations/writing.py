r"""Tensors written into others at fixed places: slices, indices, masks.

Every entry of the result is one of the tensor written to, or one that is written, or a sum where they are added
up: matrices of zeros and ones as in :mod:`surefoot.operations.layout`.

* *Written over*: each entry of the result comes from one of the two, so they end up in orthogonal parts, the
  tensor written to with norm 1 and what is written with the root of how often broadcasting copies an entry of it.
* *Added up*: rows of the matrix of what is written have at most c ones, c being the most entries that go to one
  place, and its columns at most one each, so that its norm is :math:`\sqrt c` (the rows are orthogonal).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.graph.structure import Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import (
    ONE,
    ZERO,
    affine,
    broadcast_copies,
    largest_peak,
    multiplicity,
    normalized_dim,
    root,
    size_of,
)
from surefoot.operations.layout import layout
from surefoot.operations.record import Form, declare, operation
from surefoot.operations.written_out import written_out

_aten: Any = torch.ops.aten
_WRITTEN = ("src", "source", "values")


def _within_rows(use: Use) -> Iterable[Slot]:
    """Both, unless places are counted along the first dimension."""
    dims = [use[key] for key in ("dim", "dim1", "dim2") if use[key] is not None]
    rank = len(use.shape)
    if not rank or not dims or 0 in [normalized_dim(dim, rank) for dim in dims]:
        return []
    return [slot for slot in ("self", *_WRITTEN) if len(use.shapes.get(slot, ())) and slot in use.shapes]


def _over(call: Call, copies: int = 1) -> Bounds:
    """A tensor written over another, each entry so many times."""
    norms = {
        slot: root(copies) if slot in _WRITTEN else ONE for slot in call.tensors if slot in ("self", *_WRITTEN)
    }
    numbers = [call[key] for key in ("value", *_WRITTEN) if isinstance(call[key], int | float)]
    size = ZERO if not numbers else size_of(numbers[0])
    offset = size * root(call.numel)
    peak = largest_peak(call, norms)
    return affine(call, norms, offset=offset, orthogonal=True, peak=peak + size)


@layout("aten.select_scatter", "aten.slice_scatter", "aten.diagonal_scatter", rows=_within_rows)
def write_slice(call: Call) -> Bounds:
    """A slice, or a diagonal, of one tensor replaced by another: norm 1 each, in orthogonal parts."""
    return _over(call)


@layout("aten.index_copy", rows=_within_rows, selects=("index",))
def write_slices(call: Call) -> Bounds:
    """Slices replaced by others, each at most once: norm 1 each, in orthogonal parts."""
    return _over(call)


@layout("aten.index_fill", rows=_within_rows, selects=("index",))
def fill_slices(call: Call) -> Bounds:
    """Slices replaced by a number: norm 1."""
    if "value" in call.varying:
        raise call.refuse("filling with a value that varies is not covered; use index_copy")
    value = call["value"]
    number = size_of(value)
    return affine(call, {"self": ONE}, offset=number * root(call.numel), peak=call["self"].peak + number)


@operation("aten.scatter", form=lambda node: Form.LAYOUT if node.arguments.get("reduce") is None else Form.OTHER,
           rows=_within_rows, selects=("index",),
           rounds=lambda node: node.arguments.get("reduce") is not None)  # fmt: skip
def scatter(call: Call) -> Bounds:
    """Entries written to places along one dimension, each at most once: norm 1 each, in orthogonal parts."""
    if call["reduce"] is not None:
        raise call.refuse("scatter with reduce is not covered; use scatter_add, or scatter_reduce with 'sum'")
    return _over(call)


@layout("aten.masked_scatter", rows=lambda use: (), selects=("mask",))
def write_masked(call: Call) -> Bounds:
    """Entries under a fixed mask replaced by those of another tensor in order, each of which is used at most once;
    one that is broadcast to the mask is copied.
    """
    if not call["mask"].is_constant:
        raise call.refuse("the mask varies over the domain: a jump that no rule bounds")
    norms = {"self": root(broadcast_copies(call["self"].shape, call.shape)), "source": ONE}
    return affine(call, norms, orthogonal=True, peak=largest_peak(call, norms))


def _as_expanded(node: Node) -> Iterator[Node]:
    """One tensor written over all of another, of which the shape and the type are left; it has no derivative."""
    whole, spec = f"{node.name}_expanded", node.specs[0]
    args = (node.arguments["src"], list(spec.shape))
    yield replace(node, name=whole, op="aten.expand", target=_aten.expand.default, args=args, kwargs={})
    target = _aten._to_copy.default
    yield replace(node, op="aten._to_copy", target=target, args=(Ref(whole),), kwargs={"dtype": spec.dtype})


declare("aten.copy", canonical=_as_expanded)


@layout("aten.index_put", rows=lambda use: (), selects=("indices",),
        rounds=lambda node: bool(node.arguments.get("accumulate")))  # fmt: skip
def index_put(call: Call) -> Bounds:
    """Entries at several tensors of indices replaced by values, or values added to them.

    What is indexed has the shape that indexing gives, to which values are broadcast. Replaced, each goes to so
    many places as it has copies; where places repeat, the last one stays. Added up, √ of the most that one place
    gets, times √ of the copies.
    """
    x, values = call["self"], call["values"]
    indices: list[Any] = [None if index is None else index.value for index in call["indices"]]
    known = all(isinstance(v, Tensor) for i, v in zip(call["indices"], indices, strict=True) if i is not None)
    if not known:
        if call["accumulate"]:
            raise call.refuse("values added at indices that are not known are not covered; use index_add")
        return _over(call, max(1, call.numel))
    device = next((index.device for index in indices if index is not None), None)
    positions = torch.arange(math.prod(x.shape), device=device).reshape(x.shape)
    places = torch.ops.aten.index.Tensor(positions, indices)
    copies = broadcast_copies(values.shape, tuple(places.shape)) if values.numel else 1
    if not call["accumulate"]:
        return _over(call, max(1, copies))
    most = multiplicity(places, 1)
    norms = {"self": ONE, "values": root(max(1, most) * max(1, copies))}
    peak = x.peak + values.peak * float(max(1, most))
    return affine(call, norms, peak=peak, reduction=most + 1)


def _added(call: Call, index: Enclosure, along: int) -> int:
    """The most entries that go to one place: slices that share an index, or entries along a dimension."""
    if not isinstance(index.value, Tensor):
        return index.numel
    if call.op == "aten.index_add" or not index.shape:
        return multiplicity(index.value, 1)
    counts = torch.zeros(call.shape, dtype=torch.int64, device=index.value.device)
    counts.scatter_add_(along, index.value, torch.ones_like(index.value))
    return int(counts.max()) if counts.numel() else 0


@operation("aten.index_add", "aten.scatter_add", form=Form.LINEAR, rows=_within_rows, selects=("index",))
def add_at(call: Call) -> Bounds:
    r"""Slices or entries added at indices: norm 1, and √ of the most that go to one place, times \|alpha\|."""
    x, written = call["self"], call["source"] if call["source"] is not None else call["src"]
    along = normalized_dim(call["dim"], len(call.shape)) if call.shape else 0
    most = max(1, _added(call, call["index"], along))
    alpha = Magnitude.of(abs(float(call["alpha"] if call["alpha"] is not None else 1.0)))
    slot = "source" if call["source"] is not None else "src"
    peak = x.peak + written.peak * alpha * float(most)
    return affine(call, {"self": ONE, slot: root(most) * alpha}, peak=peak, reduction=most + 1)


@written_out("aten.scatter_reduce")
def _reduced(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool) -> Tensor:
    """Sums and means; a mean divides by how many there are."""
    if reduce not in ("sum", "mean"):
        return NotImplemented
    counts = torch.zeros_like(self).scatter_add(dim, index, torch.ones_like(src))
    total = (self if include_self else self.where(counts == 0, 0.0)).scatter_add(dim, index, src)
    return total if reduce == "sum" else total / (counts + 1 if include_self else counts.clamp(min=1))
