r"""A tensor along a segment.

For parameters :math:`u(\eta) = u + \eta d`, :math:`0 \le \eta \le \bar\eta`, a :class:`TaylorModel` of order m
says

.. math:: z(\eta) = \sum_{j<m} c_j\eta^j + \eta^m R(\eta) + E(\eta), \qquad
    E(\eta) = E_0 + \eta E_1 + \eta^2E_2(\eta),

with :math:`\|R_i(\eta)\|_2 \le \text{rest}_i` and :math:`\|E_{ki}\|_2 \le e_{ki}` for every row i (the slices
along the first dimension: samples, as long as they do not interact). The coefficients are those of the Taylor
polynomial at 0 as computed in double precision, ``rest`` bounds the remainder of the polynomial and E is the
round-off: :math:`E_0` and :math:`E_1` do not depend on :math:`\eta`, so the exact value and slope at the start are
:math:`c_0 + E_0` and :math:`c_1 + E_1`, and differences from them have no other error.

*Propagation.* If x is off by :math:`\delta = \eta^mR + E`, then :math:`f(\hat x + \delta) - f(\hat x) =
G(\eta)\delta(\eta)` with the mean :math:`G(\eta)` of :math:`Df` between the two. With :math:`\|G(\eta)\| \le g`,
:math:`\|G(\eta) - G(0)\| \le \eta t` and :math:`\|G(\eta) - G(0) - \eta G'(0)\| \le \eta^2b` ("gain", "turn" and
"bend") the product has the form of :math:`\delta` again, with (:func:`passed_on`)

.. math:: \text{rest}' = g\,\text{rest}, \quad e_0' = ge_0, \quad e_1' = ge_1 + te_0, \quad
    e_2' = ge_2 + te_1 + be_0 .

*Range.* Bounds are computed from non-negative numbers by fewer than 2²⁰ additions each, so with a relative error
below 2⁻³⁰; :func:`rounded_up` adds 2⁻²⁶. Norms of coefficients count as at least 2⁻²⁰⁰, which is more than they
lose by the underflow of squares. So no product of up to five of them underflows before the last factor, and the
loss at that factor, at most 2⁻¹⁰²² for each of the terms, is covered by the 2⁻⁹⁰⁰ that :func:`rounded_up` adds.
The same holds for entries of coefficients, sums of fewer than 2⁶⁰ products: where a partial product underflows,
the rest of the round-off bound, which is 2⁻⁵³ or more relative to these norms, is larger than the loss. Segments
whose length is not between 2⁻⁵⁰ and 2⁵⁰ are scaled by a power of two (:mod:`surefoot.calculus.segment.along`), so
that powers of the length do no harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Series = Sequence[Tensor | None]


def reach(length: float, degree: int) -> float:
    """A power of the length of a segment; infinite beyond the range of doubles.

    >>> reach(0.5, 2), reach(1e200, 2)
    (0.25, inf)
    """
    try:
        return length**degree
    except OverflowError:
        return math.inf


def compose(outer: Series, inner: Series, lowest: int, highest: int) -> list[Tensor | None]:
    r"""Coefficients ``lowest`` to ``highest`` of :math:`\sum_i a_i q(\eta)^i`, :math:`q = \sum_{j\ge1}q_j\eta^j`.

    ``outer`` has at least the coefficients up to a_highest, q_0 is not used, and ``lowest`` is at least 1.
    """
    base: dict[int, Tensor] = {j: c for j, c in enumerate(inner) if j and c is not None and j <= highest}
    total: dict[int, Tensor] = {}
    power = base
    for i in range(1, highest + 1):
        factor = outer[i]
        if factor is not None:
            for degree, c in power.items():
                if degree >= lowest:
                    total[degree] = factor * c if degree not in total else total[degree].addcmul(factor, c)
        if i < highest:
            power = _product(power, base, highest)
    return [total.get(degree) for degree in range(lowest, highest + 1)]


def _product(a: dict[int, Tensor], b: dict[int, Tensor], highest: int) -> dict[int, Tensor]:
    product: dict[int, Tensor] = {}
    for i, x in a.items():
        for j, y in b.items():
            if i + j <= highest:
                product[i + j] = x * y if i + j not in product else product[i + j].addcmul(x, y)
    return product


def shifted(
    coefficients: Series, length: float, least: Sequence[Tensor | float] | None = None
) -> list[Tensor | None]:
    r"""Bounds on the Taylor coefficients of a polynomial at any point of the segment.

    As :math:`p(\eta + t) = \sum_i t^i \sum_{q\ge i}\binom qi p_q\eta^{q-i}`, the i-th is at most
    :math:`\sum_q\binom qi|p_q|\bar\eta^{q-i}` in absolute value; the sum for i = 0 over q ≥ 1 bounds how far the
    polynomial moves. The numbers ``least``, columns or one for all entries, are added to those that are not zero.
    """
    absolute = [None if j == 0 or c is None else c.abs() for j, c in enumerate(coefficients)]
    result: list[Tensor | None] = []
    for i in range(len(absolute)):
        total: Tensor | None = None
        for q in range(max(i, 1), len(absolute)):
            part = absolute[q]
            if part is not None:
                weight = math.comb(q, i) * reach(length, q - i)
                if total is None and least is not None:
                    total = torch.add(torch.as_tensor(least[i]).to(part), part, alpha=weight)
                else:
                    total = part * weight if total is None else total.add(part, alpha=weight)
        result.append(total)
    return result


Coefficients = tuple[Tensor | None, ...]
UNIT = 2.0**-53
FLOOR = 2.0**-200  # the least value of norms
_UP = 1 + 2.0**-26
_LOST = 2.0**-900


@dataclass(frozen=True)
class TaylorModel:
    """The coefficients c_0 to c_{m-1} on a segment of this length; ``None`` stands for zero.

    The tail is the rest and the errors e_0, e_1, e_2 side by side, of shape (rows, 4) if the rows are samples
    (``rowwise``), or (1, 4) for the tensor as a whole; ``None`` stands for zero.
    """

    coefficients: Coefficients
    length: float
    tail: Tensor | None = None
    rowwise: bool = False

    @property
    def order(self) -> int:
        """The number of coefficients."""
        return len(self.coefficients)

    @property
    def value(self) -> Tensor:
        """The tensor at the start of the segment."""
        first = self.coefficients[0]
        assert first is not None
        return first

    @property
    def is_constant(self) -> bool:
        """Whether the tensor is the same along the whole segment."""
        return self.tail is None and not self.moving

    @property
    def moving(self) -> list[tuple[int, Tensor]]:
        """The coefficients after the first that are not zero, with their degrees."""
        return [(j, c) for j, c in enumerate(self.coefficients) if j and c is not None]

    @cached_property
    def norms(self) -> list[Tensor | None]:
        """Norms of the rows of the coefficients, shape (rows, 1), or of whole coefficients, shape (1, 1)."""
        return [None if c is None else row_norms(c, self.rowwise) + FLOOR for c in self.coefficients]

    @cached_property
    def move(self) -> Tensor:
        """A bound on how far each row moves from the start, shape (rows, 1)."""
        return self.polynomial_move if self.tail is None else self.polynomial_move + self.reach_of_tail

    @cached_property
    def reach_of_tail(self) -> Tensor:
        """A bound on rest and error at the end of the segment, shape (rows, 1)."""
        assert self.tail is not None
        weights = self.tail.new_tensor([reach(self.length, j) for j in (self.order, 0, 1, 2)])
        return (self.tail * weights).nan_to_num(nan=torch.inf, posinf=torch.inf).sum(dim=1, keepdim=True)

    @property
    def rest(self) -> Tensor:
        """The bound on R, shape (rows, 1)."""
        return self.errors[:, :1] if self.tail is None else self.tail[:, :1]

    @property
    def errors(self) -> Tensor:
        """The bounds e_0, e_1 and e_2, shape (rows, 3)."""
        return self.value.new_zeros((1, 3), dtype=torch.float64) if self.tail is None else self.tail[:, 1:]

    @property
    def error(self) -> Tensor:
        """A bound on E along the whole segment, shape (rows, 1)."""
        e = self.errors
        return e[:, :1] + self.length * (e[:, 1:2] + self.length * e[:, 2:])

    @cached_property
    def polynomial_move(self) -> Tensor:
        """A bound on how far the polynomial moves, shape (rows, 1)."""
        total = torch.zeros((1, 1), dtype=torch.float64, device=self.value.device)
        for j, size in enumerate(self.norms):
            if j and size is not None:
                total = total + size * reach(self.length, j)
        return total.nan_to_num(nan=torch.inf, posinf=torch.inf)

    @cached_property
    def sizes(self) -> Tensor:
        """A bound on the norm of each row, shape (rows, 1)."""
        first = self.norms[0]
        assert first is not None
        return first + self.move

    @cached_property
    def speed(self) -> Tensor:
        r"""A bound on :math:`\|z(\eta) - z(0)\|/\eta`, shape (rows, 1)."""
        return self._quotient(1)

    @cached_property
    def turn(self) -> Tensor:
        r"""A bound on :math:`\|z(\eta) - z(0) - \eta z'(0)\|/\eta^2`, shape (rows, 1)."""
        return self._quotient(2)

    def _quotient(self, degree: int) -> Tensor:
        first = self.norms[0]
        assert first is not None
        total = torch.full_like(first, FLOOR)
        for j, size in list(enumerate(self.norms))[degree:]:
            if size is not None:
                total = total + size * reach(self.length, j - degree)
        if self.tail is not None:
            powers = [reach(self.length, max(j - degree, 0)) * (j >= degree) for j in (self.order, 0, 1, 2)]
            total = total + (self.tail * self.tail.new_tensor(powers)).sum(dim=1, keepdim=True)
        return total.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def padded(self, order: int) -> TaylorModel:
        """The model of an exact polynomial, or of a constant, with zeros after its last coefficient."""
        missing = (None,) * (order - self.order)
        return TaylorModel((*self.coefficients, *missing), self.length, self.tail, self.rowwise)

    def truncated(self, order: int) -> TaylorModel:
        """The model with fewer coefficients: the others become part of the rest."""
        if order >= self.order:
            return self
        extra: Tensor | float = 0.0
        for j, size in list(enumerate(self.norms))[order:]:
            if size is not None:
                extra = extra + size * reach(self.length, j - order)
        if self.tail is None:
            if isinstance(extra, float):
                return TaylorModel(self.coefficients[:order], self.length, None, self.rowwise)
            tail = torch.cat([extra, extra.new_zeros((len(extra), 3))], dim=1)
        else:
            rest = self.tail[:, :1] * reach(self.length, self.order - order) + extra
            tail = torch.cat([rest, self.tail[:, 1:].expand(len(rest), 3)], dim=1)
        return TaylorModel(self.coefficients[:order], self.length, rounded_up(tail), self.rowwise)

    def merged(self) -> TaylorModel:
        """The model of the tensor as a whole, without rows."""
        tail = self.tail
        if self.rowwise and tail is not None:
            tail = torch.linalg.vector_norm(tail, dim=0, keepdim=True)
        return TaylorModel(self.coefficients, self.length, tail, rowwise=False)


def row_norms(value: Tensor, rowwise: bool) -> Tensor:
    """Norms of the rows as a column, or the norm of the whole as a column of one."""
    flat = value.reshape(value.shape[0] if rowwise else 1, -1)
    return torch.linalg.vector_norm(flat, dim=1, keepdim=True)


def is_finite(x: Tensor) -> bool:
    """Whether all entries are finite; if their sum is, which is quickly computed, they are."""
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())


def rounded_up(bound: Tensor) -> Tensor:
    """A bound plus the round-off of its computation; NaN comes from an infinite bound and becomes infinite."""
    return (bound * _UP + _LOST).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def passed_on(tail: Tensor, gain: Tensor | float, turn: Tensor | float, bend: Tensor | float) -> Tensor:
    """The tail of a function of a tensor with this tail; the bounds are numbers or columns. See the module."""
    first, second = tail[:, 1:2], tail[:, 2:3]
    turned, bent = torch.broadcast_tensors(turn * first, turn * second + bend * first)
    nothing = turned.new_zeros((len(turned), 2))
    return gain * tail + torch.cat([nothing, turned, bent], dim=1)
