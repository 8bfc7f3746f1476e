r"""How large a tensor can be on a domain, in norms alone.

For a tensor :math:`z(u)` of a program and u in a domain around :math:`u_0`, a :class:`Size` bounds from above

* its Euclidean norm, its largest entry, the norms of its slices along each dimension, and its norm as a matrix;
* :math:`\ell_s \ge \sup\|D_s z\|`, the Lipschitz constant in each variable s;
* where the program was run at the centre, the size of the difference of the tensor and what was computed there.

All are magnitudes in the log domain (:mod:`surefoot.magnitude`), so that a thousand layers do not overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.norms import batched_spectral_norm, frobenius_norm

LARGEST_MATRIX = 2e9  # multiplications that the norm of one matrix may take
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Size:
    """Upper bounds for one tensor over a domain.

    Attributes:
        shape: its shape.
        bound: of its Euclidean norm.
        peak: of its largest entry in absolute value.
        total: of the sum of the absolute values of its entries.
        slices: for each dimension, of the norm of any of its slices there.
        operator: of its norm as a matrix; with more than two dimensions, of any of its matrices.
        low: below all entries.
        high: above all entries.
        lipschitz: in each variable.
        value: as computed at the centre, in double precision; ``None`` if it was not.
        error: how far that is from the exact value at the centre.
        move: the size of the difference to it on the domain, whose own ``value`` and ``lipschitz`` say nothing.
    """

    shape: tuple[int, ...]
    bound: Magnitude
    peak: Magnitude
    total: Magnitude
    slices: tuple[Magnitude, ...]
    operator: Magnitude
    low: float
    high: float
    lipschitz: Magnitude
    value: Tensor | None = None
    error: Magnitude = Magnitude.zero()  # noqa: RUF009 - immutable
    move: Size | None = None

    @property
    def spread(self) -> Magnitude:
        """How far the tensor may be from its value at the centre."""
        return Magnitude.infinity() if self.move is None else self.move.bound

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slice_count(self, dimension: int) -> int:
        """The number of entries of a slice."""
        return self.numel // max(self.shape[dimension], 1)


def consistent(size: Size) -> Size:
    r"""The same, each bound sharpened by the others.

    :math:`\|z\|_\infty \le \|z\|_2 \le \|z\|_1 \le \sqrt n\|z\|_2 \le n\|z\|_\infty` for the tensor and its
    slices, a tensor of k slices has at most :math:`\sqrt k` times the norm of the largest, and entries are
    between -peak and peak.
    """
    peak = minimum(size.peak, size.bound, *size.slices, Magnitude.of(max(abs(size.low), abs(size.high))))
    bound = minimum(size.bound, size.total, peak * Magnitude.of(size.numel).sqrt())
    for count, each in zip(size.shape, size.slices, strict=True):
        bound = minimum(bound, each * Magnitude.of(count).sqrt())
    slices = tuple(
        minimum(each, bound, peak * Magnitude.of(size.slice_count(k)).sqrt()) for k, each in enumerate(size.slices)
    )
    top = float(peak)
    return replace(
        size,
        bound=bound,
        peak=peak,
        total=minimum(size.total, bound * Magnitude.of(size.numel).sqrt()),
        slices=slices,
        operator=minimum(size.operator, bound),
        low=max(size.low, -top),
        high=min(size.high, top),
    )


def unknown(shape: Sequence[int], lipschitz: Magnitude) -> Size:
    """Of a tensor of which nothing is known but how steep it is."""
    infinite = Magnitude.infinity()
    shape = tuple(shape)
    return Size(
        shape, infinite, infinite, infinite, (infinite,) * len(shape), infinite, -math.inf, math.inf, lipschitz
    )


def within(shape: Sequence[int], radius: Magnitude, lipschitz: Magnitude) -> Size:
    """Of a variable whose norm is at most a radius, without a centre."""
    shape = tuple(shape)
    size = unknown(shape, lipschitz)
    return consistent(replace(size, bound=radius, slices=(radius,) * len(shape), operator=radius))


def measured(value: Tensor, lipschitz: Magnitude) -> Size:
    """Of a constant tensor: norms of its entries, rounded up."""
    value = value.detach()
    value = value.double() if not value.dtype.is_floating_point or value.dtype != torch.float64 else value
    if not bool(torch.isfinite(value).all()):
        return replace(unknown(value.shape, lipschitz), value=value)
    bound = Magnitude.of(frobenius_norm(value))
    slices = tuple(_largest_slice(value, k) for k in range(value.ndim))
    low, high = (float(value.min()), float(value.max())) if value.numel() else (0.0, 0.0)
    peak = Magnitude.of(max(abs(low), abs(high)))
    shape = tuple(value.shape)
    operator = _operator_norm(value, bound)
    nothing = within(shape, Magnitude.zero(), Magnitude.zero())
    return consistent(
        Size(
            shape,
            bound,
            peak,
            Magnitude.infinity(),
            slices,
            operator,
            low,
            high,
            lipschitz,
            value,
            Magnitude.zero(),
            nothing,
        )
    )


def _largest_slice(value: Tensor, dimension: int) -> Magnitude:
    """The largest norm of a slice: sums of n squares have a relative error below (n + 2)u."""
    if not value.numel():
        return Magnitude.zero()
    top = float(value.abs().max())
    if not 1e-140 < top < 1e140:
        return Magnitude.of(top) * Magnitude.of(value.numel() // value.shape[dimension]).sqrt()
    rest = tuple(k for k in range(value.ndim) if k != dimension)
    squares = float(value.square().sum(dim=rest).max()) if rest else top * top
    count = value.numel() // value.shape[dimension]
    return (Magnitude.of(squares) * (1 + (count + 8) * 2 * _UNIT) + count * 1e-300).sqrt()


def _operator_norm(value: Tensor, bound: Magnitude) -> Magnitude:
    """The largest norm of the matrices of a tensor, if that is not too much work."""
    if value.ndim < 2 or not value.numel() or not bound.is_finite:
        return bound
    rows, columns = value.shape[-2:]
    if value.numel() * min(rows, columns) > LARGEST_MATRIX or min(rows, columns) == 1:
        return bound
    return Magnitude.of(float(batched_spectral_norm(value).max()))


def around(size: Size, centre: Size, move: Size, error: Magnitude) -> Size:
    """What a rule claims of a tensor, sharpened by how far it may be from its value at the centre.

    Readers use the bounds for the computed centre as well, so they never fall below its own norms.
    """

    def near(rule: Magnitude, at: Magnitude, moved: Magnitude) -> Magnitude:
        return maximum(minimum(rule, at + moved), at)

    step = float(move.peak) * (1 + 2.0**-50)
    low, high = centre.low - step, centre.high + step
    outward = 2.0**-50 * (abs(low) + abs(high)) if math.isfinite(low) and math.isfinite(high) else 0.0
    whole = replace(
        size,
        bound=near(size.bound, centre.bound, move.bound),
        peak=near(size.peak, centre.peak, move.peak),
        total=maximum(size.total, centre.total),
        operator=near(size.operator, centre.operator, move.operator),
        slices=tuple(map(near, size.slices, centre.slices, move.slices)),
        low=min(max(low - outward, size.low), centre.low),
        high=max(min(high + outward, size.high), centre.high),
        value=centre.value,
        error=error,
        move=move,
    )
    return consistent(whole)
