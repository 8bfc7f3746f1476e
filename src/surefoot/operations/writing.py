r"""Tensors written into others at fixed places: slices, indices, masks.

Every entry of the result is one of the tensor written to, or one that is written, or a sum where they are added
up: matrices of zeros and ones as in :mod:`surefoot.operations.layout`.

* *Written over*: each entry of the result comes from one of the two, so they end up in orthogonal parts, the
  tensor written to with norm 1 and what is written with the root of how often broadcasting copies an entry of it.
* *Added up*: rows of the matrix of what is written have at most c ones, c being the most entries that go to one
  place, and its columns at most one each, so that its norm is :math:`\sqrt c` (the rows are orthogonal).
* *Compared*: the largest, or smallest, of those that go to one place.

Numbers that vary are written over others at most once at each place: torch does not define which of two stays, and
its derivative counts both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.enclosure import Enclosure
from surefoot.graph.structure import Node, Ref
from surefoot.magnitude import Magnitude, maximum
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
from surefoot.torch_private import scattered

_aten: Any = torch.ops.aten
_WRITTEN = ("src", "source", "values")


def _within_rows(use: Use) -> Iterable[Slot]:
    """Both, unless places are counted along the first dimension."""
    dims = [use[key] for key in ("dim", "dim1", "dim2") if use[key] is not None]
    rank = len(use.shape)
    if not rank or not dims or 0 in [normalized_dim(dim, rank) for dim in dims]:
        return []
    return [slot for slot in ("self", *_WRITTEN) if len(use.shapes.get(slot, ())) and slot in use.shapes]


def _over(call: Call, copies: int = 1, most: int = 1) -> Bounds:
    """A tensor written over another, each entry so many times, at most so many of them to one place."""
    if most > 1 and call.varying.keys() & {*_WRITTEN}:
        raise call.refuse(
            "two numbers are written to one place, and which of them stays is not defined: write each place once, "
            "or add them up with index_add, scatter_add or accumulate=True"
        )
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
    return _over(call, most=multiplicity(call["index"].value, 1))


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
    return _over(call, most=_added(call, call["index"]) if isinstance(call["index"].value, Tensor) else 1)


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
    most = multiplicity(places, 1)
    if not call["accumulate"]:
        return _over(call, max(1, copies), most)
    norms = {"self": ONE, "values": root(max(1, most) * max(1, copies))}
    peak = x.peak + values.peak * float(max(1, most))
    return affine(call, norms, peak=peak, reduction=most + 1)


def _added(call: Call, index: Enclosure) -> int:
    """The most entries that go to one place: slices that share an index, or entries along a dimension."""
    if not isinstance(index.value, Tensor):
        return index.numel
    if call.op == "aten.index_add" or not index.shape:
        return multiplicity(index.value, 1)
    counts = torch.zeros(call.shape, dtype=torch.int64, device=index.value.device)
    counts.scatter_add_(call["dim"], index.value, torch.ones_like(index.value))
    return int(counts.max()) if counts.numel() else 0


@operation("aten.index_add", "aten.scatter_add", form=Form.LINEAR, rows=_within_rows, selects=("index",))
def add_at(call: Call) -> Bounds:
    r"""Slices or entries added at indices: norm 1, and √ of the most that go to one place, times \|alpha\|."""
    x, written = call["self"], call["source"] if call["source"] is not None else call["src"]
    most = max(1, _added(call, call["index"]))
    alpha = Magnitude.of(abs(float(call["alpha"] if call["alpha"] is not None else 1.0)))
    slot = "source" if call["source"] is not None else "src"
    peak = x.peak + written.peak * alpha * float(most)
    return affine(call, {"self": ONE, slot: root(most) * alpha}, peak=peak, reduction=most + 1)


def _compares(node: Node) -> bool:
    return node.arguments["reduce"] in ("amax", "amin")


@operation("aten.scatter_reduce", rows=_within_rows, selects=("index",), rounds=lambda node: not _compares(node))
def extreme_at(call: Call) -> Bounds:
    r"""The largest, or smallest, of the entries that go to one place along a dimension: slope 1 in both together.

    Each entry of either tensor goes to one place at most, and the largest of a group moves by at most the largest
    move in it, whose square is at most the sum of all: the squares of all moves together are at most
    :math:`\|\delta x\|^2 + \|\delta s\|^2`. A largest entry that leads by more than
    :math:`\sqrt2\,(r_x^2 + r_s^2)^{1/2} \ge |\delta_i| + |\delta_j|` over the second of its place keeps its lead,
    and the map is linear if all do; otherwise it has a kink.
    """
    x, written = call["self"], call["src"]
    if not _compares(call.node):
        raise call.refuse("products of so many numbers are not covered; multiply fewer at a time")
    kink = not _lead(call) > 0
    slots = [slot for slot in ("self", "src") if slot in call.slots]
    pairs = [(a, b) for k, a in enumerate(slots) for b in slots[k:]]
    return Bounds(
        jacobian=dict.fromkeys(slots, ONE),
        curvature=dict.fromkeys(pairs, Magnitude.infinity() if kink else ZERO),
        offset=ZERO,
        orthogonal=True,
        peak=maximum(x.peak, written.peak),
        reason="another entry may become the largest of its place, which makes a kink: shrink the domain"
        if kink
        else "",
    )


def _lead(call: Call) -> float:
    """By how much the entries that are taken at least stay ahead of the others of their places."""
    x, index, written = call["self"], call["index"].value, call["src"]
    if not all(isinstance(value, Tensor) for value in (x.value, index, written.value)) or not call.numel:
        return -math.inf
    sign = 1.0 if call["reduce"] == "amax" else -1.0
    base, given = sign * x.value.double(), sign * written.value.double()
    given = given[tuple(slice(0, size) for size in index.shape)]
    if call["include_self"] is False:
        read = torch.zeros_like(base).scatter(call["dim"], index, 1.0)
        base = base.masked_fill(read > 0, -math.inf)
    first = base.scatter_reduce(call["dim"], index, given, "amax")
    winners = given == first.gather(call["dim"], index)
    ties = (base == first).double().scatter_add(call["dim"], index, winners.double())
    behind = base.masked_fill(base == first, -math.inf)
    second = behind.scatter_reduce(call["dim"], index, given.masked_fill(winners, -math.inf), "amax")
    lead = torch.where(ties > 1, 0.0, first - second)
    radius = (x.spread * x.spread + written.spread * written.spread).sqrt() * math.sqrt(2.0)
    return float(lead.min()) * (1 - 2.0**-50) - float(radius) * (1 + 1e-12)


_MOST = 2**20  # factors of products at all places together that are written out


@written_out("aten.scatter_reduce")
def _reduced(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    """Sums, means and products; a mean divides by how many there are, a product is one of all numbers along the
    dimension, with 1 in place of those that go elsewhere.
    """
    if reduce in ("amax", "amin") or not self.dim():
        return NotImplemented
    counts = torch.zeros_like(self, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(index))
    kept = self if include_self else self.where(counts == 0, 1.0 if reduce == "prod" else 0.0)
    if reduce != "prod":
        total = kept.scatter_add(dim, index, src)
        return total if reduce == "sum" else total / (counts + 1 if include_self else counts.clamp(min=1))
    place = normalized_dim(dim, self.dim())
    if index.numel() * self.shape[place] > _MOST:
        return NotImplemented
    here = torch.arange(self.shape[place], device=index.device).reshape(-1, *[1] * (self.dim() - place))
    given = src[tuple(slice(0, size) for size in index.shape)].unsqueeze(place)
    factors = torch.where(here == index.unsqueeze(place), given, 1.0).prod(place + 1)
    missing = [(0, full - size) for full, size in zip(self.shape, factors.shape, strict=True)]
    return kept * functional.pad(factors, [amount for pair in reversed(missing) for amount in pair], value=1.0)


written_out("aten.scatter", when=lambda graph, node: node.arguments.get("reduce") is not None)(scattered)


@written_out("aten.index_reduce")
def _slices_reduced(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    if not self.dim():
        return NotImplemented
    place = normalized_dim(dim, self.dim())
    places = index.reshape(-1, *[1] * (self.dim() - place - 1)).expand(source.shape)
    return self.scatter_reduce(place, places, source, reduce, include_self=include_self)


@written_out("aten.put")
def _put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = self.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate)
    return flat.reshape(self.shape)
