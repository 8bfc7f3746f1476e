r"""Variances, lengths, and directions: what is computed from the length of groups of numbers.

Let :math:`r = \|x\|` for one group. Groups are separate: Jacobians and second derivatives are block diagonal, and
their norms are the largest over the groups.

* Length: :math:`D r = x^\top/r` of norm 1; :math:`D^2 r = (I - xx^\top/r^2)/r` of norm :math:`1/r`.
* Direction :math:`x/r`: slope :math:`1/r` and curvature :math:`(2/\sqrt3)/r^2`, the limit :math:`\epsilon \to 0`
  of :mod:`surefoot.operations.normalised_groups`.

*Evaluation.* Groups are scaled by powers of two, and for variances centred, before they are squared
(:mod:`surefoot.operations.groups`), so that no square leaves the range of doubles. A length then has a relative
error of (M + 8) u. A variance :math:`\|c\|^2/f`, f = M - correction, computed from numbers with error :math:`e` is
off by :math:`(2\|c\|e + e^2)/f` besides, a deviation by :math:`e/\sqrt f`, as a norm has slope 1.

*Pulling back* is by formulas, too (:mod:`surefoot.operations.group_slopes`).

Both are reached where a group has a direction orthogonal to x, so from two numbers per group on. They have no
finite constants if a group may be zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, row_norms
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms.hermitian import times_power
from surefoot.operations.arithmetic import meeting_norm
from surefoot.operations.call import Bounds, Call, Use
from surefoot.operations.common import ONE, ZERO, normalized_dims, root, unless_along
from surefoot.operations.group_slopes import (
    groups_along,
    near_length,
    near_unit,
    near_variance,
    pull_length,
    pull_spread,
    pull_unit,
    pull_weight_norm,
    push_weight_norm,
)
from surefoot.operations.groups import Groups
from surefoot.operations.record import declare, operation
from surefoot.operations.softmax import push_by_gradient
from surefoot.operations.sparsity import Sparsity, every_entry

_BEND = 2.0 / math.sqrt(3.0) * (1 + 1e-15)
_TWIST = 3.0  # of a direction, see :func:`unit`


def _laid(column: Tensor, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """One number per group in the shape of a reduction of x along those dimensions."""
    kept = [k for k in range(x.dim()) if k not in dims]
    return column.reshape([1 if k in dims else x.shape[k] for k in range(x.dim()) if keepdim or k in kept])


def _by_group(x: Enclosure, dims: list[int], centre: bool = False) -> tuple[Magnitude, Magnitude]:
    """The largest norm of a group over the domain, and upper bounds of one over the norm of each group.

    A group runs over ``dims``; with ``centre`` its mean is subtracted.
    """
    if not isinstance(x.value, Tensor) or not x.numel:
        return x.bound, Magnitude(np.full(1, np.inf))
    groups = groups_along(x.value, dims, centre)
    count = len(groups.numbers)
    moves = Magnitude(np.full(count, x.spread.log2))
    if x.rows is not None and 0 not in dims:
        moves = minimum(moves, Magnitude(x.rows.log2.repeat(count // len(x.rows))))
    sizes = (row_norms(groups.numbers) + Magnitude.of(groups.errors)) * groups.units
    return minimum(x.bound, (sizes + moves).max()), groups.inverse_norms(moves)


def _whole(use: Use) -> Sparsity:
    """Each input entry acts on one output."""
    return every_entry(math.prod(use.shapes["self"]))


declare("aten.norm", "aten.linalg_norm", "aten.prod", rows=unless_along(), cost=_whole)


def _centred(x: Tensor, dim: Any, unbiased: Any, correction: Any) -> tuple[Groups, list[int], float]:
    """The groups without their means, the dimensions they run over, and by how much a variance divides."""
    if isinstance(dim, bool):  # the overload without dimensions
        dim, unbiased = None, dim
    dims = normalized_dims(dim, x.dim())
    freedom = math.prod(x.shape[k] for k in dims) - float(unbiased if correction is None else correction)
    return groups_along(x, dims, centre=True), dims, freedom


def _variance(
    x: Tensor, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None
) -> Tensor:
    """The variance, with the signatures of all overloads of the operation."""
    groups, dims, freedom = _centred(x, dim, unbiased, correction)
    total = groups.numbers.square().sum(dim=1, keepdim=True) / freedom
    return _laid(times_power(total, 2 * groups.exponents), x, dims, keepdim)


def _deviation(
    x: Tensor, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None
) -> Tensor:
    groups, dims, freedom = _centred(x, dim, unbiased, correction)
    return _laid(times_power(groups.norms / math.sqrt(freedom), groups.exponents), x, dims, keepdim)


def _freedom(call: Call, dims: list[int]) -> float:
    unbiased = call["unbiased"] if call["unbiased"] is not None else True
    correction = call["correction"] if call["correction"] is not None else float(unbiased)
    return math.prod(call["self"].shape[k] for k in dims) - float(correction)


def _error_of_spread(call: Call, value: Tensor) -> Magnitude:
    """The error of a variance or a deviation; see the module."""
    x = call["self"].value
    dims = normalized_dims(call["dim"], x.dim())
    groups, freedom = groups_along(x, dims, centre=True), _freedom(call, dims)
    error, size = Magnitude.of(groups.errors), row_norms(groups.numbers)
    relative = (groups.size + 16) * 2.0**-52
    if call.op == "aten.var":
        total = (size * error * 2.0 + error * error + size * size * relative) * Magnitude(2 * groups.units.log2)
    else:
        total = (error + size * relative) * groups.units
        freedom = math.sqrt(freedom) * (1 - 2.0**-50)
    return total.norm() / freedom + root(call.numel) * 2.0**-1020


@operation("aten.var", "aten.std", rows=unless_along(), cost=_whole, error=_error_of_spread,
           pullback=pull_spread(_freedom), push=push_by_gradient)  # fmt: skip
def spread_of_group(call: Call) -> Bounds:
    r"""Variance :math:`\|Px\|^2/(M - c)` and deviation :math:`\|Px\|/\sqrt{M - c}`; P subtracts the mean.

    The variance has Jacobian :math:`2\|Px\|/(M-c)` and constant curvature :math:`2/(M-c)`. The deviation is a
    length divided by :math:`\sqrt{M-c}`.
    """
    x = call["self"]
    dims = normalized_dims(call["dim"], len(x.shape))
    count, freedom = math.prod(x.shape[k] for k in dims), _freedom(call, dims)
    if not freedom > 0:
        raise call.refuse(f"the variance of {count} numbers divides by {freedom:g}; use correction=0")
    largest, inverses = _by_group(x, dims, centre=True)
    if call.node.op == "aten.var":
        slope, curvature = largest * 2.0 / freedom, ONE * 2.0 / freedom
        peak = largest**2 / freedom
        bound = minimum(largest * x.bound / freedom, peak * root(call.numel))
        return Bounds({"self": slope}, {("self", "self"): curvature}, bound=bound, peak=peak, reduction=count)
    scale = (ONE / freedom).sqrt()
    return _length(call, x, scale, inverses.max(), largest, count)


declare("aten.var", evaluate=_variance, near=near_variance(_freedom))
declare("aten.std", evaluate=_deviation, near=near_length(_freedom))


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if float(ord) != 2.0 or not x.is_floating_point():
        return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype)
    dims = normalized_dims(dim, x.dim())
    groups = groups_along(x, dims)
    return _laid(times_power(groups.norms, groups.exponents), x, dims, keepdim)


@operation("aten.linalg_vector_norm", rows=unless_along(), cost=_whole, evaluate=_vector_norm,
           pullback=pull_length, push=push_by_gradient, near=near_length())  # fmt: skip
def vector_norm(call: Call) -> Bounds:
    """The length of groups of numbers; other norms have kinks wherever an entry is zero, and are refused."""
    if float(call["ord"]) != 2.0:
        raise call.refuse("only the Euclidean norm is covered (ord=2)")
    x = call["self"]
    dims = normalized_dims(call["dim"], len(x.shape))
    largest, inverses = _by_group(x, dims)
    count = math.prod(x.shape[k] for k in dims)
    return _length(call, x, ONE, inverses.max(), largest, count)


def _length(
    call: Call, x: Enclosure, scale: Magnitude, inverse: Magnitude, largest: Magnitude, count: int
) -> Bounds:
    curvature = scale * inverse if count > 1 or not inverse.is_finite else ZERO
    return Bounds(
        jacobian={"self": scale},
        curvature={("self", "self"): curvature},
        curvature_change={("self", "self"): scale * inverse * inverse * x.spread * _BEND},
        bound=scale * x.bound,
        peak=scale * largest,
        reduction=max(1, count),
        reason="" if curvature.is_finite else "a length has a kink at zero: keep it away from zero",
    )


def _direction(x: Tensor, dims: list[int], eps: float = 0.0) -> Tensor:
    """x divided by its length along some dimensions, or by eps if that is larger: scaled, then divided twice."""
    groups = groups_along(x, dims)
    column = _laid(groups.norms, x, dims, True)
    exponents = _laid(groups.exponents, x, dims, True)
    outside = (times_power(column, exponents) > eps) & (column > 0)
    column = torch.where(outside, column, 1.0)
    return torch.where(outside, times_power(x, -exponents) / column, x / eps if eps else x)


def _unit(x: Tensor, dim: Any, eps: float) -> Tensor:
    return _direction(x, normalized_dims(dim, x.dim()), eps)


@operation(
    "surefoot.unit", rows=unless_along("x"), evaluate=_unit, pullback=pull_unit, symmetric=True, near=near_unit
)
def unit(call: Call) -> Bounds:
    r""":math:`x/\max(\|x\|, \epsilon)` for each group: a direction outside of the ball of radius :math:`\epsilon`,
    linear inside, with a kink between the two.

    The slope is :math:`1/\max(r, \epsilon)`, and no curvature is claimed unless every group stays outside. There
    the second derivative is that of the length once more, :math:`(2/\sqrt3)/r^2`, and the third one is
    :math:`3/r^3`. *Proof.* With r = 1 and a unit vector :math:`h = \cos\varphi\,x + \sin\varphi\,w`,
    :math:`w \perp x`, the direction of x + th turns by the angle :math:`\theta = \mathrm{Im}\log(1 +
    te^{i\varphi})`, of which the derivatives at 0 are :math:`\sin\varphi,\ -\sin2\varphi,\ 2\sin3\varphi`.
    So the third derivative is :math:`2\sin3\varphi - \sin^3\varphi` across and
    :math:`6\sin^2\varphi\cos\varphi` along x: with :math:`s = \sin^2\varphi` the sum of squares is
    :math:`s(6 - 9s)^2 + 36s^2(1 - s) = 9s(4 - 8s + 5s^2)`, which is 5.76 at its only inner maximum, s = 2/5, and 9
    at s = 1. Contracted with any vector it is a symmetric form, which is largest where its arguments are the same.
    """
    x, eps = call["x"], float(call["eps"])
    dims = normalized_dims(call["dim"], len(x.shape))
    inverses = _by_group(x, dims)[1].max()
    limit = ONE / eps if eps > 0 else Magnitude.infinity()
    outside = bool(inverses * (1 + 2.0**-40) < limit)
    slope = minimum(inverses, limit)
    curvature = inverses * inverses * _BEND if outside else Magnitude.infinity()
    groups = call.numel // max(1, math.prod(x.shape[k] for k in dims))
    return Bounds(
        jacobian={"x": slope},
        curvature={("x", "x"): curvature},
        curvature_change={("x", "x"): inverses * inverses * inverses * x.spread * _TWIST} if outside else {},
        offset=ZERO,
        bound=root(groups),
        peak=ONE,
        reduction=max(1, math.prod(x.shape[k] for k in dims)),
        reason="" if outside else "dividing by a length that may be as small as eps: keep it away from zero",
    )


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return _direction(v, [k for k in range(v.dim()) if dim == -1 or k != dim]) * g


@operation("aten._weight_norm", evaluate=_weight_norm, pullback=pull_weight_norm, push=push_weight_norm)
def weight_norm(call: Call) -> Bounds:
    r""":math:`z = g\,v/\|v\|` for each slice of v along ``dim``, with its own length g.

    Jacobians 1 in g and :math:`|g|/\|v\|` in v; curvatures :math:`1/\|v\|` for both and
    :math:`(2/\sqrt3)|g|/\|v\|^2` for v twice; :math:`\|z\| = \|g\|`.
    """
    v, g, dim = call["v"], call["g"], call["dim"]
    dims = [k for k in range(len(v.shape)) if dim == -1 or k != dim]
    inverses = _by_group(v, dims)[1]
    inverse, length = inverses.max(), meeting_norm(g, g.shape, g.shape)
    slope, bend = length * inverse, length * inverse * inverse * _BEND
    if inverse.is_finite and isinstance(g.value, Tensor):
        lengths = Magnitude.of(g.value.abs().reshape(-1)) + g.spread
        slope = minimum(slope, (lengths * inverses).max())
        bend = minimum(bend, (lengths * inverses * inverses).max() * _BEND)
    return Bounds(
        jacobian={"v": slope, "g": ONE},
        curvature={("v", "v"): bend, ("v", "g"): inverse},
        bound=g.bound,
        peak=length,
        reduction=max(1, math.prod(v.shape[k] for k in dims)),
        reason="" if inverse.is_finite else "a weight is divided by its length, which may be zero",
    )
