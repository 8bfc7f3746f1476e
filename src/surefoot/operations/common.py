"""What several families of rules share.

Shapes alone say how dimensions broadcast, and how rows of a result relate to rows of the arguments: no numbers are
looked at. Row i of a tensor is its i-th slice along the first dimension. A relation names the slots of which row i
alone enters row i of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.graph import Graph, Node
from surefoot.magnitude import Magnitude, maximum
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.record import Rows, record_of

ZERO = Magnitude.zero()
ONE = Magnitude.of(1.0)


def root(count: float) -> Magnitude:
    """The square root of a count."""
    return Magnitude.of(count).sqrt()


def affine(
    call: Call,
    norms: Mapping[Slot, Magnitude],
    *,
    offset: Magnitude = ZERO,
    rows: Magnitude | None = None,
    orthogonal: bool = False,
    peak: Magnitude | None = None,
    reduction: int = 1,
) -> Bounds:
    """A map that is affine in all its arguments together: its Jacobians are constant, it has no curvature.

    Args:
        call: the operation.
        norms: operator norm of the linear part, by slot. Tensors of whole numbers do not vary: what they
            contribute is part of the offset.
        offset: norm of the value at zero.
        rows: the spread of each row, where it is less than the norms say.
        orthogonal: the arguments end up in orthogonal parts of the result.
        peak: on the largest entry of the result.
        reduction: how many numbers are added up for one entry.
    """
    for slot, norm in norms.items():
        if slot not in call.slots:
            offset = offset + norm * call.tensors[slot].bound
    jacobian = {slot: norm for slot, norm in norms.items() if slot in call.slots}
    sizes = Magnitude(np.array([(norm * call.slots[slot].bound).log2 for slot, norm in jacobian.items()]))
    return Bounds(
        jacobian=jacobian,
        offset=offset,
        bound=offset + (sizes.norm() if orthogonal else sizes.sum()),  # the Jacobians hold everywhere
        rows=rows,
        orthogonal=orthogonal,
        peak=peak,
        reduction=reduction,
    )


def same_norm(call: Call, norm: Magnitude = ONE) -> dict[Slot, Magnitude]:
    """One norm for every real-valued argument."""
    return dict.fromkeys(call.slots, norm)


def entries(costate: Enclosure) -> Tensor:
    """Upper bounds of the absolute entries of a costate; two roundings are covered (sums do not underflow)."""
    radius = costate.radius()
    assert radius is not None
    bounds: Tensor = (costate.value.abs() + radius) * (1 + 2.0**-51)
    return bounds


def weighed(sizes: Tensor, curvatures: Tensor) -> Tensor:
    """Products of upper bounds, rounded up; where a curvature is infinite, so is the product with zero.

    One that is not zero but underflows becomes the smallest normal number.
    """
    product = torch.nan_to_num(sizes * curvatures, nan=torch.inf, posinf=torch.inf) * (1 + 2.0**-51)
    return torch.where((sizes > 0) & (curvatures > 0), product.clamp_min(2.0**-1022), product)


def top(values: Tensor, rows: int | None = None) -> Magnitude:
    """The largest entry of all, or of each of so many rows."""
    if not values.numel():
        return ZERO if rows is None else Magnitude.zero((rows,))
    return Magnitude.of(float(values.max()) if rows is None else values.reshape(rows, -1).amax(dim=1))


def largest_peak(call: Call, slots: Iterable[Slot] | None = None) -> Magnitude:
    """The largest entry of some arguments, by default the real ones: the result's, if it only moves numbers."""
    return maximum(ZERO, *(call.tensors[slot].peak for slot in (call.slots if slots is None else slots)))


def size_of(number: Any) -> Magnitude:
    """The absolute value of a plain number, or the largest entry of a tensor."""
    return number.peak if isinstance(number, Enclosure) else Magnitude.of(abs(float(number)))


def multiplicity(index: Tensor | None, otherwise: int) -> int:
    """How often the most frequent index occurs; ``otherwise`` if the indices are not known."""
    if not isinstance(index, Tensor) or index.device.type == "meta":
        return otherwise
    if index.numel() == 0:
        return 0
    return int(torch.unique(index, return_counts=True)[1].max())


def row_multiplicities(index: Tensor) -> Tensor:
    """For each slice along the first dimension, how often its most frequent entry occurs in it.

    >>> row_multiplicities(torch.tensor([[1, 2, 1], [0, 1, 2]])).tolist()
    [2.0, 1.0]
    """
    lines = index.reshape(index.shape[0], -1).sort(dim=1).values
    if lines.shape[1] == 0:
        return torch.zeros(index.shape[0], dtype=torch.float64)
    place = torch.arange(lines.shape[1], device=lines.device).expand(lines.shape)
    begins = torch.ones_like(lines, dtype=torch.bool)
    begins[:, 1:] = lines[:, 1:] != lines[:, :-1]
    start = torch.where(begins, place, 0).cummax(dim=1).values
    return (place - start + 1).amax(dim=1).double()


def spatial(value: Any, dims: int) -> tuple[int, ...]:
    """An int, a list of one, or a list of ``dims`` ints, as ``dims`` ints."""
    items = [value] if isinstance(value, int) else list(value)
    return tuple(items * dims if len(items) == 1 else items)


def normalized_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def normalized_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """The dimensions a reduction runs over, counted from the front; none given, or an empty list, means all."""
    if dims is None or dims == [] or rank == 0:
        return list(range(rank))
    return sorted({normalized_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)})


def broadcast_copies(shape: Sequence[int], result: Sequence[int]) -> int:
    """How many entries of the result each entry of a broadcast argument goes to."""
    return math.prod(result) // max(1, math.prod(shape))


def broadcast_dims(shape: Sequence[int], result: Sequence[int]) -> list[int]:
    """The dimensions of the result along which an argument is repeated."""
    padded = (1,) * (len(result) - len(shape)) + tuple(shape)
    return [k for k, (mine, full) in enumerate(zip(padded, result, strict=True)) if mine == 1 and full != 1]


def rows_of(use: Use) -> frozenset[Slot]:
    """The slots of which row i alone enters row i of the result of this operation."""
    return record_of(use.node).row_slots(use)


def aligned(use: Use) -> list[Slot]:
    """Arguments that meet the result entry by entry and are not repeated along its first dimension."""
    rank = len(use.shape)
    return [slot for slot, shape in use.shapes.items() if rank and len(shape) == rank and shape[0] == use.shape[0]]


def batch(slot: Slot, rank: int = 2) -> Rows:
    """One argument, if it has at least so many dimensions: with one less it is a single sample."""
    return lambda use: [slot] if len(use.shapes.get(slot, ())) >= rank else []


def unless_along(slot: Slot = "self", key: str = "dim") -> Rows:
    """One argument, unless it is read along its first dimension; no dimension given means all of them."""

    def rows(use: Use) -> list[Slot]:
        shape = use.shapes[slot]
        return [slot] if shape and 0 not in normalized_dims(use[key], len(shape)) else []

    return rows


def separate(graph: Graph, nodes: Iterable[Node], varying: Iterable[str], samples: int) -> bool:
    """Whether each row of every result depends on the same row of the tensors that vary, and on no other.

    Only operations of which it is known are let through; for all others the answer is no, and derivatives are
    found without the help of it.
    """
    rows = set(varying)
    for node in nodes:
        if rows.isdisjoint(node.inputs):
            continue
        use = Use(node, graph.spec)
        read = {slot for slot, name in use.names.items() if name in rows}
        if not all(spec.shape[:1] == (samples,) for spec in node.specs) or not read <= record_of(node).row_slots(
            use
        ):
            return False
        rows.add(node.name)
    return True
