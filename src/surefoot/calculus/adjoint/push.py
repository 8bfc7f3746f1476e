r"""The derivative of the outputs along a move of the parameters, with a proved bound on its error.

At the weights, with :math:`\tau_x` the derivative of a tensor along the move, hats what is computed, e how far
values are off, and J and C the bounds of the rule of :math:`z = f(x_1, …)`, the chain rule gives

.. math:: \|\hat\tau_z - \tau_z\| \le \sum_i\Big(J_i\|\hat\tau_i - \tau_i\| + \sum_jC_{ij}\,e_j\|\hat\tau_i\|\Big)
    + \rho_z .

*Round-off* :math:`\rho_z` of :math:`\sum_i\hat J_i\hat\tau_i` is that of :mod:`surefoot.operations.pushing`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Call
from surefoot.operations.pushing import Pushed, pushed


def push(result: Pass, moves: Mapping[str, Tensor], output: str) -> Pushed | None:
    """The derivative of a tensor along moves of the variables, by name; ``None`` if nothing is proved.

    The pass has centre values, and its errors are those of the values. Variables without a move stay.
    """
    found = {name: Pushed(move.double(), Magnitude.zero()) for name, move in moves.items()}
    for step in result.steps:
        arguments = {slot: found[name] for slot, name in step.names.items() if name in found}
        if arguments:
            through = _through(result, step, arguments)
            if through is None:
                return None
            found[step.node.name] = Pushed(through.value, through.error + _carried(result, step, arguments))
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


def _through(result: Pass, step: Step, arguments: Mapping[str, Pushed]) -> Pushed | None:
    """The derivative of one operation applied to the computed tangents, with its own round-off."""
    values = [result.enclosures[name].value for name in (step.node.name, *step.names.values())]
    if not all(isinstance(value, Tensor) for value in values):
        return None
    tangents = {slot: tangent.value for slot, tangent in arguments.items()}
    return pushed(Call(step.node, result.enclosures), step.bounds, tangents)
