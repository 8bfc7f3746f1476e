"""What several families of rules share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, maximum
from surefoot.operations.call import Bounds, Call, Slot

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
    """Upper bounds of the absolute values of the entries of a costate; two roundings are covered (sums do not
    underflow).
    """
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
    """The largest entry of the given arguments, by default of the real ones: that of the result, if it only moves
    numbers.
    """
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
