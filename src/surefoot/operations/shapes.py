"""What shapes alone say: dimensions and broadcasting, and how rows of a result relate to rows of the arguments.

No numbers are looked at. Row i of a tensor is its i-th slice along the first dimension. A relation names the slots
of which row i alone enters row i of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from surefoot.graph import Graph, Node
from surefoot.operations.call import Slot, Use
from surefoot.operations.record import Rows, record_of


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
