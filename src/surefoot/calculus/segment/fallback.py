r"""Any other operation along a segment, from its rule.

*Affine within reach* (the rule's curvatures are zero): the derivative at the centre is that everywhere, so
:math:`z_j = Df(x_0)[x_{1,j}, x_{2,j}, …]` exactly, and rest and error are multiplied by the Jacobian bounds.

*Otherwise* two coefficients are known, :math:`f(x_0)` and :math:`Df(x_0)[x_1]`, and by Taylor's theorem along
:math:`p(\eta) = x_0 + \eta x_1`

.. math:: \|z(\eta) - z_0 - \eta z_1\| \le \eta^2\Big(\tfrac12\sum_{ij}C_{ij}\|x_{i,1}\|\|x_{j,1}\|
    + \sum_i J_i\,\text{rest}_i\Big) + \sum_i J_i\,\text{error}_i

with Jacobians and curvatures over all that the arguments reach, row by row if the operation is row-wise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.enclosure import Enclosure, measure
from surefoot.graph.structure import Graph, Node, Spec
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call
from surefoot.operations.evaluation import roundoff, run_in_double
from surefoot.operations.record import rule_for
from surefoot.operations.rows import rows_of
from surefoot.taylor import UNIT, TaylorModel, rounded_up


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


def _tail(
    bounds: Bounds, moving: dict[str, TaylorModel], coefficients: tuple[Tensor | None, ...], rounding: float
) -> Tensor:
    jacobian = {slot: float(bounds.jacobian[slot]) for slot in moving}
    first = coefficients[0]
    assert first is not None
    rest = torch.zeros((1, 1), dtype=torch.float64, device=first.device)
    size = rest + float(torch.linalg.vector_norm(first))
    tail: Tensor | float = 0.0
    for slot, model in moving.items():
        size = size + jacobian[slot] * torch.linalg.vector_norm(model.sizes)
        if model.tail is not None:
            tail = tail + jacobian[slot] * model.tail
    for (a, b), curvature in bounds.curvature.items():
        if a in moving and b in moving and not curvature.is_zero:
            speeds = [moving[slot].norms[1] if moving[slot].order > 1 else None for slot in (a, b)]
            if speeds[0] is not None and speeds[1] is not None:
                rest = rest + (0.5 if a == b else 1.0) * float(curvature) * speeds[0] * speeds[1]
    error = size * ((bounds.reduction + 16.0) ** 2 * UNIT * (len(coefficients) + 1)) + rounding
    own = torch.cat([rest, error.expand_as(rest)], dim=1)
    return rounded_up(own + tail)


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
    error = Magnitude.zero() if model.tail is None else Magnitude.of(model.tail[:, 1]).norm()
    return Enclosure(spec, value, size + spread, peak + farthest, spread, rows, error, zero)
