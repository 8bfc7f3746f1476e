r"""Any other operation along a segment, from its rule.

*Affine within reach* (the rule's curvatures are zero): the derivative at the centre is that everywhere, so
:math:`z_j = Df(x_0)[x_{1,j}, x_{2,j}, …]` exactly, and rest and errors are multiplied by the Jacobian bounds.

*Otherwise* two coefficients are known, :math:`f(x_0)` and :math:`Df(x_0)[x_1]`. Let :math:`x_0` and :math:`x_1` be
the exact ones, :math:`E_0` and :math:`E_1` off the computed ones, and :math:`x = p + \eta^2(R + E_2)` with
:math:`p(\eta) = x_0 + \eta x_1`. By Taylor's theorem along p

.. math:: \|z(\eta) - z_0 - \eta z_1\| \le \eta^2\Big(\tfrac12\sum_{ij}C_{ij}\|x_{i,1}\|\|x_{j,1}\|
    + \sum_i J_i(\text{rest}_i + e_{i,2})\Big),

and what is computed is off by :math:`\sum_iJ_ie_{i,0}` in the value and by :math:`\sum_iJ_ie_{i,1} +
\sum_{ij}C_{ij}e_{i,0}\|x_{j,1}\|` in the slope, with Jacobians and curvatures over all that the arguments reach,
row by row if the operation is row-wise.

*Round-off* of the value is that of :mod:`surefoot.operations.evaluation`, that of the derivatives
:math:`Df(x_0)[x_j]` that of :mod:`surefoot.operations.pushing`. Of operations that somebody else registered
nothing is proved there; it is *assumed*, and said, that it is at most :math:`2(k + 16)^2u`
times :math:`\|z_j\| + \sum_iJ_i\|x_{i,j}\| + \sum_{il}C_{il}\|x_{i,0}\|\|x_{l,j}\|`: what a sum of products of
the :math:`x_{i,j}` with entries of the Jacobian has, if these are sums of products of the arguments themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, constant, measure
from surefoot.graph.structure import Graph, Node, Spec
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call
from surefoot.operations.common import rows_of
from surefoot.operations.evaluation import roundoff, value_of
from surefoot.operations.pushing import differentiated, pushed
from surefoot.operations.record import rule_for
from surefoot.taylor import FLOOR, UNIT, TaylorModel, reach, rounded_up


def by_rule(graph: Graph, node: Node, models: dict[str, TaylorModel], order: int) -> TaylorModel:
    """The model of an operation from what its rule says, by tensor name."""
    call = Call(node, {name: enclosure_of(model) for name, model in models.items()})
    bounds = rule_for(node, graph)(call)
    moving = {slot: models[call.names[slot]] for slot in call.varying}
    if not moving.keys() <= bounds.jacobian.keys():
        raise call.refuse("of one of its arguments that move along the segment no slope is known")
    curved = any(not c.is_zero for (a, b), c in bounds.curvature.items() if a in moving and b in moving)
    order = min(order, 2) if curved else order
    rowwise = _keeps_rows(call, moving)
    moving = {slot: (m if rowwise else m.merged()).truncated(order) for slot, m in moving.items()}
    pieces = {name: models[name].truncated(order) for name in models}
    coefficients, errors = _coefficients(call, bounds, pieces, order)
    value = coefficients[0]
    assert isinstance(value, Tensor)
    rounding = roundoff(call, bounds, value, measure(value)[0])
    tail = _tail(bounds, moving, float(rounding), errors)
    return TaylorModel(coefficients, next(iter(moving.values())).length, tail, rowwise)


def constant_error(graph: Graph, node: Node, values: Mapping[str, Tensor], value: Tensor) -> float:
    """The round-off of an operation on constants that are exact."""
    call = Call(node, {name: replace(constant(number, 1), is_constant=False) for name, number in values.items()})
    return float(roundoff(call, rule_for(node, graph)(call), value, measure(value)[0]))


def _tail(bounds: Bounds, moving: dict[str, TaylorModel], rounding: float, errors: Sequence[float]) -> Tensor:
    """Rest and errors; those of the derivatives are summed up for the third and further coefficients."""
    length = next(iter(moving.values())).length
    tail = torch.zeros((1, 4), dtype=torch.float64, device=next(iter(moving.values())).value.device)
    rest = slope = tail[:, :1]
    for slot, model in moving.items():
        if model.tail is not None:
            tail = tail + float(bounds.jacobian[slot]) * model.tail
    for (a, b), curvature in bounds.curvature.items():
        if a in moving and b in moving and not curvature.is_zero:
            bend = float(curvature)
            first, second = _speed(moving[a]), _speed(moving[b])
            rest = rest + (first * second) * ((0.5 if a == b else 1.0) * bend)
            for one, other in {(a, b), (b, a)}:
                slope = slope + (moving[one].errors[:, :1] * bend) * _speed(moving[other])
    own = tail.new_tensor([[rounding, errors[0], sum(e * reach(length, j) for j, e in enumerate(errors[1:]))]])
    rest, slope = torch.broadcast_tensors(rest, slope)
    more = torch.cat([rest, own[:, :1].expand_as(rest), slope + own[:, 1:2], own[:, 2:].expand_as(rest)], dim=1)
    return rounded_up(tail + more)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) + FLOOR


def _speed(model: TaylorModel) -> Tensor:
    """The norm of the exact slope at the beginning, row by row."""
    slope = model.norms[1] if model.order > 1 else None
    return model.errors[:, 1:2] if slope is None else slope + model.errors[:, 1:2]


def _keeps_rows(call: Call, moving: dict[str, TaylorModel]) -> bool:
    """Whether the result has the rows of those of its arguments that have any."""
    rowed = {slot for slot, model in moving.items() if model.rowwise}
    return bool(rowed and call.shape and rowed <= rows_of(call))


def _coefficients(
    call: Call, bounds: Bounds, models: Mapping[str, TaylorModel], order: int
) -> tuple[tuple[Tensor | None, ...], list[float]]:
    """The value, the derivative applied to each coefficient of the arguments, and the errors of those; of several
    results, those of the first.
    """
    value = value_of(call.node, {name: model.value for name, model in models.items()})
    result: list[Tensor | None] = [value if isinstance(value, Tensor) else value[0]]
    errors: list[float] = []
    for j in range(1, order):
        parts = {name: model.coefficients[j] if j < model.order else None for name, model in models.items()}
        tangents = {slot: t for slot in call.varying if (t := parts[call.names[slot]]) is not None}
        found = pushed(call, bounds, tangents) if tangents else None
        if found is not None:
            result.append(found.value)
            errors.append(float(found.error))
        else:
            result.append(differentiated(call, tangents) if tangents else None)
            errors.append(_assumed(call, bounds, tangents, result[-1]))
    return tuple(result), errors


def _assumed(call: Call, bounds: Bounds, tangents: Mapping[str, Tensor], value: Tensor | None) -> float:
    """The round-off of a derivative that nobody proves; see the module."""
    if value is None:
        return 0.0
    size = _norm(value)
    for slot, tangent in tangents.items():
        size += float(bounds.jacobian[slot]) * _norm(tangent)
    for (a, b), curvature in bounds.curvature.items():
        for one, other in {(a, b), (b, a)}:
            if other in tangents and one in call.varying and not curvature.is_zero:
                size += _norm(call.slots[one].value) * _norm(tangents[other]) * float(curvature)
    return size * (bounds.reduction + 16.0) ** 2 * (2 * UNIT)


def enclosure_of(model: TaylorModel) -> Enclosure:
    """What a rule is told about a tensor along the segment; the only variable is the step."""
    value = model.value
    size, peak = measure(value)
    spec = Spec(tuple(value.shape), value.dtype)
    zero = Magnitude.zero((1,))
    if model.is_constant:
        nothing = Magnitude.zero()
        return Enclosure(spec, value, size, peak, nothing, None, nothing, zero, is_constant=True)
    moves = Magnitude.of(rounded_up(model.move).reshape(-1))
    spread = moves.norm() if model.rowwise else moves.max()
    farthest = minimum(spread, moves.max())
    rows = None
    if model.rowwise:
        rows = moves if moves.shape == value.shape[:1] else Magnitude(np.full(value.shape[0], moves.max().log2))
    error = Magnitude.zero() if model.tail is None else Magnitude.of(model.errors[:, 0]).norm()
    return Enclosure(spec, value, size + spread, peak + farthest, spread, rows, error, zero)
