"""Dimensions, patches and broadcasting, counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


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
