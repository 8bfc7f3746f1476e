r"""A scalar function of every entry along a segment.

Let :math:`x = q + \eta^mR + \eta^2E_2` with :math:`q = p + E_0 + \eta E_1` and p the polynomial (in the words of
:mod:`surefoot.taylor`). Then :math:`a(x) = a(q) + a'(\xi)(\eta^mR + \eta^2E_2)`: rest and :math:`e_2` are
multiplied by the largest slope within reach. What the Taylor polynomial of :math:`a\circ q` leaves out is
:math:`\eta^m` times the m-th Taylor coefficient of :math:`a\circ q` at some point of the segment (Taylor's
theorem), and by the formula of Faà di Bruno that is at most the coefficient of :math:`t^m` in :math:`\sum_i
A_i(\sum_{j\ge1}P_jt^j)^i`, where :math:`A_i \ge \sup|a^{(i)}|/i!` over what q reaches and :math:`P_j \ge
\sup|q^{(j)}|/j!`. For :math:`A_i` the smaller of the supremum over the line and :math:`|a^{(i)}(p_0)|/i!` plus the
move times the supremum of the next derivative; where these are infinite, the supremum over the reachable interval.

*Errors of the argument.* The coefficients of :math:`a\circ q` differ from those of :math:`a\circ p`. Between the
two, along :math:`p + s(E_0 + \eta E_1)`, the derivative of the j-th in s is the j-th coefficient of
:math:`a'(q_s)(E_0 + \eta E_1)`. That of :math:`\eta^i` in :math:`a'(q_s)` is at most the coefficient :math:`B_i`
of :math:`t^i` in :math:`\sum_k(k+1)A_{k+1}(\sum_jP_jt^j)^k`. So the first coefficient is off by :math:`B_0e_0`,
the second by :math:`B_0e_1 + B_1e_0` and the others, divided by :math:`\eta^2`, by :math:`\sum_{2\le j<m}(B_je_0 +
B_{j-1}e_1)\bar\eta^{j-2}`. For :math:`B_i` the largest entries of :math:`A_k` and :math:`P_j` in a row are enough.

*Round-off.* The Taylor coefficients :math:`a_i` of a at :math:`p_0` are computed with proved errors
(:func:`surefoot.scalar.rounded_derivatives`). Those of :math:`a\circ p` are :math:`\sum_ia_i[q^i]_j` with :math:`q
= p - p_0` and :math:`i \le j \le 4`. A power is the one before times q, sums of at most 4 products, so with at
most :math:`3\cdot5` roundings, and 5 more follow. So with :math:`f_i` the error of :math:`a_i` plus
:math:`\gamma(|a_i| + \text{that error})`, :math:`\gamma = 2^{-48}` being more than :math:`\gamma_{20}`, the j-th
is off by at most :math:`\sum_{i\ge1}f_i[|q|^i]_j`: the second by :math:`f_1P_1`, and, as
:math:`\sum_{j\ge1}|p_j|\bar\eta^{j-1} \le P_1` and :math:`\sum_{j\ge2}|p_j|\bar\eta^{j-2} \le P_2`, all the others
together, divided by :math:`\eta^2`, by :math:`f_1P_2 + P_1^2\sum_{i\ge2}f_i\rho^{i-2}` with :math:`\rho` the move.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from surefoot.operations.call import Moving
from surefoot.scalar import Rounded, ScalarFunction, rounded_derivatives, sup_on, supremum
from surefoot.scalar.bounds import HIGHEST_ORDER
from surefoot.taylor import (
    FLOOR,
    Coefficients,
    Series,
    TaylorModel,
    compose,
    is_finite,
    passed_on,
    rounded_up,
    shifted,
)

_PART = 2**14  # entries at a time: all intermediate results fit into the cache
_EVALUATION = 2.0**-48  # relative error of composing two polynomials


def scalar_along(moving: Moving) -> TaylorModel:
    """The model of a fused scalar function; of lower order where a derivative jumps and the next has no bound."""
    x, function = moving.slots["x"], moving.node.arguments["function"]
    found = composed(function, x.padded(moving.order).truncated(moving.order))
    for order in range(moving.order - 1, 1, -1):
        if found.tail is None or is_finite(found.tail):
            break
        found = composed(function, x.padded(order).truncated(order))
    return found


def composed(function: ScalarFunction, x: TaylorModel) -> TaylorModel:
    """The model of a(x)."""
    value = x.value
    if not value.numel():
        return TaylorModel((value, *(None,) * (x.order - 1)), x.length, rowwise=x.rowwise)
    if not x.moving:
        x = TaylorModel((value, torch.zeros_like(value), *x.coefficients[2:]), x.length, x.tail, x.rowwise)
    rows = value.shape[0] if x.rowwise else 1
    flat = [None if c is None else c.reshape(rows, -1) for c in x.coefficients]
    width = max(1, value.numel() // rows)
    tail = beyond = None
    if x.tail is not None:
        tail, beyond = x.tail.expand(rows, 4), x.reach_of_tail.expand(rows, 1)
    parts = []
    for start in range(0, rows, max(1, _PART // width)):
        here = slice(start, start + max(1, _PART // width))
        errors = None if tail is None or beyond is None else (tail[here], beyond[here])
        parts.append(_part(function, [None if c is None else c[here] for c in flat], errors, x.length))
    coefficients = tuple(
        None if column[0] is None else torch.cat(column).reshape(value.shape)
        for column in zip(*(part[0] for part in parts), strict=True)
    )
    return TaylorModel(coefficients, x.length, rounded_up(torch.cat([part[1] for part in parts])), x.rowwise)


def _part(
    function: ScalarFunction, p: Series, errors: tuple[Tensor, Tensor] | None, length: float
) -> tuple[Coefficients, Tensor]:
    """Coefficients and tail of some rows, from their coefficients, their tail and its reach."""
    centre, order = p[0], len(p)
    assert centre is not None
    taylor = rounded_derivatives(function, Rounded.exact(centre), order)
    least: list[Tensor | float] = [FLOOR] * order
    if errors is not None:
        first, second = errors[0][:, 1:2], errors[0][:, 2:3]
        least[:2] = first + length * second + FLOOR, second + FLOOR
    moves = shifted(p, length, least)
    move, speed, bent = moves[0], moves[1], moves[2] if order > 2 else None
    assert move is not None
    assert speed is not None
    bounds = [_largest(function, i, taylor, centre, move) for i in range(1, order + 1)]
    (left_out,) = compose([None, *bounds], moves, order, order)
    assert left_out is not None
    wrong = [c.error + c.bound * _EVALUATION for c in taylor[1:order]]
    columns = [left_out, taylor[0].error, wrong[0] * speed]
    if order > 2:
        later = _polynomial(wrong[1:], move) * speed.square()
        columns.append(later if bent is None else later.addcmul(wrong[0], bent))
    norms = [torch.linalg.vector_norm(column, dim=1, keepdim=True) for column in columns]
    own = torch.cat([*norms, *[torch.zeros_like(norms[0])] * (4 - len(norms))], dim=1)
    if errors is not None:
        (tail, beyond), largest = errors, [bound.amax(dim=1, keepdim=True) for bound in bounds]
        gain = _steepest(function, taylor, centre, move, beyond, largest[0])
        own = own + passed_on(tail, gain, *_turns(largest, moves, length))
    return (taylor[0].value, *compose([c.value for c in taylor], p, 1, order - 1)), own


def _turns(largest: list[Tensor], moves: Series, length: float) -> tuple[Tensor | float, Tensor | float]:
    r""":math:`\sum_{1\le j<m}B_j\bar\eta^{j-1}` and :math:`\sum_{2\le j<m}B_j\bar\eta^{j-2}`."""
    inner = [None if move is None else move.amax(dim=1, keepdim=True) for move in moves[1:]]
    slopes = [k * bound for k, bound in enumerate(largest, start=1)]
    first, *others = compose(slopes, [None, *inner], 1, len(moves) - 1)
    bend = _polynomial([torch.zeros_like(largest[0]) if b is None else b for b in others], length)
    return (bend * length if first is None else first + bend * length), bend


def _steepest(
    function: ScalarFunction, taylor: list[Rounded], centre: Tensor, move: Tensor, beyond: Tensor, within: Tensor
) -> Tensor:
    """The largest slope in each row with rest and error within reach, from that without them where it is known."""
    bend = _supremum(function, 2)
    if math.isfinite(bend):
        return (within + bend * beyond).clamp(max=_supremum(function, 1))
    return _largest(function, 1, taylor, centre, move + beyond).amax(dim=1, keepdim=True)


def _polynomial(coefficients: list[Tensor], at: Tensor | float) -> Tensor | float:
    """Σ c_i at^i; zero without coefficients."""
    if not coefficients:
        return 0.0
    total = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = c + total * at
    return total


def _largest(function: ScalarFunction, order: int, taylor: list[Rounded], centre: Tensor, reach: Tensor) -> Tensor:
    """A bound of |a^(order)|/order! within reach of the centre, entry by entry."""
    factorial = math.factorial(order)
    everywhere, next_one = _supremum(function, order), _supremum(function, order + 1)
    if next_one == 0.0 or (order < len(taylor) and math.isfinite(next_one)):
        bound = taylor[order].bound.add(reach, alpha=next_one / factorial)
        return bound.clamp_(max=everywhere / factorial) if math.isfinite(everywhere) else bound
    if math.isfinite(everywhere):
        return torch.full_like(centre, everywhere / factorial)
    low, high = centre - reach, centre + reach
    slack = (low.abs() + high.abs()) * 2.0**-52
    return sup_on(function, order, low - slack, high + slack) / factorial


@lru_cache(maxsize=4096)
def _supremum(function: ScalarFunction, order: int) -> float:
    return supremum(function, order) if order <= HIGHEST_ORDER else math.inf
