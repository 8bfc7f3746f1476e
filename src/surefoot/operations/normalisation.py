r"""Normalisations: batch, layer, group, instance and root-mean-square.

All divide groups of :math:`M` numbers by their root-mean-square, most after subtracting their mean:

.. math:: g(x) = x / \rho_\epsilon, \qquad \rho_\epsilon = \sqrt{\rho^2 + \epsilon}, \qquad \rho^2 = \|x\|^2/M .

*Jacobian.* :math:`Dg = (I - xx^\top/(M\rho_\epsilon^2))/\rho_\epsilon` has eigenvalues :math:`1/\rho_\epsilon` and
:math:`\epsilon/\rho_\epsilon^3`, so :math:`\|Dg\| = 1/\rho_\epsilon \le \epsilon^{-1/2}`.

*Curvature.* :math:`D^2g` is the symmetric tensor :math:`3x^{\otimes3}/(M^2\rho_\epsilon^5) - \mathrm{sym}(x
\otimes I)/(M\rho_\epsilon^3)`. The norm of a symmetric tensor is reached on the diagonal (Banach), where with
:math:`t = \langle x, v\rangle \in [0, \|x\|]` it is :math:`3t/(M\rho_\epsilon^3)\,(1 -
t^2/(M\rho_\epsilon^2))`. It grows up to :math:`t^2 = M\rho_\epsilon^2/3`. So

.. math:: \|D^2g\| = \frac{1}{\sqrt M}\begin{cases} 3\rho\epsilon/\rho_\epsilon^5 & \rho^2 \le \epsilon/2\\
    (2/\sqrt3)/\rho_\epsilon^2 & \rho^2 \ge \epsilon/2 \end{cases}

whose maximum, at :math:`\rho^2 = \epsilon/4`, is :math:`\kappa M^{-1/2}\epsilon^{-1}` with :math:`\kappa =
\tfrac32(\tfrac45)^{5/2} \approx 0.8587`; from there on it decreases.

*Third derivative.* g is the gradient of :math:`M\rho_\epsilon`, so :math:`D^3g` is symmetric too. Along a unit
vector v that is :math:`\sqrt M\sqrt{y^2 + D}`, y moving with speed one, :math:`y^2 + D = Q = M\rho_\epsilon^2`,
with the fourth derivative :math:`\sqrt M\,\theta(12 - 15\theta)Q^{-3/2}`, :math:`\theta = D/Q \in [0, 1]`. So
:math:`\|D^3g\| \le 3/(M\rho_\epsilon^3)`.

Subtracting the mean is an orthogonal projection, which can only lower either: it leaves both as they are where
there are directions orthogonal to x left, so from three numbers per group on (two without the mean). Groups are
separate, so the Jacobian and the tensor are block diagonal and their norms are the largest over the groups. Each
group has norm below :math:`\sqrt M`, and its largest entry is below :math:`\sqrt{M - 1}` if the entries add up to
zero: then :math:`x_i^2 = (\sum_{j \ne i} x_j)^2 \le (M-1)(\|x\|^2 - x_i^2)`. Contracted with a costate, the blocks
count with the norms of their parts of it.

*Evaluation.* The kernels of torch are not used: some compute the variance as a difference of means. A group is
scaled and centred (:mod:`surefoot.operations.groups`), with an error of norm at most :math:`e`, and if
:math:`\epsilon` is larger than its squares scaled down further, so that nothing overflows. The mean of the M
squares, the sum with :math:`\epsilon`, the root and the quotient have a relative error of :math:`(M + 8)u`
together (Higham, section 3.1). The map g has slope at most :math:`1/\rho_\epsilon`, so the result of a group is
off by at most

.. math:: (M + 8)\,u\,\|\hat z\| + e / \min\rho_\epsilon,

the minimum over the points within :math:`e` of what was computed; and never by more than :math:`2\sqrt M` and
round-off, as the exact and the computed result have norm at most :math:`\sqrt M`.

*Pulling back.* :math:`Dg^\top\lambda = P(\lambda - z\langle z, \lambda\rangle/M)/\rho_\epsilon`, P subtracting
the mean if that is subtracted, computed by this formula with the errors of every entry: an entry of the centred
group is off by at most e, and :math:`\rho_\epsilon` by :math:`e/\sqrt M`, as its slope :math:`\|x\|/(M
\rho_\epsilon)` is at most that, and a relative :math:`(M + 32)2u + 2^{-48}`. Where :math:`\epsilon` is lost on the
scale of the group, it and the 2⁻¹⁰⁰⁰ in its place change :math:`\rho_\epsilon` by less than :math:`2^{-499}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, measure, row_norms
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms.hermitian import times_power
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import ONE, affine, root
from surefoot.operations.composed_series import normalised_along
from surefoot.operations.groups import Groups, centred, scaled
from surefoot.operations.moving import Moving
from surefoot.operations.record import Form, Near, declare, operation
from surefoot.operations.scaled import scale_shift
from surefoot.operations.shapes import batch, rows_of
from surefoot.operations.softmax import summed
from surefoot.operations.sparsity import Sparsity, grouped, linear_terms
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL

Arrange = Callable[[Tensor], Tensor]

_UNIT = 2.0**-53
_KAPPA = 1.5 * 0.8**2.5 * (1 + 1e-15)


def _form(node: Node) -> Form:
    """With running statistics affine."""
    return Form.LINEAR if node.arguments["running_mean"] is not None else Form.OTHER


def _batch_rows(use: Use) -> list[Slot]:
    return ["input"] if use["running_mean"] is not None and not use["training"] else []


def _cost(use: Use) -> Sparsity:
    """Groups are channels, over samples and positions or over positions; with fixed statistics it is affine."""
    if use["running_mean"] is not None:
        return Sparsity(terms=linear_terms(use, use.numel, "input"))
    return grouped(
        use.numel, use.numel // use.shape[1] if use.op == "aten.batch_norm" else math.prod(use.shape[2:])
    )


def _normalised(groups: Tensor, eps: float, *, centre: bool) -> Tensor:
    """Groups, one per row, divided by their root-mean-square."""
    if not groups.numel():
        return groups
    data = _prepared(groups, centre=centre)
    halvings, shift = _shift(data, eps)
    squares = times_power(data.numbers.square().mean(dim=1, keepdim=True), -2 * halvings)
    return times_power(data.numbers, -halvings) / (squares + shift.clamp_min(2.0**-1000)).sqrt()


def _prepared(groups: Tensor, *, centre: bool) -> Groups:
    data = scaled(groups)
    return centred(data) if centre else data


def _shift(data: Groups, eps: float) -> tuple[Tensor, Tensor]:
    """How often groups are halved besides, so that eps is at most 1 on the scale of their squares; and eps on that
    scale, zero if below 2^-1000; as columns.

    Where it is zero, squares that do not vanish add up to more than 2^-500: some entry is 1/2 or more, and all
    differences of such entries to the mean are multiples of 2^-110, up to a division by M.
    """
    mantissa, exponent = math.frexp(eps)
    powers = exponent - 2 * data.exponents
    halvings = torch.div(powers + 1, 2, rounding_mode="floor").clamp_min(0)
    rest = (powers - 2 * halvings).double()
    return halvings, torch.where(rest < -1000, 0.0, mantissa * torch.exp2(rest.clamp_min(-1000.0)))


def _evaluation_error(groups: Tensor, eps: float, *, centre: bool) -> Magnitude:
    """How far what :func:`_normalised` computes may be from the exact value; see the module for the proof."""
    if not groups.numel():
        return Magnitude.zero()
    data = _prepared(groups, centre=centre)
    halvings, shift = _shift(data, eps)
    down = -halvings.reshape(-1).cpu().numpy()
    size = data.size
    least = np.ldexp(data.least_norms(Magnitude.zero((len(groups),))), down) / math.sqrt(size)
    rho = np.hypot(least, shift.sqrt().reshape(-1).cpu().numpy()) * (1 - 2.0**-40)
    whole = math.sqrt(size) * (1 + 2.0**-40)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        error = np.nan_to_num(np.ldexp(data.errors, down) / rho, nan=np.inf, posinf=np.inf)
        norms = np.nan_to_num(
            np.ldexp(data.norms.reshape(-1).cpu().numpy(), down) / rho, nan=np.inf, posinf=np.inf
        )
    total = np.minimum(error, 2 * whole) + np.minimum(norms, whole) * ((size + 16) * 2 * _UNIT)
    return Magnitude.of(total).norm() * (1 + 2.0**-40) + root(groups.numel()) * (2.0**-1018 * size)


def _parts(data: Groups, eps: float) -> tuple[Rounded, Rounded]:
    """The root-mean-squares on the scale of the groups, as a column, and the groups divided by them."""
    halvings, shift = _shift(data, eps)
    squares = times_power(data.numbers.square().mean(dim=1, keepdim=True), -2 * halvings)
    rho = (squares + shift.clamp_min(2.0**-1000)).sqrt()
    off = times_power(data.error, -halvings) * (1 + 2.0**-40) + 2.0**-1020
    wrong = rho * ((data.size + 32) * 2 * _UNIT + 2.0**-48) + off / math.sqrt(data.size) * (1 + 2.0**-40)
    length = Rounded(rho, wrong + (shift == 0).double() * 2.0**-499)
    return length, Rounded(times_power(data.numbers, -halvings), off) / length


def _pulled(groups: Tensor, costate: Tensor, eps: float, *, centre: bool) -> Rounded:
    """The transposed Jacobian of :func:`_normalised` times a costate; see the module for the errors."""
    if not groups.numel():
        return Rounded.exact(costate)
    data = _prepared(groups, centre=centre)
    size, halvings = data.size, _shift(data, eps)[0]
    length, z = _parts(data, eps)
    slope = Rounded.exact(costate)
    tilted = slope - z * summed(z * slope, 1) / float(size)
    if centre:
        tilted = tilted - summed(tilted, 1) / float(size)
    scaled = tilted / length
    down = -data.exponents - halvings
    value, error = (times_power(part.expand(costate.shape), down) for part in (scaled.value, scaled.error))
    return Rounded(value, error + SMALL)


def _near_groups(groups: Tensor, move: Tensor, eps: float, *, centre: bool) -> Near:
    r"""With c the move, centred if the group is, and :math:`s = \langle z, c\rangle/M`: :math:`(c -
    sz)/\rho_\epsilon + \frac12(3s^2z - 2sc - \|c\|^2z/M)/\rho_\epsilon^2`, as :math:`D\rho_\epsilon = s` and
    :math:`D^2\rho_\epsilon = (\|c\|^2/M - s^2)/\rho_\epsilon`.

    Let E be the norm of the error of z and r the relative one of :math:`\rho_\epsilon`. As :math:`\|z\| \le
    \sqrt M`, for :math:`\|c\| = 1` the first is off by :math:`(3E/\sqrt M + 2r)/\rho_\epsilon`, the second by
    :math:`(16E/M + 16r/\sqrt M)/\rho_\epsilon^2`; sums of M products round by a few units for each.
    """
    data = _prepared(groups, centre=centre)
    size = data.size
    rho, z = _parts(data, eps)
    inverse = times_power(1 / rho.value, -data.exponents - _shift(data, eps)[0])
    c = move - move.mean(dim=1, keepdim=True) if centre else move
    s = (z.value * c).sum(dim=1, keepdim=True) / size
    first = (c - s * z.value) * inverse
    square = c.square().sum(dim=1, keepdim=True) / size
    second = (3 * s.square() * z.value - 2 * s * c - square * z.value) * inverse.square()
    relative = rho.error / (rho.value - rho.error).clamp(min=0.0) + (size + 32) * 2 * _UNIT
    wrong = torch.linalg.vector_norm(z.error.expand(z.value.shape), dim=1, keepdim=True) / math.sqrt(size)
    errors = (
        (3 * wrong + 4 * relative) * inverse,
        (16 * wrong + 16 * relative) * inverse.square() / math.sqrt(size),
    )
    bounds = [float((error * (1 + 2.0**-30)).nan_to_num(nan=torch.inf).max()) for error in errors]
    return Near(first + 0.5 * second, bounds[0], bounds[1])


def _near_layer(call: Call, move: Tensor) -> Near | None:
    x, size = call["input"].value, math.prod(call["normalized_shape"])
    return _near(x, move, x.numel() // max(1, size), call, centre=call.op == "aten.layer_norm")


def _near_group(call: Call, move: Tensor) -> Near | None:
    x = call["input"].value
    return _near(x, move, x.shape[0] * call["num_groups"], call, centre=True)


def _near_batch(call: Call, move: Tensor) -> Near | None:
    x = call["input"].value
    if call["running_mean"] is not None:
        one = _pull_fixed(call, torch.ones_like(x))
        return Near(one.value * move, float(one.error.max()) if x.numel() else 0.0, 0.0)
    if call.op == "aten.batch_norm":
        near = _near(x.transpose(0, 1), move.transpose(0, 1), x.shape[1], call, centre=True)
        return None if near is None else Near(near.change.transpose(0, 1), near.first, near.second)
    return _near(x, move, x.shape[0] * x.shape[1], call, centre=True)


def _near(x: Tensor, move: Tensor, count: int, call: Call, *, centre: bool) -> Near | None:
    if not x.numel():
        return None
    eps, size = float(call["eps"]), x.numel() // count
    found = _near_groups(x.reshape(count, size), move.reshape(count, size), eps, centre=centre)
    return Near(found.change.reshape(x.shape), found.first, found.second)


def _pull_fixed(call: Call, costate: Tensor) -> Rounded:
    """With running statistics: divided by the deviation of the channel."""
    variance = call["running_var"].value.double().reshape(-1, *[1] * (costate.dim() - 2))
    shifted: Any = Rounded.exact(variance) + float(call["eps"])
    return Rounded.exact(costate) / torch.sqrt(shifted)


def _pull_batch(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """The costate of batch and instance normalisation."""
    x = call["input"].value
    if call["running_mean"] is not None:
        return {"input": _pull_fixed(call, costate)}
    if call.op == "aten.instance_norm":
        return {"input": _pull_groups(x, costate, x.shape[0] * x.shape[1], float(call["eps"]), centre=True)}
    turned = x.transpose(0, 1)
    pulled = _pull_groups(turned, costate.transpose(0, 1), x.shape[1], float(call["eps"]), centre=True)
    return {"input": Rounded(pulled.value.transpose(0, 1), pulled.error.transpose(0, 1))}


def _pull_groups(x: Tensor, costate: Tensor, count: int, eps: float, *, centre: bool) -> Rounded:
    """The costate of so many groups, one behind the other."""
    size = x.numel() // max(1, count)
    pulled = _pulled(x.reshape(count, size), costate.reshape(count, size), eps, centre=centre)
    return Rounded(pulled.value.reshape(x.shape), pulled.error.expand(pulled.value.shape).reshape(x.shape))


def _pull_layer(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    x, size = call["input"].value, math.prod(call["normalized_shape"])
    centre = call.op == "aten.layer_norm"
    return {"input": _pull_groups(x, costate, x.numel() // max(1, size), float(call["eps"]), centre=centre)}


def _pull_group(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    x = call["input"].value
    return {"input": _pull_groups(x, costate, x.shape[0] * call["num_groups"], float(call["eps"]), centre=True)}


def _fixed(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """With running statistics, three roundings of the result and one of the difference."""
    laid = (-1, *[1] * (x.dim() - 2))
    return (x - mean.reshape(laid)) / (var + eps).sqrt().reshape(laid)


def _batch_groups(op: str, shape: tuple[int, ...]) -> tuple[Arrange, int]:
    """How channels over the whole batch, or over each sample, are laid out as rows, and their size."""
    if op == "aten.batch_norm":
        size = math.prod(shape) // max(1, shape[1])
        return (lambda t: t.transpose(0, 1).reshape(shape[1], size)), size
    size = math.prod(shape[2:])
    return (lambda t: t.reshape(shape[0] * shape[1], size)), size


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *_: Any
) -> Tensor:
    if mean is not None:
        return scale_shift(_fixed(x, mean, var, eps), weight, bias, 1)
    turned = x.transpose(0, 1)
    data = _normalised(turned.reshape(x.shape[1], -1), eps, centre=True).reshape(turned.shape)
    return scale_shift(data.transpose(0, 1), weight, bias, 1)


def _instance_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, own: bool, momentum: float, eps: float, *_: Any
) -> Tensor:
    if mean is not None:
        return scale_shift(_fixed(x, mean, var, eps), weight, bias, 1)
    groups = x.reshape(x.shape[0] * x.shape[1], -1)
    return scale_shift(_normalised(groups, eps, centre=True).reshape(x.shape), weight, bias, 1)


def _layer_norm(
    x: Tensor, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    data = _normalised(x.reshape(-1, math.prod(shape)), eps, centre=True).reshape(x.shape)
    return scale_shift(data, weight, bias, x.dim() - len(shape))


def _rms_norm(x: Tensor, shape: list[int], weight: Any = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(torch.float64).eps if eps is None else eps
    data = _normalised(x.reshape(-1, math.prod(shape)), eps, centre=False).reshape(x.shape)
    return scale_shift(data, weight, None, x.dim() - len(shape))


def _group_norm(
    x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    data = _normalised(x.reshape(x.shape[0] * groups, -1), eps, centre=True).reshape(x.shape)
    return scale_shift(data, weight, bias, 1)


def _error(call: Call, value: Any) -> Magnitude | None:
    """The error of batch and instance normalisation; with running statistics it is some units of the result."""
    if call["running_mean"] is not None:
        return None
    arrange, _ = _batch_groups(call.op, call["input"].shape)
    return _evaluation_error(arrange(call["input"].value), float(call["eps"]), centre=True)


def _error_of_layer(call: Call, value: Any) -> Magnitude:
    groups = call["input"].value.reshape(-1, math.prod(call["normalized_shape"]))
    return _evaluation_error(groups, float(call["eps"]), centre=call.op == "aten.layer_norm")


def _error_of_groups(call: Call, value: Any) -> Magnitude:
    x = call["input"].value
    return _evaluation_error(x.reshape(x.shape[0] * call["num_groups"], -1), float(call["eps"]), centre=True)


def _laid_out(moving: Moving) -> tuple[int, int] | None:
    """How many groups a row has, one row being all there is where samples are mixed, and the size of a group."""
    arguments, shape = moving.node.arguments, moving.node.specs[0].shape
    if arguments.get("running_mean") is not None or not math.prod(shape):
        return None
    size = math.prod(shape[2:])
    if "normalized_shape" in arguments:
        size = math.prod(arguments["normalized_shape"])
    elif "num_groups" in arguments:
        size = math.prod(shape[1:]) // arguments["num_groups"]
    elif moving.node.op == "aten.batch_norm":
        return shape[1], math.prod(shape) // shape[1]
    per_row = math.prod(shape) // shape[0]
    return (per_row // size, size) if per_row >= size else None


_STATISTICS = ("running_mean", "running_var")


@operation("aten.batch_norm", form=_form, fixed=_STATISTICS, rows=_batch_rows, cost=_cost, epsilon="eps",
           errata=(3,), evaluate=_batch_norm, error=_error, pullback=_pull_batch, symmetric=True,
           near=_near_batch, taylor=normalised_along(_laid_out))  # fmt: skip
@operation("aten.instance_norm", form=_form, fixed=_STATISTICS, rows=batch("input", 3), cost=_cost, epsilon="eps",
           errata=(3,), evaluate=_instance_norm, error=_error, pullback=_pull_batch, symmetric=True,
           near=_near_batch, taylor=normalised_along(_laid_out))  # fmt: skip
def batch_or_instance_norm(call: Call) -> Bounds:
    """With running statistics an affine map, x ↦ (x - μ)/√(σ² + ε) per channel, of norm the largest 1/√(σ² + ε);
    otherwise channels are groups, over the whole batch or over each sample.
    """
    x = call["input"]
    if call["running_mean"] is not None:
        return _fixed_statistics(call, x)
    arrange, size = _batch_groups(call.op, x.shape)
    return normalise(call, x, arrange, size, centre=True)


def _fixed_statistics(call: Call, x: Enclosure) -> Bounds:
    mean, var, eps = call["running_mean"], call["running_var"], float(call["eps"])
    if mean.value is None or var.value is None:  # on meta only the signs of the statistics are known
        scale = Magnitude.infinity() if eps <= 0 else (ONE / eps).sqrt()
        return affine(call, {"input": scale}, offset=Magnitude.infinity())
    variances = var.value.double() + eps
    if not bool((variances > 0).all()):
        raise call.refuse("a running variance plus eps is not positive; use a positive eps")
    factors = variances.rsqrt()
    per_channel = x.numel // max(1, x.shape[1])
    offset = measure(mean.value.double() * factors)[0] * root(per_channel) * (1 + 1e-9) + 2.0**-1000
    return affine(call, {"input": measure(factors)[1] * (1 + 1e-12)}, offset=offset)


@operation("aten.layer_norm", "aten.rms_norm", epsilon="eps", errata=(3,), error=_error_of_layer,
           pullback=_pull_layer, symmetric=True, near=_near_layer,
           rows=lambda use: ["input"] if len(use["normalized_shape"]) < len(use.shapes["input"]) else [],
           cost=lambda use: grouped(use.numel, math.prod(use["normalized_shape"])))  # fmt: skip
def layer_norm(call: Call) -> Bounds:
    """Groups are the last dimensions of each sample."""
    x = call["input"]
    size = math.prod(call["normalized_shape"])
    return normalise(call, x, lambda t: t.reshape(-1, size), size, centre=call.op == "aten.layer_norm")


declare("aten.layer_norm", evaluate=_layer_norm, taylor=normalised_along(_laid_out))
declare("aten.rms_norm", evaluate=_rms_norm, taylor=normalised_along(_laid_out, centre=False))


@operation("aten.group_norm", rows=batch("input"), epsilon="eps", errata=(3,), evaluate=_group_norm,
           error=_error_of_groups, pullback=_pull_group, symmetric=True, near=_near_group,
           taylor=normalised_along(_laid_out),
           cost=lambda use: grouped(use.numel, use.numel // (use.shape[0] * use["num_groups"])))  # fmt: skip
def group_norm(call: Call) -> Bounds:
    """Groups are blocks of channels of each sample."""
    x = call["input"]
    size = x.numel // (x.shape[0] * call["num_groups"])
    return normalise(call, x, lambda t: t.reshape(-1, size), size, centre=True)


def normalise(call: Call, x: Enclosure, arrange: Arrange, size: int, *, centre: bool) -> Bounds:
    """The bounds all normalisations share; sharper where the centre keeps the groups away from zero.

    Args:
        call: the operation.
        x: its argument.
        arrange: lays a tensor of its shape out as a matrix with one group per row.
        size: numbers per group.
        centre: whether the mean is subtracted.

    Where rows of the result are those of the argument, groups lie within rows, in consecutive blocks.
    """
    rowwise = "input" in rows_of(call)
    eps = float(call["eps"])
    if eps <= 0:
        raise call.refuse("a normalisation with eps = 0 has no bounded slope; use a positive eps")
    groups = arrange(x.value) if isinstance(x.value, Tensor) and x.numel else None
    moves = None if groups is None else group_spreads(x, arrange, len(groups), rowwise)
    slope, curvature = _constants(groups, moves, eps, size, centre)
    rows = None
    known = groups is not None

    def along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        norms = row_norms(arrange(costate.value))
        own = rowwise and costate.rows is not None
        move = minimum(costate.spread, costate.rows.max()) if own and costate.rows is not None else costate.spread
        largest = (curvature * (norms + move)).max()
        return {("input", "input"): minimum(largest, costate.bound * curvature.max())}

    def by_row(groups: Magnitude) -> Magnitude:
        return Magnitude(groups.log2.reshape(call.shape[0], -1)).max(axis=1) if rowwise else groups.max()

    def rows_along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        norms = row_norms(arrange(costate.value)) + group_spreads(costate, arrange, len(curvature), rowwise)
        return {("input", "input"): by_row(curvature * norms)}

    def change_along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        third = slope * slope * slope * (3.0 / size * (1 + 1e-15))
        moved = minimum(third * group_spreads(x, arrange, len(slope), rowwise), curvature * 2.0)
        moved = moved * row_norms(arrange(costate.value))
        moved = moved + curvature * group_spreads(costate, arrange, len(curvature), rowwise)
        return {("input", "input"): by_row(moved)}

    if rowwise and known:
        steepest = Magnitude(slope.log2.reshape(call.shape[0], -1)).max(axis=1)
        rows = x.row_spread(call.shape[0]) * steepest
    return Bounds(
        jacobian={"input": slope.max()},
        curvature={("input", "input"): curvature.max()},
        offset=Magnitude.zero(),
        bound=root(call.numel),
        peak=root(max(1, size - 1)) if centre else root(size),
        rows=rows,
        reduction=size,
        curvature_along=along if known else None,
        rows_along=rows_along if known and rowwise else None,
        change_along=change_along if known else None,
    )


def group_spreads(e: Enclosure, arrange: Arrange, count: int, rowwise: bool) -> Magnitude:
    """How far every group may be from the centre: as far as its row if it lies in one, or its entries together."""
    moves, radius = Magnitude(np.full(count, e.spread.log2)), e.entry_radius()
    if rowwise and e.rows is not None and count % len(e.rows) == 0:
        moves = minimum(Magnitude(e.rows.log2.repeat(count // len(e.rows))), moves)
    if radius is None or radius.shape != e.value.shape:
        return moves
    return minimum(moves, row_norms(arrange(radius)))


def _constants(
    groups: Tensor | None, moves: Magnitude | None, eps: float, size: int, centre: bool
) -> tuple[Magnitude, Magnitude]:
    """Slope and curvature of each group over the domain, from a lower bound of ρ: the norm at the centre minus how
    far it may move, over √M. All on the scale of the group, where nothing overflows.
    """
    everywhere = (ONE / eps).sqrt(), ONE / eps * _KAPPA / math.sqrt(max(1, size)) * (1 + 1e-15)
    if groups is None or moves is None or not groups.numel():
        return Magnitude(np.array([everywhere[0].log2])), Magnitude(np.array([everywhere[1].log2]))
    data = _prepared(groups, centre=centre)
    halvings, shift = (column.reshape(-1).cpu().numpy() for column in _shift(data, eps))
    rho = np.ldexp(data.least_norms(moves), -halvings) / math.sqrt(size) * (1 - 2.0**-50)
    units = Magnitude(data.units.log2 + halvings)
    squared = Magnitude(2 * units.log2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        total = (rho**2 + shift) * (1 - 1e-14)
        ratio = np.where(shift > 0, rho**2 / shift, np.where(rho > 0, np.inf, 0.0)) * (1 - 1e-14)
        near = np.where(ratio <= 0.25, _KAPPA, 3 * np.sqrt(np.minimum(ratio, 0.5)) / (1 + ratio) ** 2.5)
        slope = Magnitude.of(1 / np.sqrt(total)) / units * (1 + 1e-14)
        far = Magnitude.of(2 / math.sqrt(3) / total) / squared * (1 + 1e-14)
    bend = np.where(ratio <= 0.5, (Magnitude.of(near) / eps).log2, far.log2)
    curvature = Magnitude(bend) / math.sqrt(size) * (1 + 1e-14)
    return minimum(slope, everywhere[0]), minimum(curvature, everywhere[1])
