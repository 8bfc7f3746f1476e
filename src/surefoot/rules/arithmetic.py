"""Sums, differences, means and products, entry by entry and with broadcasting."""

from __future__ import annotations

import math
from typing import Any

import torch

from surefoot.calculus.enclosure import Enclosure, largest
from surefoot.magnitude import Magnitude, minimum
from surefoot.rules.common import ONE, ZERO, affine, broadcast_copies, keeps_rows, normalized_dim, root
from surefoot.rules.registry import Bounds, Call, Slot, register_rule


@register_rule("aten.add", "aten.sub", "aten.rsub")
def addition(call: Call) -> Bounds:
    r"""``self ± alpha·other``: norm 1 and \|alpha\|, times √c for an argument broadcast to c copies."""
    alpha = abs(float(call["alpha"] if call["alpha"] is not None else 1.0))
    scaled = "self" if call.node.op == "aten.rsub" else "other"
    norms: dict[Slot, Magnitude] = {}
    offset, peak = ZERO, ZERO
    for slot in ("self", "other"):
        factor, argument = (alpha if slot == scaled else 1.0), call[slot]
        if isinstance(argument, Enclosure):
            norms[slot] = root(broadcast_copies(argument.shape, call.shape)) * factor
            peak = peak + argument.peak * factor
        else:
            size = Magnitude.of(abs(float(argument)) * factor)
            offset, peak = offset + size * root(call.numel), peak + size
    return affine(call, norms, offset=offset, rowwise=_rowwise(call), peak=peak)


def _rowwise(call: Call) -> bool:
    """Rows of the result meet the same rows of the arguments that have rows."""
    if not call.shape:
        return False
    return all(
        e.rows is None or (keeps_rows(e, call) and len(e.shape) == len(call.shape)) for e in call.varying.values()
    )


@register_rule("aten.mul", "aten.multiply")
def product(call: Call) -> Bounds:
    r"""``self ∘ other``, entry by entry.

    * Curvature 1: :math:`\|a \circ b\|^2 = \sum a_i^2 b_j^2` over the pairs that meet, each pair at most once,
      so at most :math:`\|a\|^2\|b\|^2`; reached at a single entry.
    * Jacobian in :math:`a`: the root of the largest sum of :math:`b^2` over the entries one entry of :math:`a`
      meets.
    """
    a, b = call["self"], call["other"]
    if not isinstance(b, Enclosure) or not isinstance(a, Enclosure):
        tensor, factor = (a, b) if isinstance(a, Enclosure) else (b, a)
        slot = "self" if isinstance(a, Enclosure) else "other"
        size = Magnitude.of(abs(float(factor)))
        return affine(call, {slot: size}, rowwise=True, peak=tensor.peak * size)
    jacobian = {"self": meeting_norm(b, a, call), "other": meeting_norm(a, b, call)}
    spread = minimum(_product_spread(a, b, call), jacobian["self"] * a.spread + jacobian["other"] * b.spread)
    return Bounds(
        jacobian={slot: j for slot, j in jacobian.items() if slot in call.slots},
        curvature={("self", "other"): ONE},
        bound=minimum(jacobian["self"] * a.bound, jacobian["other"] * b.bound),
        peak=a.peak * b.peak,
        spread=spread,
        rowwise=_rowwise(call),
    )


def meeting_norm(other: Enclosure, mine: Enclosure, call: Call) -> Magnitude:
    """The norm of ``mine ↦ mine ∘ other``: over the entries that one entry of mine meets, the root of the sum of
    squares; at most the norm of the other, and at most its peak times the root of their number.
    """
    copies = broadcast_copies(mine.shape, call.shape)
    best = minimum(other.bound, other.peak * root(copies))
    if isinstance(other.value, torch.Tensor):
        best = minimum(
            best, _meeting_at_centre(other.value, mine.shape, call.shape) + _meeting_spread(other, copies)
        )
    return best


def _meeting_spread(other: Enclosure, copies: int) -> Magnitude:
    entry = other.spread if other.rows is None else minimum(other.spread, other.rows.max())
    return minimum(other.spread, entry * root(copies))


def _meeting_at_centre(other: torch.Tensor, mine: tuple[int, ...], result: tuple[int, ...]) -> Magnitude:
    squares = other.expand(result).square()
    padded = (1,) * (len(result) - len(mine)) + tuple(mine)
    dims = [k for k, (m, r) in enumerate(zip(padded, result, strict=True)) if m == 1 and r > 1]
    total = squares.sum(dim=dims) if dims else squares
    count = math.prod(result[k] for k in dims)
    return largest(total).sqrt() * (1 + (count + 8) * 2.0**-52) + 1e-160


def _product_spread(a: Enclosure, b: Enclosure, call: Call) -> Magnitude:
    r"""From :math:`ab - a^*b^* = a^*(b - b^*) + (a - a^*)b^* + (a - a^*)(b - b^*)`."""
    if not isinstance(a.value, torch.Tensor) or not isinstance(b.value, torch.Tensor):
        return Magnitude.infinity()
    by_a = _meeting_at_centre(b.value, a.shape, call.shape) * a.spread
    by_b = _meeting_at_centre(a.value, b.shape, call.shape) * b.spread
    return by_a + by_b + a.spread * b.spread


@register_rule("aten.div", "aten.divide", "aten.true_divide")
def quotient(call: Call) -> Bounds:
    """Division by a number, or by a fixed tensor bounded away from zero: a product with its reciprocal.

    Division by a tensor that varies is covered where the divisor is the same tensor's scalar function, which is
    fused before; elsewhere it is a product with a reciprocal: write ``a * (1 / b)`` with b bounded below.
    """
    a, b = call["self"], call["other"]
    if not isinstance(b, Enclosure):
        size = Magnitude.of(1.0) / abs(float(b))
        return affine(call, {"self": size}, rowwise=True, peak=a.peak * size)
    return _by_tensor(call, a, b)


def _by_tensor(call: Call, a: Any, b: Enclosure) -> Bounds:
    r"""With :math:`|b| \ge \beta > 0` on the domain: :math:`\partial_a = 1/b`, :math:`\partial_b = -a/b^2`,
    :math:`\partial_{ab} = -1/b^2`, :math:`\partial_{bb} = 2a/b^3`, entry by entry; √c for a divisor broadcast c
    times.
    """
    low, high = b.interval()
    smallest = float(torch.where((low > 0) | (high < 0), torch.minimum(low.abs(), high.abs()), 0.0).min())
    if not smallest > 0:
        infinite = Magnitude.infinity()
        slots = dict.fromkeys(call.slots, infinite)
        curvature = {("other", "other"): infinite, ("self", "other"): infinite}
        reason = "divides by a tensor that may reach zero: keep the divisor away from zero, or shrink the domain"
        return Bounds(slots, curvature, reason=reason)
    inverse = Magnitude.of(1.0) / smallest
    copies_a = root(broadcast_copies(a.shape, call.shape)) if isinstance(a, Enclosure) else ONE
    copies_b = root(broadcast_copies(b.shape, call.shape))
    numerator = a if isinstance(a, Enclosure) else None
    peak = a.peak if isinstance(a, Enclosure) else Magnitude.of(abs(float(a)))
    size = minimum(numerator.bound, peak * copies_b) if numerator else peak * copies_b
    jacobian = {"self": inverse * copies_a, "other": size * inverse**2}
    curvature = {("self", "other"): inverse**2, ("other", "other"): size * inverse**3 * 2.0}
    bound = (numerator.bound * copies_a if numerator else peak * root(call.numel)) * inverse
    return Bounds(
        {slot: j for slot, j in jacobian.items() if slot in call.slots},
        {pair: c for pair, c in curvature.items() if all(slot in call.slots for slot in pair)},
        bound=bound,
        peak=peak * inverse,
        rowwise=_rowwise(call),
    )


@register_rule("aten.sum", "aten.mean")
def summation(call: Call) -> Bounds:
    r"""Sums and means over c entries: norm √c and 1/√c (Cauchy-Schwarz, reached at equal entries)."""
    x = call["self"]
    count = max(1, x.numel // max(1, call.numel))
    mean = call.node.op == "aten.mean"
    norm = root(count) / count if mean else root(count)
    dims = call["dim"]
    inner = dims is not None and all(normalized_dim(d, len(x.shape)) != 0 for d in _dims(dims)) and dims != []
    peak = x.peak if mean else x.peak * float(count)
    return affine(call, {"self": norm}, rowwise=inner, peak=peak, reduction=count)


def _dims(dims: int | list[int]) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


@register_rule("aten.cumsum")
def cumulative_sum(call: Call) -> Bounds:
    r"""Sums of the first j of n entries: norm at most :math:`1/(2\sin(\pi/(4n+2)))`, the exact norm of the
    lower-triangular matrix of ones (its inverse is a bidiagonal difference matrix with that smallest singular
    value).
    """
    dim = normalized_dim(call["dim"], len(call.shape))
    n = call.shape[dim] if call.shape else 1
    norm = Magnitude.of(1.0 / (2.0 * math.sin(math.pi / (4 * n + 2)))) * (1 + 1e-14)
    return affine(call, {"self": norm}, rowwise=dim != 0, peak=call["self"].peak * float(n), reduction=n)
