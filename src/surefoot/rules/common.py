"""What several families of rules share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.enclosure import Enclosure
from surefoot.magnitude import Magnitude, maximum
from surefoot.rules.registry import Bounds, Call, Slot

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
    rowwise: bool = False,
    rows: Magnitude | None = None,
    orthogonal: bool = False,
    peak: Magnitude | None = None,
    reduction: int = 1,
) -> Bounds:
    """A map that is affine in all its arguments together: its Jacobians are constant, it has no curvature.

    Args:
        norms: operator norm of the linear part, by slot.
        offset: norm of the value at zero.
    """
    return Bounds(
        jacobian={slot: norm for slot, norm in norms.items() if slot in call.slots},
        offset=offset,
        rowwise=rowwise,
        rows=rows,
        orthogonal=orthogonal,
        peak=peak,
        reduction=reduction,
    )


def same_norm(call: Call, norm: Magnitude = ONE) -> dict[Slot, Magnitude]:
    """One norm for every real-valued argument."""
    return dict.fromkeys(call.slots, norm)


def largest_peak(call: Call) -> Magnitude:
    """The largest entry of any argument: that of the result, if it only moves numbers."""
    return maximum(ZERO, *(e.peak for e in call.slots.values()))


def spatial(value: Any, dims: int) -> tuple[int, ...]:
    """An int, a list of one, or a list of ``dims`` ints, as ``dims`` ints."""
    items = [value] if isinstance(value, int) else list(value)
    return tuple(items * dims if len(items) == 1 else items)


def normalized_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def broadcast_copies(shape: Sequence[int], result: Sequence[int]) -> int:
    """How many entries of the result each entry of a broadcast argument goes to."""
    return math.prod(result) // max(1, math.prod(shape))


def keeps_rows(e: Enclosure, call: Call) -> bool:
    """Whether an argument has as many rows as the result."""
    return bool(isinstance(e.spec, tuple) or e.shape[:1] == call.shape[:1])


def multiplicity(index: Tensor | None, otherwise: int) -> int:
    """How often the most frequent index occurs; ``otherwise`` if the indices are not known."""
    if not isinstance(index, Tensor) or index.device.type == "meta":
        return otherwise
    if index.numel() == 0:
        return 0
    return int(torch.unique(index, return_counts=True)[1].max())


def as_rows(values: Sequence[float] | np.ndarray) -> Magnitude:
    """Per-row numbers as magnitudes."""
    return Magnitude.of(np.asarray(values, dtype=np.float64))
