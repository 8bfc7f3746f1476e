r"""One scalar function on every entry.

For :math:`z_i = a(x_i)` the Jacobian is diagonal and the second derivative is a diagonal tensor, so their norms
are :math:`\sup|a'|` and :math:`\sup|a''|` over what the entries can reach (Lemma smooth_elt_wise, item 1, with
the maximum). The suprema come from ball arithmetic (:mod:`surefoot.scalar`), entry by entry where the centre is
known. They are reached up to the width of the tables there: a relative 1e-8 over one interval for all entries,
some 1e-4 of the function's range where every entry has its own. Contracted with a costate the second derivative is
the diagonal matrix of the :math:`\lambda_ia''(x_i)`, whose norm is the largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, norm, once, row_norms
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.operations.arithmetic import meeting_norm
from surefoot.operations.call import Bounds, Call, Slot
from surefoot.operations.common import ONE, ZERO, aligned, batch, entries, root, top, weighed
from surefoot.operations.record import Form, operation
from surefoot.operations.scalar_taylor import scalar_along
from surefoot.operations.softmax import summed
from surefoot.scalar import (
    Rounded,
    ScalarFunction,
    range_on,
    rounded_derivatives,
    rounded_slope,
    sup_on,
    supremum,
    sups_on,
)

_FAR = 32.0
_LINEAR = 0.5  # over shorter distances a range says no more than the slope
_PART = 2**16


def _evaluation_error(call: Call, value: Tensor) -> Magnitude:
    """How far the computed values are from the exact ones: 8 units for one elementary function, and as the errors
    of the steps add up for others (:mod:`surefoot.scalar.rounded`). Where those say nothing, the exact value is in
    its enclosure by ball arithmetic.
    """
    x, function = call["x"].value, call["function"]
    if len(function.steps) <= 2 and not any(step.pieces for step in function.steps):
        return norm(value) * 2.0**-49 + root(call.numel) * 2.0**-1021
    parts = zip(x.reshape(-1).split(_PART), value.reshape(-1).split(_PART), strict=True)  # that fit into the cache
    errors = [entry_errors(function, *part) for part in parts]
    return norm(errors) * (1 + 2.0**-40)


def _folded_errors(call: Call, value: Tensor) -> Tensor:
    """The errors of all entries, for arguments within their radii."""
    radius = call["x"].entry_radius()
    return entry_errors(call["function"], call["x"].value, value, radius).expand(value.shape)


def entry_errors(function: ScalarFunction, x: Tensor, value: Tensor, radius: Tensor | None = None) -> Tensor:
    """How far computed values of a function may be from the exact ones, entry by entry; for arguments that are off
    by at most a radius, those of all of them.
    """
    within = Rounded.exact(x) if radius is None else Rounded(x, radius)
    proved = rounded_derivatives(function, within, 0)[0]
    errors = ((proved.error + (value - proved.value).abs()) * (1 + 2.0**-51)).expand(value.shape).clone()
    unsure = ~torch.isfinite(errors)
    if bool(unsure.any()):
        move = within.error.expand(x.shape)[unsure]
        ends = (x[unsure] + move).nextafter(torch.full_like(move, torch.inf))
        begins = (x[unsure] - move).nextafter(torch.full_like(move, -torch.inf))
        begins, ends = (torch.where(move > 0, end, x[unsure]) for end in (begins, ends))
        low, high = range_on(function, begins, ends)
        apart = torch.maximum(high - value[unsure], value[unsure] - low).clamp(min=0.0) * (1 + 2.0**-50)
        errors[unsure] = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return errors


def pullback(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """Every entry times the slope there, of which the error is known: 1 - y² and the like are not computed by
    subtraction (:func:`surefoot.scalar.rounded_slope`).
    """
    slope = rounded_slope(call["function"], Rounded.exact(call["x"].value))
    return {"x": slope * costate}


def _slopes(call: Call, slot: Slot) -> tuple[Tensor, Tensor]:
    """Enclosing intervals of the slopes: from a table, from all of the line, from the centre."""
    x, function = call["x"], call["function"]
    low, high = x.interval()
    least, most = range_on(function, low, high, 1)
    steepest = supremum(function, 1)
    here = rounded_derivatives(function, Rounded.exact(x.value), 1)[1]
    away = (derivative_moved(function, 1, x) + here.error) * (1 + 2.0**-50)
    low, high = here.value - away, here.value + away
    unit = 2.0**-52 * (low.abs() + high.abs())
    near = torch.isfinite(low - high)
    least = torch.where(near, torch.maximum(least, low - unit), least).clamp(min=-steepest)
    return least, torch.where(near, torch.minimum(most, high + unit), most).clamp(max=steepest)


@operation("surefoot.scalar", error=_evaluation_error, form=Form.ELEMENTWISE, rows=aligned, taylor=scalar_along,
           pullback=pullback, symmetric=True, entry_error=_folded_errors, slopes=_slopes)  # fmt: skip
def scalar_function(call: Call) -> Bounds:
    r"""Slope and curvature over the reachable interval of every entry.

    Where the centre is known, an entry is at most as far from it as the ends of its range, which is what bounds
    saturating functions on large domains; so are rows. Where it is not, the largest value over [-peak, peak], or
    :math:`\|a(0)\|` and the slope times the norm of the argument.
    """
    x, function = call["x"], call["function"]
    if not isinstance(x.value, Tensor):
        return _without_centre(call, function, x)
    if x.numel == 0:
        return Bounds({"x": ZERO}, offset=ZERO)
    (low, high), count = x.interval(), math.prod(x.shape[:1])  # of rows; one number is one
    slopes, bends = sups_on(function, (1, 2), low, high)
    slope, curvature = (Magnitude.of(float(t.max())) for t in (slopes, bends))
    peak = spread = rows = None
    if x.shape:
        rows = x.row_spread(x.shape[0]) * Magnitude.of(slopes.reshape(x.shape[0], -1).amax(dim=1))
    if not slope * x.spread <= _LINEAR:
        lowest, highest = range_on(function, low, high)
        centre = function(x.value)
        distance = torch.maximum(highest - centre, centre - lowest).clamp(min=0.0) * (1 + 2.0**-50)
        peak = Magnitude.of(float(torch.maximum(lowest.abs(), highest.abs()).max()))
        spread = norm(distance)
        rows = None if rows is None else minimum(rows, row_norms(distance))
    return Bounds(
        jacobian={"x": slope},
        curvature={("x", "x"): curvature},
        peak=peak,
        spread=spread,
        rows=rows,
        curvature_along=lambda costate: {("x", "x"): top(weighed(entries(costate), bends))},
        rows_along=lambda costate: {("x", "x"): top(weighed(entries(costate), bends), count)},
        change_along=lambda costate: {("x", "x"): _change(costate, function, x, bends)},
        entries_along=lambda costate: weighed(entries(costate), bends),
        jacobian_change=lambda: {"x": top(derivative_moved(function, 1, x), count)},
        reason="" if curvature.is_finite else _reason(call, slope),
    )


def _change(costate: Enclosure, function: ScalarFunction, x: Enclosure, bends: Tensor) -> Magnitude:
    r"""With b the second derivative, :math:`\lambda b(x) - \hat\lambda b(\hat x) = (\lambda - \hat\lambda)b(x) +
    \hat\lambda(b(x) - b(\hat x))`; row by row.
    """
    moved = costate.entry_radius()
    assert moved is not None
    total = weighed(moved, bends) + weighed(costate.value.abs(), derivative_moved(function, 2, x))
    return top(total, math.prod(bends.shape[:1])) * (1 + 2.0**-51)


def derivative_moved(function: ScalarFunction, order: int, x: Enclosure) -> Tensor:
    """How far a derivative may be from that at the centre, entry by entry: the next derivative times the
    distance, or the range of values.
    """
    radius, (low, high) = x.entry_radius(), x.interval()
    assert radius is not None
    distance = weighed(radius, sup_on(function, order + 1, low, high))
    least, most = range_on(function, low, high, order)
    here = _at(x.value, function, order)
    across = torch.maximum(most - here[0], here[1] - least) * (1 + 2.0**-51)
    return torch.minimum(distance, torch.nan_to_num(across, nan=torch.inf, posinf=torch.inf))


@once
def _at(value: Tensor, function: ScalarFunction, order: int) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of a derivative at a point."""
    return range_on(function, value, value, order)


def _without_centre(call: Call, function: ScalarFunction, x: Enclosure) -> Bounds:
    slope, curvature = (_on_symmetric(function, order, float(x.peak)) for order in (1, 2))
    at_zero = Magnitude.of(supremum(function, 0, 0.0, 0.0))
    reach = float(x.peak)
    if reach < _FAR:
        peak = Magnitude.of(supremum(function, 0, -reach, reach))
    else:
        peak = minimum(Magnitude.of(supremum(function, 0)), at_zero + slope * x.peak)
    return Bounds(
        jacobian={"x": slope},
        curvature={("x", "x"): curvature},
        offset=root(call.numel) * at_zero,
        peak=peak,
        reason="" if curvature.is_finite else _reason(call, slope),
    )


def _on_symmetric(function: ScalarFunction, order: int, reach: float) -> Magnitude:
    """The supremum over [-reach, reach]; far out, that over the whole line if it is finite.

    Beyond 32 the two differ by nothing that matters, and the second is computed once.
    """
    if reach >= _FAR:
        everywhere = supremum(function, order)
        if math.isfinite(everywhere):
            return Magnitude.of(everywhere)
    return Magnitude.of(supremum(function, order, -reach, reach))


def _reason(call: Call, slope: Magnitude) -> str:
    if not slope.is_finite:
        return f"'{call.label}' jumps or has an unbounded slope within reach: use another, or shrink the domain"
    return (
        f"'{call.label}' has a kink or an unbounded curvature within reach: use a smooth activation such as "
        "soft-plus (surefoot.smooth), or shrink the domain"
    )


_PRELU_KINK = "PReLU has a kink at zero: use a smooth activation (surefoot.smooth), or shrink the domain"


def _slopes_laid(call: Call) -> tuple[int, ...]:
    """The shape in which the slopes meet the entries: one for all, or one per channel."""
    x, w = call["self"], call["weight"]
    if call.node.op == "aten.prelu" and w.numel > 1:
        return (*w.shape, *(1,) * (len(x.shape) - 2))
    return w.shape if w.numel > 1 else ()


def _pull_prelu(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """λ where an entry is positive, else wλ; and the sum of λ min(x, 0) over the entries that share a slope."""
    x, w, laid = call["self"].value, call["weight"], _slopes_laid(call)
    slope = Rounded.exact(costate)
    below = Rounded.exact(w.value.reshape(laid)) * slope
    shares = (Rounded.exact(x.clamp(max=0.0)) * slope).expand(x.shape)
    wide = (1,) * (x.dim() - len(laid)) + tuple(laid)
    dims = tuple(k for k, size in enumerate(wide) if size == 1)
    total = summed(shares, dims) if dims else shares
    return {
        "self": slope.choose(below, x > 0, x == 0),
        "weight": Rounded(total.value.reshape(w.shape), total.error.reshape(w.shape)),
    }


def _push_prelu(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded:
    """The tangent where an entry is positive, else w times it; and min(x, 0) times the tangent of its slope."""
    x, laid = call["self"].value, _slopes_laid(call)
    total = Rounded.exact(torch.zeros_like(x))
    if "self" in tangents:
        tangent = Rounded.exact(tangents["self"])
        below = Rounded.exact(call["weight"].value.reshape(laid)) * tangent
        total = tangent.choose(below, x > 0, x == 0)
    if "weight" in tangents:
        total = total + Rounded.exact(x.clamp(max=0.0)) * tangents["weight"].reshape(laid)
    return total


def _slopes_prelu(call: Call, slot: Slot) -> tuple[Tensor, Tensor] | None:
    """1 for positive entries, w for negative ones, and between the two where the sign may change; w is known."""
    if slot != "self" or call.inexact:
        return None
    low, high = call["self"].interval()
    below = call["weight"].value.reshape(_slopes_laid(call))
    least = torch.where(low > 0, 1.0, torch.where(high < 0, below, below.clamp(max=1.0)))
    return least, torch.where(low > 0, 1.0, torch.where(high < 0, below, below.clamp(min=1.0)))


@operation("aten.prelu", "aten._prelu_kernel", form=Form.ELEMENTWISE, rows=batch("self", 1), pullback=_pull_prelu,
           push=_push_prelu, slopes=_slopes_prelu)  # fmt: skip
def prelu(call: Call) -> Bounds:
    r""":math:`z = \max(x, 0) + w \min(x, 0)` with one slope w for all, or one per channel.

    :math:`|\partial_x|` is 1 for positive and :math:`|w|` for negative entries; :math:`\partial_w` is the root of
    the sum of squares of the negative entries that share a slope; :math:`\partial_{xw}` is 0 or 1 where an entry
    meets its slope, norm 1. Both vanish if all entries are positive. In x alone there is a kink at 0 unless out of
    reach.
    """
    x, w = call["self"], call["weight"]
    low, high = x.interval()
    negative, positive = bool((low <= 0).any()), bool((high >= 0).any())
    reachable = bool(((low <= 0) & (high >= 0)).any())
    steep = minimum(w.peak, meeting_norm(w, w.shape, w.shape))
    slope = maximum(ONE if positive else ZERO, steep if negative else ZERO)
    below = replace(x, value=x.value.clamp(max=0.0)) if isinstance(x.value, Tensor) else x  # moves no more than x
    shared = meeting_norm(below, _slopes_laid(call), call.shape) if negative else ZERO
    return Bounds(
        jacobian={"self": slope, "weight": shared},
        curvature={
            ("self", "self"): Magnitude.infinity() if reachable else ZERO,
            ("self", "weight"): ONE if negative else ZERO,
        },
        bound=slope * x.bound,
        peak=slope * x.peak,
        reason=_PRELU_KINK if reachable else "",
    )
