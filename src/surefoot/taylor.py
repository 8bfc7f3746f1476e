r"""A tensor along a segment.

For parameters :math:`u(\eta) = u + \eta d`, :math:`0 \le \eta \le \bar\eta`, a :class:`TaylorModel` of order m
says

.. math:: z(\eta) = \sum_{j<m} c_j\eta^j + \eta^m R(\eta) + E(\eta), \qquad
    \|R_i(\eta)\|_2 \le \text{rest}_i, \quad \|E_i(\eta)\|_2 \le \text{error}_i

for every row i (the slices along the first dimension: samples, as long as they do not interact). The coefficients
are those of the Taylor polynomial at 0 as computed in double precision, ``rest`` bounds what the polynomial leaves
out and ``error`` the round-off. Both pass through an operation in the same way, times its Lipschitz constant.

Bounds are computed from non-negative numbers by fewer than 2²⁰ additions each, so with a relative error below
2⁻³⁰; :func:`rounded_up` adds 2⁻²⁶.
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

    ``outer`` reaches at least up to a_highest, q_0 is not looked at, and ``lowest`` is at least 1.
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


def shifted(coefficients: Series, length: float) -> list[Tensor | None]:
    r"""Bounds of the Taylor coefficients of a polynomial at any point of the segment.

    :math:`p(\eta + t) = \sum_i t^i \sum_{q\ge i}\binom qi p_q\eta^{q-i}`, so the i-th is at most
    :math:`\sum_q\binom qi|p_q|\bar\eta^{q-i}` in absolute value; with i = 0 and q ≥ 1 it is how far it moves.
    """
    absolute = [None if j == 0 or c is None else c.abs() for j, c in enumerate(coefficients)]
    result: list[Tensor | None] = []
    for i in range(len(absolute)):
        total: Tensor | None = None
        for q in range(max(i, 1), len(absolute)):
            part = absolute[q]
            if part is not None:
                weight = math.comb(q, i) * reach(length, q - i)
                total = part * weight if total is None else total.add(part, alpha=weight)
        result.append(total)
    return result


Coefficients = tuple[Tensor | None, ...]
UNIT = 2.0**-53
_UP = 1 + 2.0**-26


@dataclass(frozen=True)
class TaylorModel:
    """The coefficients c_0 to c_{m-1}, of which ``None`` stands for zero, up to the end ``length`` of the segment.

    The tail is rest and error side by side, shape (rows, 2) if the rows are samples (``rowwise``), or (1, 2) for
    the tensor as a whole; ``None`` is zero.
    """

    coefficients: Coefficients
    length: float
    tail: Tensor | None = None
    rowwise: bool = False

    @property
    def order(self) -> int:
        """How many coefficients are known."""
        return len(self.coefficients)

    @property
    def value(self) -> Tensor:
        """The tensor at the beginning of the segment."""
        first = self.coefficients[0]
        assert first is not None
        return first

    @property
    def is_constant(self) -> bool:
        """Whether it is the same all along the segment."""
        return self.tail is None and not self.moving

    @property
    def moving(self) -> list[tuple[int, Tensor]]:
        """The coefficients behind the first that are not zero, with their degrees."""
        return [(j, c) for j, c in enumerate(self.coefficients) if j and c is not None]

    @cached_property
    def norms(self) -> list[Tensor | None]:
        """Norms of the rows of the coefficients, shape (rows, 1), or of all of each, shape (1, 1)."""
        return [None if c is None else row_norms(c, self.rowwise) for c in self.coefficients]

    @cached_property
    def move(self) -> Tensor:
        """How far each row gets from the beginning, shape (rows, 1)."""
        return self.polynomial_move if self.tail is None else self.polynomial_move + self.reach_of_tail

    @property
    def reach_of_tail(self) -> Tensor:
        """What rest and error add at the end of the segment, shape (rows, 1)."""
        assert self.tail is not None
        weights = torch.tensor(
            [reach(self.length, self.order), 1.0], dtype=torch.float64, device=self.value.device
        )
        return (self.tail * weights).nan_to_num(nan=torch.inf, posinf=torch.inf).sum(dim=1, keepdim=True)

    @cached_property
    def polynomial_move(self) -> Tensor:
        """The same for the polynomial alone."""
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

    def truncated(self, order: int) -> TaylorModel:
        """The same with fewer coefficients: the others become part of the rest."""
        if order >= self.order:
            return self
        extra: Tensor | float = 0.0
        for j, size in list(enumerate(self.norms))[order:]:
            if size is not None:
                extra = extra + size * reach(self.length, j - order)
        if self.tail is None:
            if isinstance(extra, float):
                return TaylorModel(self.coefficients[:order], self.length, None, self.rowwise)
            tail = torch.cat([extra, torch.zeros_like(extra)], dim=1)
        else:
            rest = self.tail[:, :1] * reach(self.length, self.order - order) + extra
            tail = torch.cat([rest, self.tail[:, 1:]], dim=1)
        return TaylorModel(self.coefficients[:order], self.length, rounded_up(tail), self.rowwise)

    def merged(self) -> TaylorModel:
        """The same without rows of their own."""
        tail = self.tail
        if self.rowwise and tail is not None:
            tail = torch.linalg.vector_norm(tail, dim=0, keepdim=True)
        return TaylorModel(self.coefficients, self.length, tail, rowwise=False)


def row_norms(value: Tensor, rowwise: bool) -> Tensor:
    """Norms of the rows as a column, or of the whole as a number in a column."""
    flat = value.reshape(value.shape[0] if rowwise else 1, -1)
    return torch.linalg.vector_norm(flat, dim=1, keepdim=True)


def rounded_up(bound: Tensor) -> Tensor:
    """A bound with the round-off of its computation; what is not a number came from an infinite bound."""
    return (bound * _UP).nan_to_num_(nan=torch.inf, posinf=torch.inf)
