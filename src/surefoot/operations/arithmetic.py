"""Sums, differences, means, products and quotients, entry by entry and with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, largest
from surefoot.graph.nodes import run_widened
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms.hermitian import gamma
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import (
    ONE,
    ZERO,
    affine,
    aligned,
    broadcast_copies,
    broadcast_dims,
    normalized_dim,
    normalized_dims,
    root,
    size_of,
    unless_along,
)
from surefoot.operations.composed_series import product_along, quotient_along
from surefoot.operations.gram import is_shift, shift_rows
from surefoot.operations.record import Form, GramRows, InSingle, declare, operation
from surefoot.operations.softmax import summed
from surefoot.operations.sparsity import Sparsity, entrywise_product, linear_terms
from surefoot.scalar import Rounded, ScalarFunction
from surefoot.scalar.rounded import SMALL


def _fused_sum(o: dict[str, Any], sign: float = 1.0, reverse: bool = False) -> ScalarFunction | None:
    alpha = o.get("alpha")
    first, second = (o["other"], o["self"]) if reverse else (o["self"], o["other"])
    scaled = second if alpha in (None, 1) else second * float(alpha)
    if not isinstance(first, ScalarFunction) and not isinstance(scaled, ScalarFunction):
        return None
    total: ScalarFunction = first + scaled if sign > 0 else first - scaled
    return total


def _within(argument: Any, value: Tensor) -> Rounded:
    """An argument of a folded operation: a number, or a tensor with the errors of its entries."""
    if not isinstance(argument, Enclosure):
        return Rounded.exact(float(argument))
    radius = argument.entry_radius()
    assert radius is not None
    return Rounded(argument.value.to(value), radius)


def _unless_exact(value: Tensor, proved: Rounded, pair: tuple[Rounded, Rounded], exact: Tensor) -> Tensor:
    """The errors of a result; none where both arguments and the operation are exact, nor where infinity, which a
    mask may hold, stays what it is.
    """
    first, second = pair
    errors = (proved.error + (value - proved.value).abs()) * (1 + 2.0**-51)
    exact = exact & (first.error == 0) & (second.error == 0)
    kept = torch.isinf(value) & (torch.isinf(first.value) | torch.isinf(second.value))
    return torch.where(exact | kept, 0.0, errors.nan_to_num(nan=torch.inf, posinf=torch.inf)).expand(value.shape)


def _is_power(x: Tensor) -> Tensor:
    """Where a number is a power of two, so that products with it are exact."""
    return torch.frexp(x)[0].abs() == 0.5


def _sum_errors(call: Call, value: Tensor) -> Tensor:
    r"""Of :math:`z = \mathrm{fl}(a + b)` the rounding is computed exactly: :math:`(a - (z - t)) + (b - t)` with
    :math:`t = z - a` is a + b - z (Knuth; Higham, section 4.3), and it is zero for a mask of 0 and -10⁹.
    """
    first, second = _within(call["self"], value), _within(call["other"], value)
    alpha = float(call["alpha"] if call["alpha"] is not None else 1.0)
    if call.op == "aten.rsub":
        first, second = second, first
    second = second * (alpha if call.op == "aten.add" else -alpha) if abs(alpha) != 1 else second
    if abs(alpha) == 1 and (alpha < 0) is (call.op == "aten.add"):
        second = -second
    a, b = first.value, second.value
    part = value - a
    lost = (a - (value - part)) + (b - part)
    return _unless_exact(value, first + second, (first, second), lost == 0)


def _product_errors(call: Call, value: Tensor) -> Tensor:
    """A product is exact if a factor is zero, or a power of two and it does not underflow."""
    first, second = _within(call["self"], value), _within(call["other"], value)
    a, b = first.value, second.value
    normal = value.abs() >= SMALL
    return _unless_exact(
        value, first * second, (first, second), (a == 0) | (b == 0) | (normal & (_is_power(a) | _is_power(b)))
    )


def _quotient_errors(call: Call, value: Tensor) -> Tensor:
    """So is a quotient if the numerator is zero, or the denominator a power of two."""
    first, second = _within(call["self"], value), _within(call["other"], value)
    exact = (first.value == 0) | (_is_power(second.value) & (value.abs() >= SMALL))
    return _unless_exact(value, first / second, (first, second), exact)


def errors_added_up(call: Call, terms: int, products: bool = True) -> Tensor:
    r"""The errors of entries that are sums of at most k numbers, or products of two, with no other factors.

    Let A be the operation on the absolute values of its arguments, and B that on absolute values plus radii. Then
    :math:`|\sum a'b' - \sum ab| \le \sum(|a| + e_a)(|b| + e_b) - |a||b| = B - A`, and computing the sum, or mean,
    rounds by at most :math:`\gamma_{k+2}A` in any order. A and B are sums of numbers that are not negative, off by
    at most :math:`\gamma_{k+8}` of themselves, their difference by :math:`2\gamma_{k+8}B`: :math:`4\gamma_{k+8}B`
    covers everything but products that underflow, each of which takes at most the smallest normal number from the
    sum, from A and from B. A sum loses nothing where all its terms are zero.
    """
    sizes = {call.names[slot]: e.value.double().abs() for slot, e in call.tensors.items()}
    whole = grown = run_widened(call.node, sizes)
    if call.inexact:
        radii = {call.names[slot]: e.entry_radius() for slot, e in call.inexact.items()}
        grown = run_widened(call.node, {n: size + radii[n] if n in radii else size for n, size in sizes.items()})
    lost = 8 * terms * SMALL * torch.ones_like(grown) if products else (grown > 0) * SMALL
    error = (grown - whole).clamp(min=0.0) + 4 * gamma(terms + 8) * grown + lost
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf)


@operation("aten.add", "aten.sub", "aten.rsub", form=Form.LINEAR, rows=aligned, scalar=_fused_sum,
           gram=GramRows(("other",), shift_rows, is_shift), entry_error=_sum_errors, evenly=True)  # fmt: skip
def addition(call: Call) -> Bounds:
    r"""``self ± alpha·other``: norm 1 and \|alpha\|, times √c for an argument broadcast to c copies.

    ``rsub`` is ``other - alpha·self``.
    """
    alpha = Magnitude.of(abs(float(call["alpha"] if call["alpha"] is not None else 1.0)))
    scaled = "self" if call.node.op == "aten.rsub" else "other"
    norms: dict[Slot, Magnitude] = {}
    offset, peak = ZERO, ZERO
    for slot in ("self", "other"):
        factor, argument = (alpha if slot == scaled else ONE), call[slot]
        peak = peak + size_of(argument) * factor
        if isinstance(argument, Enclosure):
            norms[slot] = root(broadcast_copies(argument.shape, call.shape)) * factor
        else:
            offset = offset + size_of(argument) * factor * root(call.numel)
    return affine(call, norms, offset=offset, peak=peak)


declare("aten.add", single=InSingle.PRODUCT, shifts=("self", "other"))
declare("aten.sub", scalar=partial(_fused_sum, sign=-1.0), single=InSingle.PRODUCT)
declare("aten.rsub", scalar=partial(_fused_sum, sign=-1.0, reverse=True))


@operation("aten.mul", "aten.multiply", form=Form.PRODUCT, factors=("self", "other"), rows=aligned,
           cost=entrywise_product, entry_error=_product_errors, taylor=product_along,
           single=InSingle.PRODUCT, evenly=True)  # fmt: skip
def product(call: Call) -> Bounds:
    r"""``self ∘ other``, entry by entry.

    * Curvature 1: :math:`\|a \circ b\|^2 = \sum a_i^2 b_j^2` over the pairs that meet, each pair at most once,
      so at most :math:`\|a\|^2\|b\|^2`; reached at a single entry.
    * Jacobian in :math:`a`: the root of the largest sum of :math:`b^2` over the entries one entry of :math:`a`
      meets.
    * Spread: :math:`ab - \hat a\hat b = (a - \hat a)b + \hat a(b - \hat b)`, and the same with the roles
      exchanged.
    """
    a, b = call["self"], call["other"]
    if not isinstance(b, Enclosure) or not isinstance(a, Enclosure):
        tensor, factor = (a, b) if isinstance(a, Enclosure) else (b, a)
        slot = "self" if isinstance(a, Enclosure) else "other"
        return affine(call, {slot: size_of(factor)}, peak=tensor.peak * size_of(factor))
    jacobian = {"self": meeting_norm(b, a.shape, call.shape), "other": meeting_norm(a, b.shape, call.shape)}
    centre = {
        "self": centre_meeting_norm(b, a.shape, call.shape),
        "other": centre_meeting_norm(a, b.shape, call.shape),
    }
    spread = minimum(
        jacobian["self"] * a.spread + centre["other"] * b.spread,
        centre["self"] * a.spread + jacobian["other"] * b.spread,
    )
    return Bounds(
        jacobian={slot: j for slot, j in jacobian.items() if slot in call.slots},
        curvature={("self", "other"): ONE},
        bound=minimum(jacobian["self"] * a.bound, jacobian["other"] * b.bound),
        peak=a.peak * b.peak,
        spread=spread,
        curvature_along=lambda costate: {("self", "other"): _product_along(costate, a.shape, b.shape, call.shape)},
        change_along=lambda costate: {("self", "other"): costate.row_spread(call.shape[0])},
    )


def _product_along(
    costate: Enclosure, a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...]
) -> Magnitude:
    r"""The form :math:`\sum_k\lambda_ka_{i(k)}b_k`, where b is not broadcast: at most the largest norm of the
    costates that one entry of a meets, by Cauchy-Schwarz over those and then over the entries of a.
    """
    if b == result:
        return meeting_norm(costate, a, result)
    return meeting_norm(costate, b, result) if a == result else costate.bound


def meeting_norm(other: Enclosure, mine: tuple[int, ...], result: tuple[int, ...]) -> Magnitude:
    r"""The norm of :math:`\text{mine} \mapsto \text{mine} \circ \text{other}` over the domain.

    Over the entries that one entry of mine meets, the root of the sum of squares; no two of them are the same
    entry of the other, so at most its norm, and at most its peak times the root of their number. From the
    centre it moves by at most the spread, and by the largest spread of a row times the root of the number.
    """
    copies = root(broadcast_copies(mine, result))
    move = minimum(other.spread, other.longest_move(True) * copies)
    from_centre = centre_meeting_norm(other, mine, result) + move
    return minimum(other.bound, other.peak * copies, from_centre)


def centre_meeting_norm(other: Enclosure, mine: tuple[int, ...], result: tuple[int, ...]) -> Magnitude:
    """The same at the centre as computed; infinite if that is not known.

    Entries are divided by a power of two first, so that squares do not overflow. The squares and their sum err by
    a relative (n + 8) u, and lose less than 2^-1022 each to underflow.
    """
    if not isinstance(other.value, torch.Tensor):
        return Magnitude.infinity()
    dims = broadcast_dims(mine, result)
    value = other.value.to(torch.float64)
    unit = 2.0 ** math.frexp(min(float(largest(value)), 1e307))[1]
    squares = (value / unit).expand(result).square()
    total = squares.sum(dim=dims) if dims else squares
    count = math.prod(result[k] for k in dims)
    return (largest(total).sqrt() * (1 + (count + 8) * 2.0**-52) + root(count) * 2.0**-511) * unit


def _pull_quotient(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    r""":math:`\lambda/b` and :math:`-\lambda z/b`, added up over the entries that an argument is copied to."""
    a, b = call["self"], call["other"]
    if call["rounding_mode"] is not None or not isinstance(a, Enclosure):
        return {}
    below = Rounded.exact(b.value.double() if isinstance(b, Enclosure) else float(b))
    slope = Rounded.exact(costate) / below
    found = {"self": _gathered(slope, a.shape, call.shape)}
    if isinstance(b, Enclosure):
        found["other"] = _gathered(-(slope * (Rounded.exact(a.value.double()) / below)), b.shape, call.shape)
    return {slot: pulled for slot, pulled in found.items() if slot in call.slots}


def _push_quotient(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded:
    r""":math:`(\tau_a - z\tau_b)/b`."""
    above, below = (
        Rounded.exact(part.value.double() if isinstance(part, Enclosure) else float(part))
        for part in (call["self"], call["other"])
    )
    total = Rounded.exact(tangents["self"] if "self" in tangents else torch.zeros_like(tangents["other"]))
    if "other" in tangents:
        total = total - (above / below) * tangents["other"]
    return (total / below).expand(call.shape)


def _gathered(terms: Rounded, mine: tuple[int, ...], result: tuple[int, ...]) -> Rounded:
    """The sums over the entries that each entry of an argument was copied to."""
    terms, dims = terms.expand(result), tuple(broadcast_dims(mine, result))
    total = summed(terms, dims) if dims else terms
    return Rounded(total.value.reshape(mine), total.error.reshape(mine))


@operation("aten.div", "aten.divide", "aten.true_divide",
           form=lambda node: Form.OTHER if node.arguments.get("rounding_mode") is not None else Form.QUOTIENT,
           rows=aligned, scalar=lambda o: None if o.get("rounding_mode") is not None else o["self"] / o["other"],
           entry_error=_quotient_errors, pullback=_pull_quotient, push=_push_quotient,
           taylor=quotient_along)  # fmt: skip
def quotient(call: Call) -> Bounds:
    r"""``self / other``, entry by entry, by a number or by a tensor that keeps away from zero.

    With :math:`|b| \ge \beta > 0` on the domain: :math:`\partial_a = 1/b`, :math:`\partial_b = -a/b^2`,
    :math:`\partial_{ab} = -1/b^2`, :math:`\partial_{bb} = 2a/b^3`, entry by entry. As for products, an entry of b
    that meets several of a counts with the root of the sum of their squares, and one of a with the root of the
    number of those of b. Where a and b move by :math:`s_a, s_b`, so do the last two, by the third derivatives
    :math:`2/b^3` and :math:`-6a/b^4`. Where both functions belong to one tensor the quotient is fused before it
    comes here.
    """
    a, b = call["self"], call["other"]
    if call["rounding_mode"] is not None:
        raise call.refuse("a division that rounds jumps; divide without rounding_mode")
    if not isinstance(b, Enclosure):
        if float(b) == 0:
            raise call.refuse("division by zero")
        size = ONE / abs(float(b))
        return affine(call, {"self": size}, peak=a.peak * size)
    smallest = _smallest(b)
    if not smallest > 0:
        infinite = Magnitude.infinity()
        slots = dict.fromkeys(call.slots, infinite)
        curvature = {("other", "other"): infinite, ("self", "other"): infinite}
        reason = "divides by a tensor that may reach zero: keep the divisor away from zero, or shrink the domain"
        return Bounds(slots, curvature, reason=reason)
    return _by_tensor(call, a, b, ONE / smallest)


def _smallest(b: Enclosure) -> float:
    """A lower bound of the absolute values of the entries; 0 if one may change its sign."""
    low, high = b.interval()
    smallest = torch.where((low > 0) | (high < 0), torch.minimum(low.abs(), high.abs()), 0.0)
    return float(smallest.min()) if smallest.numel() else math.inf


def _by_tensor(call: Call, a: Any, b: Enclosure, inverse: Magnitude) -> Bounds:
    copies_b = root(broadcast_copies(b.shape, call.shape))
    if isinstance(a, Enclosure):
        copies_a, met, whole = (
            root(broadcast_copies(a.shape, call.shape)),
            meeting_norm(a, b.shape, call.shape),
            a.bound,
        )
    else:
        copies_a, met, whole = ONE, size_of(a) * copies_b, size_of(a) * root(call.numel)
    jacobian = {"self": inverse * copies_a, "other": met * inverse**2}
    curvature = {("self", "other"): inverse**2, ("other", "other"): met * inverse**3 * 2.0}
    change = {
        ("self", "other"): inverse**3 * b.spread * 2.0,
        ("other", "other"): inverse**3 * (a.spread if isinstance(a, Enclosure) else ZERO) * 2.0
        + met * inverse**4 * b.spread * 6.0,
    }
    return Bounds(
        {slot: j for slot, j in jacobian.items() if slot in call.slots},
        {pair: c for pair, c in curvature.items() if all(slot in call.slots for slot in pair)},
        change,
        bound=whole * copies_a * inverse,
        peak=size_of(a) * inverse,
    )


def _summation_errors(call: Call, value: Tensor) -> Tensor:
    return errors_added_up(call, call["self"].numel // max(1, call.numel) + 1, products=False)


@operation("aten.sum", "aten.mean", form=Form.LINEAR, rows=unless_along(), entry_error=_summation_errors,
           evenly=True,
           cost=lambda use: Sparsity(terms=linear_terms(use, math.prod(use.shapes["self"]), "self")))  # fmt: skip
def summation(call: Call) -> Bounds:
    r"""Sums and means over c entries: norm √c and 1/√c (Cauchy-Schwarz, reached at equal entries)."""
    x = call["self"]
    dims = normalized_dims(call["dim"], len(x.shape))
    count = math.prod(x.shape[d] for d in dims)
    if call.node.op == "aten.mean":
        norm, peak = (ONE / max(1, count)).sqrt(), x.peak
    else:
        norm, peak = root(count), x.peak * float(count)
    return affine(call, {"self": norm}, peak=peak, reduction=max(1, count))


def _triangle(use: Use) -> Sparsity:
    """A triangle of n(n + 1)/2 entries on each line of n entries."""
    shape = use.shapes["self"]
    length = shape[use["dim"]] if shape else 1
    return Sparsity(terms=linear_terms(use, math.prod(shape) * (length + 1) // 2, "self"))


@operation("aten.cumsum", form=Form.LINEAR, rows=unless_along(), cost=_triangle)
def cumulative_sum(call: Call) -> Bounds:
    r"""Sums of the first j of n entries: norm :math:`1/(2\sin(\pi/(4n+2)))`.

    The matrix of ones on and below the diagonal is the inverse of the bidiagonal difference matrix :math:`B`, and
    :math:`BB^\top` is tridiagonal with 2 on the diagonal but for a corner 1 and -1 beside it: its eigenvalues are
    :math:`4\sin^2((2k-1)\pi/(4n+2))`, the smallest for k = 1.
    """
    dim = normalized_dim(call["dim"], len(call.shape))
    n = call.shape[dim] if call.shape else 1
    norm = Magnitude.of(1.0 / (2.0 * math.sin(math.pi / (4 * n + 2)))) * (1 + 1e-14)
    return affine(call, {"self": norm}, peak=call["self"].peak * float(n), reduction=n)
