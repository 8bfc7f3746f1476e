r"""One scalar function on every entry.

For :math:`z_i = a(x_i)` the Jacobian is diagonal and the second derivative is a diagonal tensor, so their norms
are :math:`\sup|a'|` and :math:`\sup|a''|` over what the entries can reach (Lemma smooth_elt_wise, item 1, with
the maximum). The suprema come from ball arithmetic (:mod:`surefoot.scalar`), entry by entry where the centre is
known.
"""

from __future__ import annotations

import math

from torch import Tensor

from surefoot.calculus.enclosure import Enclosure
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.rules.common import ONE, root
from surefoot.rules.registry import Bounds, Call, register_rule
from surefoot.scalar import ScalarFunction, sup_on, supremum

_FAR = 32.0


@register_rule("surefoot.scalar")
def scalar_function(call: Call) -> Bounds:
    """Slope and curvature over the reachable interval of every entry; bounded by the largest value there, or by
    what the slope makes of the argument's norm from ‖a(0)‖ on.
    """
    x, function = call["x"], call["function"]
    slope, curvature, rows = _constants(function, x, call)
    peak = _peak(function, x, slope)
    reason = "" if curvature.is_finite else _reason(call)
    return Bounds(
        jacobian={"x": slope},
        curvature={("x", "x"): curvature},
        offset=root(call.numel) * _value_at_zero(function),
        peak=peak,
        rows=rows,
        rowwise=True,
        reduction=1,
        reason=reason,
    )


def _constants(
    function: ScalarFunction, x: Enclosure, call: Call
) -> tuple[Magnitude, Magnitude, Magnitude | None]:
    low, high = x.interval()
    if not isinstance(x.value, Tensor):
        slope, curvature = (_on_symmetric(function, order, float(high)) for order in (1, 2))
        return slope, curvature, None
    slopes = sup_on(function, 1, low, high)
    curvature = float(sup_on(function, 2, low, high).max())
    rows = None
    if x.value.dim() and x.value.numel():
        per_row = slopes.reshape(x.shape[0], -1).amax(dim=1)
        rows = x.row_spread(x.shape[0]) * Magnitude.of(per_row)
    return Magnitude.of(float(slopes.max())), Magnitude.of(curvature), rows


def _on_symmetric(function: ScalarFunction, order: int, reach: float) -> Magnitude:
    """The supremum over [-reach, reach]; far out, that over the whole line if it is finite.

    Beyond 32 the two differ by nothing that matters, and the second is computed once.
    """
    if reach >= _FAR:
        everywhere = supremum(function, order)
        if math.isfinite(everywhere):
            return Magnitude.of(everywhere)
    return Magnitude.of(supremum(function, order, -reach, reach))


def _peak(function: ScalarFunction, x: Enclosure, slope: Magnitude) -> Magnitude | None:
    """The largest value over what is reachable; far out, the value at zero and the slope say it."""
    if isinstance(x.value, Tensor):
        return None  # the centre and the spread say it
    reach = float(x.peak)
    if reach < _FAR:
        return Magnitude.of(supremum(function, 0, -reach, reach))
    return minimum(Magnitude.of(supremum(function, 0)), _value_at_zero(function) + slope * x.peak)


def _value_at_zero(function: ScalarFunction) -> Magnitude:
    return Magnitude.of(supremum(function, 0, 0.0, 0.0))


def _reason(call: Call) -> str:
    return (
        f"'{call.label}' has a kink or an unbounded curvature within reach: use a smooth activation such as "
        "soft-plus (surefoot.smooth), or shrink the domain"
    )


_PRELU_KINK = "PReLU has a kink at zero: use a smooth activation (surefoot.smooth), or shrink the domain"


@register_rule("aten.prelu")
def prelu(call: Call) -> Bounds:
    r""":math:`z = \max(x, 0) + w \min(x, 0)` with a slope w per channel.

    :math:`|\partial_x| \le \max(1, |w|)`; :math:`\partial_w` is at most the root of the sum of squares of the
    entries that share a slope, at most :math:`\|x\|`; :math:`\partial_{xw}` is 0 or 1 on the diagonal, norm 1.
    In x alone there is a kink at 0 unless out of reach.
    """
    x, w = call["self"], call["weight"]
    low, high = x.interval()
    reachable = bool(((low <= 0) & (high >= 0)).any())
    kink = Magnitude.infinity() if reachable else Magnitude.zero()
    slope = maximum(ONE, w.peak)
    shared = minimum(x.bound, x.peak * root(x.numel / max(1, w.numel)))
    return Bounds(
        jacobian={"self": slope, "weight": shared},
        curvature={("self", "self"): kink, ("self", "weight"): ONE},
        bound=slope * x.bound,
        peak=slope * x.peak,
        rowwise=True,
        reason=_PRELU_KINK if reachable else "",
    )
