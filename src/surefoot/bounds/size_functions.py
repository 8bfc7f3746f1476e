r"""What functions of entries, of fibres and of groups do to norms, and selections.

*Scalar functions.* :math:`J = \sup|f'|` and :math:`C = \sup|f''|` over the range of the entries, as
:math:`\|f''(x) \circ v \circ v\| \le \sup|f''|\,\|v\|^2`.

*Soft-max*: J is the largest eigenvalue of the covariance of a choice, at most ½, and C at most
:math:`\sqrt2/(3\sqrt3)`: it is the gradient of log-sum-exp, so :math:`D^2` is the third central moment of
:math:`v_i` with probability :math:`p_i`, whose values are at most :math:`\sqrt2` apart for a unit vector, and
:math:`|E(v - Ev)^3| \le \delta^3/(6\sqrt3)` on an interval of length :math:`\delta`. *Log-sum-exp*: J = 1, C = ½.

*Normalisation* of M numbers, :math:`g(x) = x/\rho_\epsilon` with :math:`\rho_\epsilon^2 = \|x\|^2/M +
\epsilon`, after the mean was subtracted, which is a projection: :math:`J = 1/\rho_\epsilon`, and on the
diagonal, where the norm of a symmetric tensor is reached (Banach), with :math:`t = \langle x, v\rangle`, the
second derivative is :math:`3t/(M\rho_\epsilon^3)(1 - t^2/(M\rho_\epsilon^2))`. So with :math:`\rho^2 =
\|x\|^2/M`

.. math:: C = \frac1{\sqrt M}\begin{cases} \kappa/\epsilon,\ \kappa = \tfrac32(\tfrac45)^{5/2} & \rho^2 \le
\epsilon/4 \\
    3\rho\epsilon/\rho_\epsilon^5 & \epsilon/4 \le \rho^2 \le \epsilon/2 \\
    (2/\sqrt3)/\rho_\epsilon^2 & \rho^2 \ge \epsilon/2 ,\end{cases}

which does not increase with :math:`\rho`: the smallest :math:`\rho` on the domain decides. A group has norm at
most :math:`\sqrt M` and entries at most :math:`\sqrt{M - 1}`. Its reciprocal deviation :math:`1/\rho_\epsilon`
has gradient :math:`-x/(M\rho_\epsilon^3)`, of norm at most :math:`M^{-1/2}/\rho_\epsilon^2`, and second
derivative :math:`(3 xx^\top/(M\rho_\epsilon^2) - I)/(M\rho_\epsilon^3)`, of norm at most
:math:`2/(M\rho_\epsilon^3)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from surefoot.bounds.claims import (
    HALF,
    INFINITE,
    ONE,
    UNIT,
    ZERO,
    Claim,
    dims_of,
    outward,
    result,
    root,
    units,
)  # fmt: skip
from surefoot.bounds.scalars import bounds, enclose
from surefoot.bounds.tensor_size import Size, consistent
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.norms.hermitian import up
from surefoot.program.ir import Node
from surefoot.program.scalars import Scalar

_SOFTMAX = Magnitude.of(math.sqrt(2) / (3 * math.sqrt(3))) * (1 + 1e-15)
_KAPPA = 1.5 * 0.8**2.5 * (1 + 1e-15)


# Scalar functions of every entry


def _scalar(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), function = arguments, node.options["function"]
    ends = torch.tensor([x.low, x.high], dtype=torch.float64)
    first, second = (Magnitude.of(float(bounds(function, order, *ends))) for order in (1, 2))
    if not second.is_finite and x.value is not None:
        second = _away_from_kinks(function, x)
    low, high = (float(end) for end in enclose(function, 0, *ends))
    is_square = function in (Scalar("square"), Scalar("power", (2.0,)))
    size = result(node, low=low, high=high, total=x.bound * x.bound if is_square else INFINITE)
    at_zero = float(function(torch.zeros((), dtype=torch.float64)))
    slope = Magnitude.of(float(bounds(function, 1, ends.clamp(max=0)[0], ends.clamp(min=0)[1])))
    if math.isfinite(at_zero) and slope.is_finite:  # |f(x)| ≤ |f(0)| + sup|f′| |x|, also on the way from 0
        offset = Magnitude.of(abs(at_zero)) * (1 + 2.0**-45)
        slices = tuple(each * slope + offset * root(x.slice_count(d)) for d, each in enumerate(x.slices))
        bound = x.bound * slope + offset * root(x.numel)
        size = consistent(replace(size, bound=minimum(size.bound, bound), slices=slices))
    # kernels err by a few units of the larger of argument, result and 1
    rounding = units(16, x.bound + size.bound + root(x.numel))
    return Claim({0: first}, size, rounding, {(0, 0): second})


def _away_from_kinks(function: Scalar, x: Size) -> Magnitude:
    """The curvature where every entry has a range of its own, so that it may stay on one side of a kink."""
    assert x.value is not None
    move = math.inf if x.move is None else up(float(x.move.peak))
    if not math.isfinite(move) or not x.numel:
        return INFINITE if x.numel else ZERO
    slack = 2.0**-50 * (x.value.abs() + move)
    low, high = x.value - move - slack, x.value + move + slack
    return Magnitude.of(float(bounds(function, 2, low.clamp(min=x.low), high.clamp(max=x.high)).max()))


# Fused primitives


def _covariance(x: Size, mask: Size | None, dim: int) -> Magnitude:
    r"""The norm of :math:`\mathrm{diag}(p) - pp^\top` over the domain, of any fibre: at most ½, at most the
    largest probability q, and at most :math:`2(1 - q)q` if q > ½ (sums of absolute values of rows). Where x moves
    by at most r, odds change by factors up to :math:`e^{\sqrt2r}`, and so do, at most, q and 1 - q.
    """
    if x.value is None or x.move is None or not x.numel or x.shape[dim] < 2:
        return HALF
    fibre = minimum(x.move.bound, *(each for d, each in enumerate(x.move.slices) if d != dim))
    value = x.value if mask is None or mask.value is None else x.value.masked_fill(mask.value == 0, -math.inf)
    largest = value.softmax(dim).amax(dim).nan_to_num(0.0)
    slack = (x.shape[dim] + 64) * 2.0**-51
    factor = math.exp(min(math.sqrt(2) * float(fibre), 700.0)) * (1 + slack)
    most, others = ((each + slack) * factor for each in (largest, 1 - largest))
    certain = torch.where(others < 0.5, 2 * others * (1 - others), 0.5)
    return minimum(HALF, Magnitude.of(float(torch.minimum(certain, most).max())) * (1 + 1e-12))


def _softmax(node: Node, arguments: Sequence[Size]) -> Claim:
    x = arguments[0]  # a mask may follow
    count = node.shape[node.options["dim"]]
    most = math.prod(node.shape) / max(count, 1)
    dim = node.options["dim"] % len(node.shape)
    slices = tuple(root(most) if d == dim else root(most / max(n, 1)) for d, n in enumerate(node.shape))
    size = result(
        node,
        bound=root(most),
        total=Magnitude.of(most) * (1 + 1e-12),
        peak=ONE,
        slices=slices,
        low=0.0,
        high=1.0 + 1e-12,
    )
    slope = _covariance(x, arguments[1] if len(arguments) > 1 else None, dim) if count > 1 else ZERO
    bend = minimum(_SOFTMAX, slope * math.sqrt(2.0000001)) if count > 1 else ZERO
    rounding = units(2 * count + 64, root(most)) + units(8, minimum(x.bound, root(most) * 750.0))
    return Claim({0: slope}, size, rounding, {(0, 0): bend})


def _logsumexp(node: Node, arguments: Sequence[Size]) -> Claim:
    x = arguments[0]  # a mask may follow
    count = x.shape[node.options["dim"]]
    slack = math.log(max(count, 1)) * (1 + 1e-14)
    size = result(node, low=outward(x.low, -1), high=outward(x.high + slack, 1))
    rounding = units(count + 32, root(size.numel)) + units(16, size.bound)
    bend = _covariance(x, arguments[1] if len(arguments) > 1 else None, node.options["dim"]) if count > 1 else ZERO
    return Claim({0: ONE}, size, rounding, {(0, 0): bend})


def _normalize(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), dims, eps = arguments, dims_of(node, len(arguments[0].shape)), float(node.options["eps"])
    count = math.prod(x.shape[d] for d in dims)
    rho = _least_deviation(x, dims, count)
    shifted = rho * rho + eps
    slope = Magnitude.of(1.0) / (Magnitude.of(shifted * (1 - 1e-12)).sqrt()) if shifted > 0 else INFINITE
    bend = _bend(rho, eps, count) if count > 1 else ZERO
    groups = math.prod(node.shape) / max(count, 1)
    slices = tuple(
        root(count * groups / max(n, 1)) if d not in dims else root(count * groups)
        for d, n in enumerate(node.shape)
    )
    size = result(
        node, bound=minimum(root(count * groups), x.bound * slope), peak=root(max(count - 1, 0)), slices=slices
    )
    rounding = units(4 * count + 64, root(count * groups)) + _scale_error(x, count) * slope
    return Claim({0: slope if count > 1 else ZERO}, size, rounding, {(0, 0): bend})


def _scale_error(x: Size, count: int) -> Magnitude:
    """The error of subtracting a mean: so many rounding errors of the largest partial sums."""
    return units(2 * count + 8, x.bound)


def _least_deviation(x: Size, dims: Sequence[int], count: int) -> float:
    """The smallest standard deviation of a group on the domain: Lipschitz with constant M^-1/2."""
    if x.value is None or not x.spread.is_finite or not x.numel:
        return 0.0
    value = x.value
    centred = value - value.mean(dim=tuple(dims), keepdim=True)
    rho = float(centred.square().mean(dim=tuple(dims)).sqrt().min())
    top = float(value.abs().max())
    error = (count + 16) * 4 * UNIT * (rho + top)
    return max(0.0, (rho - error - float(_largest_move(x, dims)) / math.sqrt(count) * (1 + 1e-14)) * (1 - 1e-14))


def _largest_move(x: Size, dims: Sequence[int]) -> Magnitude:
    """How far a group, along these dimensions, may be from the centre."""
    assert x.move is not None
    return minimum(x.spread, *(each for d, each in enumerate(x.move.slices) if d not in dims))


def _bend(rho: float, eps: float, count: int) -> Magnitude:
    shifted = (rho * rho + eps) * (1 - 1e-12)
    if shifted <= 0:
        return INFINITE
    if rho * rho >= eps / 2 * (1 + 1e-9):
        curvature = Magnitude.of(2 / math.sqrt(3) * (1 + 1e-14)) / Magnitude.of(shifted)
    elif rho * rho >= eps / 4 * (1 + 1e-9):
        curvature = Magnitude.of(3 * rho * eps * (1 + 1e-10)) / Magnitude.of(shifted) ** 2.5
    else:
        curvature = Magnitude.of(_KAPPA) / Magnitude.of(eps)
    return curvature / root(count)


def _deviation(node: Node, arguments: Sequence[Size]) -> Claim:
    """One over the deviation of each group."""
    (x,), dims, eps = arguments, dims_of(node, len(arguments[0].shape)), float(node.options["eps"])
    count = math.prod(x.shape[d] for d in dims)
    rho = _least_deviation(x, dims, count)
    top = (
        Magnitude.of(1.0) / Magnitude.of((rho * rho + eps) * (1 - 1e-12)).sqrt()
        if rho * rho + eps > 0
        else INFINITE
    )
    slope = top * top / root(count)
    bend = top * top * top * (2.0 / max(count, 1))
    size = result(node, peak=top, low=0.0)
    rounding = units(4 * count + 64, size.bound) + _scale_error(x, count) * slope
    return Claim({0: slope}, size, rounding, {(0, 0): bend})


def _largest(node: Node, arguments: Sequence[Size]) -> Claim:
    """A selection of entries: slope 1, and bent where another entry takes over."""
    size = result(
        node,
        bound=stack([each.bound for each in arguments]).norm(),
        peak=maximum(*(each.peak for each in arguments)),
        low=min(each.low for each in arguments),
        high=max(each.high for each in arguments),
    )
    slopes = dict.fromkeys(range(len(arguments)), ONE)
    bend = ZERO if is_settled(node, arguments) else INFINITE
    return Claim(slopes, size, bends={(i, j): bend for i in slopes for j in slopes if i <= j})


def is_settled(node: Node, arguments: Sequence[Size]) -> bool:
    """Whether the same entries are selected all over the domain: no two change places by moving at most s each."""
    values = [each.value for each in arguments]
    if any(value is None or not value.numel() for value in values):
        return False
    if "dims" in node.options:
        dims, (value,) = node.options["dims"], values
        assert value is not None
        rest = [d for d in range(value.ndim) if d not in dims]
        entries = value.permute(*rest, *dims).reshape(*[value.shape[d] for d in rest], -1)
        if entries.shape[-1] < 2:
            return True
        top = entries.topk(2, dim=-1).values
        gap = top[..., 0] - top[..., 1]
    elif node.primitive.name == "maximum":
        gap = (values[0] - values[1]).abs()  # type: ignore[operator]
    else:
        (value,) = values
        assert value is not None
        gap = value.sort(dim=node.options["dim"]).values.diff(dim=node.options["dim"])
    moves = sum(up(float(each.move.peak)) if each.move else math.inf for each in arguments)
    moves *= 2 if len(arguments) == 1 else 1
    return not gap.numel() or float(gap.min()) > moves * (1 + 1e-9) + 1e-300


# Transposes: costates of the primitives above


def _softmax_back(node: Node, arguments: Sequence[Size]) -> Claim:
    r""":math:`y \circ (g - \langle g, y\rangle)`, fibre by fibre: the covariance of y applied to g. Along y it
    moves by :math:`dy \circ (g - \langle g, y\rangle) - y\langle g, dy\rangle`, where :math:`\|y\| \le 1`.
    """
    (g, _), dim = arguments, node.options["dim"]
    fibre = minimum(g.bound, *(each for d, each in enumerate(g.slices) if d != dim))
    along = minimum(g.peak * 2.0, fibre * math.sqrt(2.0000001)) + fibre
    slices = tuple(g.bound * HALF if d == dim else each * HALF for d, each in enumerate(g.slices))
    size = result(node, bound=g.bound * HALF, slices=slices)
    rounding = units(2 * node.shape[dim] + 8, g.bound * 2.0)
    return Claim({0: HALF, 1: minimum(along, fibre * 3.0)}, size, rounding)


def _normalize_back(node: Node, arguments: Sequence[Size]) -> Claim:
    r""":math:`r\,(g - \bar g - z\langle g, z\rangle/M)`, group by group: a symmetric map of norm at most 1, as
    :math:`\|z\|^2 \le M`, times r. Along z it moves by :math:`-r(dz\langle g, z\rangle + z\langle g,
    dz\rangle)/M`.
    """
    (g, _, r), dims = arguments, node.options["dims"]
    count = math.prod(node.shape[d] for d in dims)
    group = minimum(g.bound, *(each for d, each in enumerate(g.slices) if d not in dims))
    slopes = {0: r.peak, 1: r.peak * group * 2.0 / root(count), 2: group}
    slices = tuple(g.bound * r.peak if d in dims else each * r.peak for d, each in enumerate(g.slices))
    size = result(node, bound=g.bound * r.peak, slices=slices)
    return Claim(slopes, size, units(4 * count + 16, g.bound * r.peak * root(count)))


def _selected_like(node: Node, arguments: Sequence[Size]) -> Claim:
    """Entries of the first tensor at places that the order of the second decides: they jump where that changes."""
    c, x = arguments
    low, high = min(c.low, 0.0), max(c.high, 0.0)
    size = result(node, bound=c.bound, peak=c.peak, low=low, high=high)
    return Claim({0: ONE, 1: ZERO if is_settled(node, [x]) else INFINITE}, size)


FUNCTIONS: dict[str, Callable[[Node, Sequence[Size]], Claim]] = {
    "scalar": _scalar, "softmax": _softmax, "logsumexp": _logsumexp, "normalize": _normalize, "rstd": _deviation,
    "amax": _largest, "maximum": _largest, "sort": _largest, "softmax_back": _softmax_back,
    "normalize_back": _normalize_back, "select_like": _selected_like, "pick_like": _selected_like,
    "sort_like": _selected_like, "unsort_like": _selected_like,
}  # fmt: skip
