r"""Power series with tensors as coefficients, entry by entry; ``None`` is a zero coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def shifted(
    coefficients: Series, length: float, least: Sequence[Tensor | float] | None = None
) -> list[Tensor | None]:
    r"""Bounds of the Taylor coefficients of a polynomial at any point of the segment.

    :math:`p(\eta + t) = \sum_i t^i \sum_{q\ge i}\binom qi p_q\eta^{q-i}`, so the i-th is at most
    :math:`\sum_q\binom qi|p_q|\bar\eta^{q-i}` in absolute value; with i = 0 and q ≥ 1 it is how far it moves. The
    numbers ``least``, columns or one for all entries, are added to those that are not zero.
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
