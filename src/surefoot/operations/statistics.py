r"""Variances, lengths, and directions: what is computed from the length of groups of numbers.

Let :math:`r = \|x\|` for one group. Groups are separate: Jacobians and second derivatives are block diagonal, and
their norms are the largest over the groups.

* Length: :math:`D r = x^\top/r` of norm 1; :math:`D^2 r = (I - xx^\top/r^2)/r` of norm :math:`1/r`.
* Direction :math:`x/r`: slope :math:`1/r` and curvature :math:`(2/\sqrt3)/r^2`, the limit :math:`\epsilon \to 0`
  of :mod:`surefoot.operations.normalisation`.

Both are reached where a group has a direction orthogonal to x, so from two numbers per group on. They have no
finite constants if a group may be zero.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from surefoot.enclosure import Enclosure, row_norms
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.arithmetic import meeting_norm
from surefoot.operations.call import Bounds, Call, Use
from surefoot.operations.common import ONE, ZERO, root
from surefoot.operations.dimensions import normalized_dims
from surefoot.operations.record import declare, operation
from surefoot.operations.rows import unless_along
from surefoot.operations.sparsity import Sparsity, every_entry

_BEND = 2.0 / math.sqrt(3.0) * (1 + 1e-15)


def _by_group(x: Enclosure, dims: list[int], centred: bool = False) -> tuple[Magnitude, np.ndarray]:
    """The largest norm of a group over the domain, and a lower bound of the norm of each group.

    Args:
        x: the argument.
        dims: the dimensions a group runs over.
        centred: whether the mean of each group is subtracted.
    """
    if not isinstance(x.value, Tensor) or not x.numel:
        return x.bound, np.zeros(1)
    kept = [k for k in range(len(x.shape)) if k not in dims]
    groups = x.value.permute(*kept, *dims).reshape(math.prod(x.shape[k] for k in kept), -1)
    slack = groups.abs().amax(dim=1).cpu().numpy() * (1e-14 * groups.shape[1])
    if centred:
        groups = groups - groups.mean(dim=1, keepdim=True)
    sizes = row_norms(groups)
    moves = np.full(len(groups), float(x.spread))
    if x.rows is not None and kept[:1] == [0]:
        moves = np.minimum(moves, x.rows.numpy().repeat(len(groups) // len(x.rows)))
    largest = minimum(x.bound, (sizes + Magnitude.of(moves) + Magnitude.of(slack)).max())
    smallest = np.maximum(0.0, groups.norm(dim=1).cpu().numpy() * (1 - 1e-12) - moves - slack) * (1 - 1e-12)
    return largest, smallest


def _inverse(smallest: np.ndarray, power: int = 1) -> Magnitude:
    least = float(smallest.min())
    return Magnitude.infinity() if not least > 0 else (ONE / least) ** power


def _whole(use: Use) -> Sparsity:
    """Each input entry acts on one output."""
    return every_entry(math.prod(use.shapes["self"]))


declare("aten.norm", "aten.linalg_norm", "aten.prod", rows=unless_along(), cost=_whole)


@operation("aten.var", "aten.std", rows=unless_along(), cost=_whole)
def spread_of_group(call: Call) -> Bounds:
    r"""Variance :math:`\|Px\|^2/(M - c)` and deviation :math:`\|Px\|/\sqrt{M - c}`; P subtracts the mean.

    The variance has Jacobian :math:`2\|Px\|/(M-c)` and constant curvature :math:`2/(M-c)`. The deviation is a
    length divided by :math:`\sqrt{M-c}`.
    """
    x = call["self"]
    dims = normalized_dims(call["dim"], len(x.shape))
    count = math.prod(x.shape[k] for k in dims)
    unbiased = call["unbiased"] if call["unbiased"] is not None else True
    correction = call["correction"] if call["correction"] is not None else float(unbiased)
    freedom = count - float(correction)
    if not freedom > 0:
        raise call.refuse(f"the variance of {count} numbers divides by {freedom:g}; use correction=0")
    largest, smallest = _by_group(x, dims, centred=True)
    if call.node.op == "aten.var":
        slope, curvature = largest * 2.0 / freedom, ONE * 2.0 / freedom
        peak = largest**2 / freedom
        bound = minimum(largest * x.bound / freedom, peak * root(call.numel))
        return Bounds({"self": slope}, {("self", "self"): curvature}, bound=bound, peak=peak, reduction=count)
    scale = (ONE / freedom).sqrt()
    return _length(call, x, scale, _inverse(smallest), largest, count)


@operation("aten.linalg_vector_norm", rows=unless_along(), cost=_whole)
def vector_norm(call: Call) -> Bounds:
    """The length of groups of numbers; other norms than the Euclidean one have kinks wherever an entry is zero,
    and are refused.
    """
    if float(call["ord"]) != 2.0:
        raise call.refuse("only the Euclidean norm is covered (ord=2)")
    x = call["self"]
    dims = normalized_dims(call["dim"], len(x.shape))
    largest, smallest = _by_group(x, dims)
    count = math.prod(x.shape[k] for k in dims)
    return _length(call, x, ONE, _inverse(smallest), largest, count)


def _length(
    call: Call, x: Enclosure, scale: Magnitude, inverse: Magnitude, largest: Magnitude, count: int
) -> Bounds:
    curvature = scale * inverse if count > 1 or not inverse.is_finite else ZERO
    return Bounds(
        jacobian={"self": scale},
        curvature={("self", "self"): curvature},
        bound=scale * x.bound,
        peak=scale * largest,
        reduction=max(1, count),
        reason="" if curvature.is_finite else "a length has a kink at zero: keep it away from zero",
    )


@operation("surefoot.unit", rows=unless_along("x"))
def unit(call: Call) -> Bounds:
    r""":math:`x/\max(\|x\|, \epsilon)` for each group: a direction outside of the ball of radius :math:`\epsilon`,
    linear inside, with a kink between the two.

    The slope is :math:`1/\max(r, \epsilon)`, and no curvature is claimed unless every group stays outside.
    """
    x, eps = call["x"], float(call["eps"])
    dims = normalized_dims(call["dim"], len(x.shape))
    _, smallest = _by_group(x, dims)
    outside = bool((smallest > eps).all())
    slope = _inverse(np.maximum(smallest, eps))
    curvature = _inverse(smallest, 2) * _BEND if outside else Magnitude.infinity()
    groups = call.numel // max(1, math.prod(x.shape[k] for k in dims))
    return Bounds(
        jacobian={"x": slope},
        curvature={("x", "x"): curvature},
        offset=ZERO,
        bound=root(groups),
        peak=ONE,
        reduction=max(1, math.prod(x.shape[k] for k in dims)),
        reason="" if outside else "dividing by a length that may be as small as eps: keep it away from zero",
    )


@operation("aten._weight_norm")
def weight_norm(call: Call) -> Bounds:
    r""":math:`z = g\,v/\|v\|` for each slice of v along ``dim``, with its own length g.

    Jacobians 1 in g and :math:`|g|/\|v\|` in v; curvatures :math:`1/\|v\|` for both and
    :math:`(2/\sqrt3)|g|/\|v\|^2` for v twice; :math:`\|z\| = \|g\|`.
    """
    v, g, dim = call["v"], call["g"], call["dim"]
    dims = [k for k in range(len(v.shape)) if dim == -1 or k != dim]
    _, smallest = _by_group(v, dims)
    inverse, length = _inverse(smallest), meeting_norm(g, g.shape, g.shape)
    slope, bend = length * inverse, length * _inverse(smallest, 2) * _BEND
    if inverse.is_finite and isinstance(g.value, Tensor):
        lengths = Magnitude.of(g.value.abs().reshape(-1)) + g.spread
        slope = minimum(slope, (lengths * Magnitude.of(1 / smallest) * (1 + 1e-15)).max())
        bend = minimum(bend, (lengths * Magnitude.of(1 / smallest) ** 2).max() * _BEND * (1 + 1e-14))
    return Bounds(
        jacobian={"v": slope, "g": ONE},
        curvature={("v", "v"): bend, ("v", "g"): inverse},
        bound=g.bound,
        peak=length,
        reduction=max(1, math.prod(v.shape[k] for k in dims)),
        reason="" if inverse.is_finite else "a weight is divided by its length, which may be zero",
    )
