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

*Round-off* of the value is that of :mod:`surefoot.operations.evaluation`. That of a derivative
:math:`Df(x_0)[x_j]` is taken to be :math:`2(k + 16)^2u` times :math:`\|z_j\| + \sum_iJ_i\|x_{i,j}\| +
\sum_{il}C_{il}\|x_{i,0}\|\|x_{l,j}\|`: it is a sum of products of the :math:`x_{i,j}` with entries of the
Jacobian; where these are themselves sums of products, relative perturbations inside count with the curvature.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.enclosure import Enclosure, constant, measure
from surefoot.graph.structure import Graph, Node, Spec
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call
from surefoot.operations.evaluation import roundoff, run_in_double
from surefoot.operations.record import rule_for
from surefoot.operations.rows import rows_of
from surefoot.taylor import FLOOR, UNIT, TaylorModel, reach, rounded_up


def by_rule(graph: Graph, node: Node, models: dict[str, TaylorModel], order: int) -> TaylorModel:
    """The model of an operation from what its rule says, by tensor name.

    Raises:
        UnsupportedOperation: if it has no rule, or returns several tensors that move.
    """
    call = Call(node, {name: enclosure_of(model) for name, model in models.items()})
    if isinstance(node.spec, tuple):
        raise call.refuse("operations with several results are not covered along a segment")
    bounds = rule_for(node, graph)(call)
    moving = {slot: models[call.names[slot]] for slot in call.varying}
    if not moving.keys() <= bounds.jacobian.keys():
        raise call.refuse("of one of its arguments that move along the segment no slope is known")
    curved = any(not c.is_zero for (a, b), c in bounds.curvature.items() if a in moving and b in moving)
    order = min(order, 2) if curved else order
    rowwise = _keeps_rows(call, moving)
    moving = {slot: (m if rowwise else m.merged()).truncated(order) for slot, m in moving.items()}
    pieces = {name: models[name].truncated(order) for name in models}
    coefficients = _coefficients(node, pieces, order)
    value = coefficients[0]
    assert value is not None
    rounding = roundoff(call, bounds, value, measure(value)[0])
    tail = _tail(bounds, moving, coefficients, float(rounding))
    return TaylorModel(coefficients, next(iter(moving.values())).length, tail, rowwise)


def constant_error(graph: Graph, node: Node, values: Mapping[str, Tensor], value: Tensor) -> float:
    """The round-off of an operation on constants that are exact."""
    call = Call(node, {name: replace(constant(number, 1), is_constant=False) for name, number in values.items()})
    return float(roundoff(call, rule_for(node, graph)(call), value, measure(value)[0]))


def _tail(
    bounds: Bounds, moving: dict[str, TaylorModel], coefficients: tuple[Tensor | None, ...], rounding: float
) -> Tensor:
    """Rest and errors; those of the derivatives are summed up for the third and further coefficients."""
    length = next(iter(moving.values())).length
    jacobian = {slot: float(bounds.jacobian[slot]) for slot in moving}
    sizes = [_size(coefficients, 1), sum(_size(coefficients, j) * reach(length, j - 2) for j in range(2, 6))]
    tail = torch.zeros((1, 4), dtype=torch.float64, device=next(iter(moving.values())).value.device)
    rest = slope = tail[:, :1]
    for slot, model in moving.items():
        norms = [_size(model.coefficients, j) for j in range(6)]
        sizes[0] += jacobian[slot] * norms[1]
        sizes[1] += jacobian[slot] * sum(norms[j] * reach(length, j - 2) for j in range(2, 6))
        if model.tail is not None:
            tail = tail + jacobian[slot] * model.tail
    for (a, b), curvature in bounds.curvature.items():
        if a in moving and b in moving and not curvature.is_zero:
            bend = float(curvature)
            first, second = _speed(moving[a]), _speed(moving[b])
            rest = rest + (first * second) * ((0.5 if a == b else 1.0) * bend)
            for one, other in {(a, b), (b, a)}:
                slope = slope + (moving[one].errors[:, :1] * bend) * _speed(moving[other])
                size, speed = _size(moving[one].coefficients, 0), _size(moving[other].coefficients, 1)
                sizes[0] += size * speed * bend
    relative = (bounds.reduction + 16.0) ** 2 * (2 * UNIT)
    own = tail.new_tensor([[rounding, *(size * relative for size in sizes)]])
    rest, slope = torch.broadcast_tensors(rest, slope)
    more = torch.cat([rest, own[:, :1].expand_as(rest), slope + own[:, 1:2], own[:, 2:].expand_as(rest)], dim=1)
    return rounded_up(tail + more)


def _size(coefficients: Sequence[Tensor | None], degree: int) -> float:
    """The norm of a coefficient, all rows together."""
    c = coefficients[degree] if degree < len(coefficients) else None
    return 0.0 if c is None else float(torch.linalg.vector_norm(c)) + FLOOR


def _speed(model: TaylorModel) -> Tensor:
    """The norm of the exact slope at the beginning, row by row."""
    slope = model.norms[1] if model.order > 1 else None
    return model.errors[:, 1:2] if slope is None else slope + model.errors[:, 1:2]


def _keeps_rows(call: Call, moving: dict[str, TaylorModel]) -> bool:
    """Whether the result has the rows of those of its arguments that have any."""
    rowed = {slot for slot, model in moving.items() if model.rowwise}
    return bool(rowed and call.shape and rowed <= rows_of(call))


def _coefficients(node: Node, models: dict[str, TaylorModel], order: int) -> tuple[Tensor | None, ...]:
    """The value, and the derivative applied to each coefficient of the arguments."""
    names = [name for name, model in models.items() if not model.is_constant]
    fixed = {name: model.value for name, model in models.items()}

    def function(*values: Tensor) -> Tensor:
        return run_in_double(node, {**fixed, **dict(zip(names, values, strict=True))})

    centre = tuple(models[name].value for name in names)
    result: list[Tensor | None] = [function(*centre)]
    for j in range(1, order):
        parts = [models[name].coefficients[j] if j < models[name].order else None for name in names]
        if all(part is None for part in parts):
            result.append(None)
            continue
        tangents = tuple(torch.zeros_like(c) if p is None else p for c, p in zip(centre, parts, strict=True))
        result.append(push_forward(function, centre, tangents))
    return tuple(result)


def push_forward(function: Callable[..., Any], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    """The directional derivative, by forward differentiation or, where an operation has none, twice backward."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its first forward derivative
        try:
            return torch.func.jvp(function, point, tangents)[1]
        except (RuntimeError, NotImplementedError):
            return torch.autograd.functional.jvp(function, point, tangents)[1]


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
