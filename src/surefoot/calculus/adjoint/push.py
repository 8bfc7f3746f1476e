r"""The derivative of the outputs along a move of the parameters, with a proved bound on its error.

At the weights, with :math:`\tau_x` the derivative of a tensor along the move, hats what is computed, e how far
values are off, and J and C the bounds of the rule of :math:`z = f(x_1, …)`, the chain rule gives

.. math:: \|\hat\tau_z - \tau_z\| \le \sum_i\Big(J_i\|\hat\tau_i - \tau_i\| + \sum_jC_{ij}\,e_j\|\hat\tau_i\|\Big)
    + \rho_z .

*Round-off* :math:`\rho_z` of :math:`\sum_i\hat J_i\hat\tau_i`. Operations that move numbers, sums and products add
up at most r products of a tangent with a number of another argument or a fixed factor for each of at most s
arguments: whatever the order, an entry is off by :math:`\gamma_{rs+16}(|\hat J||\hat\tau|)`, and
:math:`\||J||\tau|\| \le \sqrt r\|J\|\|\tau\|` (:mod:`surefoot.calculus.adjoint.costates`); a product that
underflows loses :math:`2^{-1074}`. Scalar functions have slopes of known error. Soft-max and normalisations have
symmetric Jacobians, so what pulls costates back pushes tangents forward, with the same error. Of other operations
nothing is proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.calculus.forward import Pass, Step
from surefoot.calculus.segment.fallback import push_forward
from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Call
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.record import Form, record_of

_UNIT = 2.0**-53
_PLAIN = (Form.LAYOUT, Form.LINEAR, Form.PRODUCT)


@dataclass(frozen=True)
class Pushed:
    """A derivative along a move as computed, and a bound on the norm of its error."""

    value: Tensor
    error: Magnitude


def push(result: Pass, moves: Mapping[str, Tensor], output: str) -> Pushed | None:
    """The derivative of a tensor along moves of the variables, by name; ``None`` if nothing is proved.

    Args:
        result: a forward pass with centre values, of which the errors are those of the values.
        moves: of the variables; those that are missing stay.
        output: the tensor.
    """
    found = {name: Pushed(move.double(), Magnitude.zero()) for name, move in moves.items()}
    for step in result.steps:
        arguments = {slot: found[name] for slot, name in step.names.items() if name in found}
        if arguments:
            pushed = _through(result, step, found)
            if pushed is None:
                return None
            found[step.node.name] = Pushed(pushed.value, pushed.error + _carried(result, step, arguments))
        if step.node.name == output:
            break
    value = result.enclosures[output].value
    return found.get(output, Pushed(torch.zeros_like(value), Magnitude.zero()))


def _carried(result: Pass, step: Step, arguments: Mapping[str, Pushed]) -> Magnitude:
    """What the errors of tangents and values make of the result."""
    total = Magnitude.zero()
    for slot, tangent in arguments.items():
        total = total + step.bounds.jacobian[slot] * tangent.error
        for pair, other in step.partners(slot):
            off = step.argument(other, result.enclosures).error
            total = total + step.bounds.curvature[pair] * off * norm(tangent.value)
    return total


def _through(result: Pass, step: Step, found: Mapping[str, Pushed]) -> Pushed | None:
    """The derivative of one operation applied to the computed tangents, with its own round-off."""
    record, node = record_of(step.node), step.node
    if not isinstance(result.enclosures[node.name].value, Tensor):
        return None
    if record.symmetric and record.pullback is not None and len(step.names) == 1:
        ((slot, name),) = step.names.items()
        pulled = record.pullback(Call(node, result.enclosures), found[name].value).get(slot)
        if pulled is None:
            return None
        pulled = pulled.expand(result.enclosures[node.name].shape)
        return Pushed(pulled.value, norm(pulled.error))
    names = [name for name in dict.fromkeys(step.names.values()) if name in found]
    values = {name: result.enclosures[name].value for name in node.inputs}
    if record.form_of(node) not in _PLAIN or not all(isinstance(values[name], Tensor) for name in names):
        return None

    def function(*moving: Tensor) -> Tensor:
        return run_in_double(node, {**values, **dict(zip(names, moving, strict=True))})

    tangents = tuple(found[name].value for name in names)
    value = push_forward(function, tuple(values[name] for name in names), tangents)
    size = Magnitude.zero()
    for slot, name in step.names.items():
        if name in found:
            size = size + step.bounds.jacobian[slot] * norm(found[name].value)
    terms = float(step.bounds.reduction)
    factor = (terms * len(step.names) + 16.0) * (terms**0.5 + 1.0) * (2 * _UNIT)
    lost = terms * len(step.names) * max(1, node.numel) ** 0.5 * 2.0**-1074
    return Pushed(value, size * factor + lost)
