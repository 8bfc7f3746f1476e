r"""A scalar function of every entry along a segment.

With :math:`x = p + \eta^mR + E` and :math:`p` the polynomial, :math:`a(x) = a(p) + a'(\xi)(\eta^mR + E)`: rest and
error are multiplied by the largest slope within reach. The Taylor coefficients of :math:`a\circ p` follow from
those of a at :math:`p_0`. What they leave out is :math:`\eta^m` times the m-th Taylor coefficient of :math:`a\circ
p` at some point of the segment (Taylor's theorem), and by the formula of Faà di Bruno that is at most the
coefficient of :math:`t^m` in :math:`\sum_i A_i(\sum_{j\ge1}P_jt^j)^i`, where :math:`A_i \ge \sup|a^{(i)}|/i!` over
what the entry reaches and :math:`P_j \ge \sup|p^{(j)}|/j!`. For :math:`A_i` the smaller of the supremum over the
line and :math:`|a^{(i)}(p_0)|/i!` plus the move times the supremum of the next derivative; where these are
infinite, the supremum over the reachable interval.

*Round-off.* The Taylor coefficients :math:`a_i` of a at :math:`p_0` are computed with proved errors :math:`e_i`
(:func:`surefoot.scalar.rounded_derivatives`). Those of :math:`a\circ p` are :math:`\sum_ia_i[q^i]_j` with
:math:`q = p - p_0`, sums of fewer than :math:`2^7` products of at most 6 factors each, so along the segment the
polynomial is off by at most :math:`e_0 + \sum_{i\ge1}(e_i + \gamma(|a_i| + e_i))\rho^i`, where :math:`\rho \ge
\sum_j|p_j|\bar\eta^j` and :math:`\gamma = 2^{-44}` is more than :math:`\gamma_{2^7+6}`; products that underflow
lose less than :math:`2^{-1000}` together.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from surefoot.operations.moving import Moving
from surefoot.scalar import Rounded, ScalarFunction, rounded_derivatives, sup_on, supremum
from surefoot.scalar.bounds import HIGHEST_ORDER
from surefoot.taylor import Coefficients, Series, TaylorModel, compose, rounded_up, shifted

_PART = 2**14  # entries at a time: all intermediate results fit into the cache
_EVALUATION = 2.0**-44  # relative error of composing two polynomials
_UNDERFLOW = 2.0**-1000


def scalar_along(moving: Moving) -> TaylorModel:
    """The model of a fused scalar function."""
    x = moving.slots["x"]
    if x.order < moving.order:  # an exact polynomial has zeros behind its last coefficient
        missing = (None,) * (moving.order - x.order)
        x = TaylorModel((*x.coefficients, *missing), x.length, x.tail, x.rowwise)
    return composed(moving.node.arguments["function"], x.truncated(moving.order))


def composed(function: ScalarFunction, x: TaylorModel) -> TaylorModel:
    """The model of a(x)."""
    value = x.value
    if not value.numel():
        return TaylorModel((value, *(None,) * (x.order - 1)), x.length, rowwise=x.rowwise)
    rows = value.shape[0] if x.rowwise else 1
    flat = [None if c is None else c.reshape(rows, -1) for c in x.coefficients]
    width = max(1, value.numel() // rows)
    tail = None if x.tail is None else x.tail.expand(rows, 2)
    beyond = None if x.tail is None else x.reach_of_tail.expand(rows, 1)
    parts = []
    for start in range(0, rows, max(1, _PART // width)):
        rows_here = slice(start, start + max(1, _PART // width))
        here = [None if c is None else c[rows_here] for c in flat]
        rest = None if tail is None else tail[rows_here]
        reach = None if beyond is None else beyond[rows_here]
        parts.append(_part(function, here, rest, reach, x.order, x.length))
    coefficients = tuple(
        None if column[0] is None else torch.cat(column).reshape(value.shape)
        for column in zip(*(part[0] for part in parts), strict=True)
    )
    return TaylorModel(coefficients, x.length, rounded_up(torch.cat([part[1] for part in parts])), x.rowwise)


def _part(
    function: ScalarFunction, p: Series, tail: Tensor | None, beyond: Tensor | None, order: int, length: float
) -> tuple[Coefficients, Tensor]:
    """Coefficients and tail of some rows."""
    centre = p[0]
    assert centre is not None
    taylor = rounded_derivatives(function, Rounded.exact(centre), order)
    moves = shifted(p, length)
    reach = moves[0]
    coefficients: list[Tensor | None] = [taylor[0].value, *[None] * (order - 1)]
    rest = torch.zeros((len(centre), 1), dtype=torch.float64, device=centre.device)
    wrong, steepest = taylor[0].error, None
    if reach is not None:
        coefficients[1:] = compose([c.value for c in taylor], p, 1, order - 1)
        bounds = [_largest(function, i, taylor, centre, reach) for i in range(1, order + 1)]
        steepest = bounds[0]
        (left_out,) = compose([None, *bounds], moves, order, order)
        if left_out is not None:
            rest = torch.linalg.vector_norm(left_out, dim=1, keepdim=True)
        errors = [c.error + c.bound * _EVALUATION for c in taylor[1:order]]
        wrong = wrong + _majorised(errors, reach) + _UNDERFLOW
    error = torch.linalg.vector_norm(wrong, dim=1, keepdim=True)
    own = torch.cat([rest, error], dim=1)
    if tail is not None and beyond is not None:
        own = own + _steepest(function, taylor, centre, reach, beyond, steepest) * tail
    return tuple(coefficients), own


def _steepest(
    function: ScalarFunction,
    taylor: list[Rounded],
    centre: Tensor,
    reach: Tensor | None,
    beyond: Tensor,
    within: Tensor | None,
) -> Tensor:
    """The largest slope in each row with rest and error within reach, from that without them where it is known."""
    bend = _supremum(function, 2)
    if within is not None and math.isfinite(bend):
        return (within.amax(dim=1, keepdim=True) + bend * beyond).clamp(max=_supremum(function, 1))
    farthest = beyond.expand_as(centre) if reach is None else reach + beyond
    return _largest(function, 1, taylor, centre, farthest).amax(dim=1, keepdim=True)


def _majorised(bounds: list[Tensor], reach: Tensor) -> Tensor:
    """Σ e_i reach^i for i ≥ 1."""
    total = bounds[-1]
    for bound in reversed(bounds[:-1]):
        total = torch.addcmul(bound, total, reach)
    return total * reach


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
