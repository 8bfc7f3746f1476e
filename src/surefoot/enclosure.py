r"""What is known about a tensor over a whole domain.

Let :math:`z(u)` be the value of a tensor as the variables :math:`u` range over a domain with centre
:math:`u^*`, and let :math:`\hat z` be its value at the centre *as computed in double precision*. An
:class:`Enclosure` is valid when for every :math:`u` of the domain

.. math::
    \|z(u)\|_2 \le \text{bound}, \quad \|z(u)\|_\infty \le \text{peak}, \quad
    \|z(u) - \hat z\|_2 \le \text{spread}, \quad \|z_i(u) - \hat z_i\|_2 \le \text{rows}_i,

    \|z(u^*) - \hat z\|_2 \le \text{error}, \quad
    \|Dz(u)[v]\|_2 \le \textstyle\sum_s \text{lipschitz}_s \|v_s\|_2 \text{ for all } v.

Rows are the slices along the first dimension: the samples of a batch, as long as they do not interact. The
spread is measured from the computed centre, so round-off is part of it and needs no separate treatment.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import frobenius_norm, spectral_norm

_More = ParamSpec("_More")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Spec:
    """Shape and element type of a tensor.

    >>> print(sf.graph.Spec((5, 4), torch.float32))
    5×4
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return int(torch.Size(self.shape).numel())

    @property
    def is_real(self) -> bool:
        """Whether its entries vary continuously: ids, masks and other integers do not."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True)
class Enclosure:
    """A tensor over a domain; see the module for what each field claims.

    Operations with several results have a tuple of specs. The value is the centre as computed, double precision,
    or ``None`` when it is not known; then the spread is infinite. ``is_constant`` says that no variable enters.
    (Lipschitz constants that are zero do not say so: on a domain that is a single point a product of two variables
    may be flat and yet curved.)
    """

    spec: Spec | tuple[Spec, ...]
    value: Any
    bound: Magnitude
    peak: Magnitude
    spread: Magnitude
    rows: Magnitude | None
    error: Magnitude
    lipschitz: Magnitude
    is_constant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a single tensor."""
        assert isinstance(self.spec, Spec)
        return self.spec.shape

    @property
    def is_inexact(self) -> bool:
        """Whether no variable enters, and the value as computed is off by some error."""
        return self.is_constant and self.value is not None and not self.error.is_zero

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        specs = self.spec if isinstance(self.spec, tuple) else (self.spec,)
        return sum(spec.numel for spec in specs)

    @cached_property
    def centre_norm(self) -> Magnitude:
        """The norm of the centre; the bound where it is not known."""
        return self.bound if self.value is None else norm(self.value)

    def row_spread(self, count: int) -> Magnitude:
        """A bound on the spread of each of ``count`` rows: its own where known, else that of the whole."""
        if self.rows is not None and self.rows.shape == (count,):
            return minimum(self.rows, self.spread)
        return Magnitude(np.full(count, self.spread.log2))

    def longest_move(self, within_rows: bool) -> Magnitude:
        """How far parts of it may be from the centre: as far as the whole, or as a row if they lie within rows."""
        apart = within_rows and self.rows is not None
        return minimum(self.spread, self.rows.max()) if apart and self.rows is not None else self.spread

    def row_norms(self, count: int) -> Magnitude:
        """A bound on the norm of each row over the domain."""
        if self.value is None or not self.shape or self.shape[0] != count:
            return Magnitude(np.full(count, self.bound.log2))
        return minimum(row_norms(self.value) + self.row_spread(count), self.bound)

    def centre_matrix_norm(self) -> Magnitude:
        """The spectral norm of the centre, as a matrix whose rows are its last dimension."""
        return matrix_norm(self.value) if isinstance(self.value, Tensor) else self.bound

    def matrix_norm(self) -> Magnitude:
        r"""A bound on :math:`\|Z\|_2 \le \|\hat Z\|_2 + \|Z - \hat Z\|_F` for that matrix over the domain."""
        return minimum(self.bound, self.centre_matrix_norm() + self.spread)

    def radius(self) -> Tensor | None:
        """How far each entry may be from the centre: one number for all, or one for each row, as a tensor that
        broadcasts against the value.
        """
        if not isinstance(self.value, Tensor):
            return None
        if self.rows is None or not self.shape:
            return self.spread.tensor(self.value)
        rows = minimum(self.rows, self.spread).tensor(self.value)
        return rows.reshape(-1, *[1] * (self.value.dim() - 1))

    def entry_radius(self) -> Tensor | None:
        """The same with one number for each entry where that is known."""
        return self.radius()

    def interval(self) -> tuple[Tensor, Tensor]:
        """Enclosing intervals of the entries: one per entry, or one for all when the centre is not known."""
        peak = torch.tensor(float(self.peak), dtype=torch.float64)
        radius = self.entry_radius()
        if radius is None:
            return -peak, peak
        peak = peak.to(self.value.device)
        infinity = torch.full_like(peak, torch.inf)  # one ulp outward for the rounding of each end
        low, high = (torch.where(radius == torch.inf, r, self.value + r) for r in (-radius, radius))
        return torch.nextafter(low, -infinity).maximum(-peak), torch.nextafter(high, infinity).minimum(peak)


def constant(value: Tensor, variables: int) -> Enclosure:
    """A tensor whose value is known exactly and does not vary."""
    zero = Magnitude.zero()
    spec = Spec(tuple(value.shape), value.dtype)
    number = value.to(torch.float64) if value.is_floating_point() else value
    size, peak = measure(number)
    return Enclosure(spec, number, size, peak, zero, None, zero, Magnitude.zero((variables,)), is_constant=True)


@dataclass(frozen=True)
class Computed(Enclosure):
    """A tensor that no variable enters, as computed."""

    entries: Any = None  # how far each entry may be from the exact one, in the shape of the value

    @classmethod
    def of(cls, value: Any, entries: Any, spec: Spec | tuple[Spec, ...], variables: int) -> Computed:
        """From value and errors; of several results both are tuples."""
        (size, peak), (error, farthest) = measure(value), measure(entries)
        rows = row_norms(entries) if isinstance(value, Tensor) and value.dim() else None
        none = Magnitude.zero((variables,))
        return cls(
            spec, value, size + error, peak + farthest, error, rows, error, none, is_constant=True, entries=entries
        )

    def entry_radius(self) -> Tensor | None:
        """How far each entry may be from the centre."""
        return self.entries if isinstance(self.value, Tensor) else None


def unknown_constant(spec: Spec | tuple[Spec, ...], variables: int, bound: Magnitude | None = None) -> Enclosure:
    """A tensor that does not vary but whose value is not known (it lives on ``meta``)."""
    infinite, none = Magnitude.infinity(), Magnitude.zero((variables,))
    specs = spec if isinstance(spec, tuple) else (spec,)
    numel = sum(part.numel for part in specs)
    size = peak = Magnitude.zero() if not numel else infinite if bound is None else bound
    if all(part.dtype == torch.bool for part in specs):
        peak = minimum(size, Magnitude.of(1.0))
        size = minimum(size, Magnitude.of(numel).sqrt())
    return Enclosure(spec, None, size, peak, infinite, None, infinite, none, is_constant=True)


_remembered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # what was computed from a tensor, by function


def remembered(value: Any) -> Any:
    """The same tensor, or several. Nobody writes to them, so what is computed from them alone is computed once."""
    for part in value if isinstance(value, tuple | list) else (value,):
        if isinstance(part, Tensor):
            _remembered.setdefault(part, {})
    return value


def _results(value: Any) -> dict[Any, Any] | None:
    return _remembered.get(value) if isinstance(value, Tensor) else None


def once(function: Callable[Concatenate[Any, _More], _Result]) -> Callable[Concatenate[Any, _More], _Result]:
    """The same function. Of a tensor that is remembered it computes a result once."""

    @functools.wraps(function)
    def looked_up(value: Any, *more: _More.args, **named: _More.kwargs) -> _Result:
        results = _results(value)
        if results is None:
            return function(value, *more, **named)
        key = function, more, *named.items()
        if key not in results:
            results[key] = function(value, *more, **named)
        return results[key]

    return looked_up


@once
def measure(value: Any) -> tuple[Magnitude, Magnitude]:
    """The Euclidean norm of a tensor, or of several together, and its largest absolute entry, rounded up.

    Double precision: a sum of n squares and its root have a relative error of at most (n + 8) 2**-53.
    """
    if isinstance(value, tuple | list):
        parts = [measure(item) for item in value]
        sizes, peaks = (Magnitude(np.array([part[k].log2 for part in parts])) for k in (0, 1))
        return sizes.norm(), peaks.max()
    if value.numel() == 0:
        return Magnitude.zero(), Magnitude.zero()
    if value.is_complex():
        value = torch.view_as_real(value.detach().resolve_conj())
    number = value.detach().to(torch.float64)
    peak = float(number.abs().max())
    if not math.isfinite(peak):
        return Magnitude.infinity(), Magnitude.infinity()
    if 1e-140 < peak < 1e140:  # no square over- or underflows enough to matter
        size = float(torch.linalg.vector_norm(number)) * (1 + (number.numel() + 8) * 2.0**-52)
    else:
        size = frobenius_norm(number)
    return Magnitude.of(size), Magnitude.of(peak)


def norm(value: Any) -> Magnitude:
    """The Euclidean norm of a tensor, or of several together, rounded up."""
    return measure(value)[0]


def largest(value: Any) -> Magnitude:
    """The largest absolute entry."""
    return measure(value)[1]


@once
def matrix_norm(value: Tensor) -> Magnitude:
    """The spectral norm of a tensor as a matrix whose rows are its last dimension."""
    if not value.numel():
        return Magnitude.zero()
    return Magnitude.of(spectral_norm(value.reshape(-1, value.shape[-1] if value.dim() else 1)))


@once
def row_norms(value: Tensor) -> Magnitude:
    """Norms of the slices along the first dimension, rounded up."""
    if not value.numel():
        return Magnitude.zero((value.shape[0],))
    flat = value.detach().reshape(value.shape[0], -1)
    scale = float(flat.abs().amax())
    if scale == 0 or not math.isfinite(scale):
        return Magnitude(np.full(len(flat), np.inf if scale else -np.inf))
    exact = Magnitude.of(torch.linalg.vector_norm(flat / scale, dim=1)) * scale
    # The sum of n squares, its root and the scaling are off by at most a relative (n + 8) u, underflow by less.
    return exact * (1 + (flat.shape[1] + 16) * 2.0**-52) + Magnitude.of(scale) * 2.0**-500
