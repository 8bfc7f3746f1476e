r"""The gradient of an objective at the present weights, with a proved bound on its error.

The derivative of the outputs along a move of the parameters, with a proved bound on its error.

At the weights, with :math:`\tau_x` the derivative of a tensor along the move, hats what is computed, e how far
values are off, and J and C the bounds of the rule of :math:`z = f(x_1, …)`, the chain rule gives

.. math:: \|\hat\tau_z - \tau_z\| \le \sum_i\Big(J_i\|\hat\tau_i - \tau_i\| + \sum_jC_{ij}\,e_j\|\hat\tau_i\|\Big)
    + \rho_z .

*Round-off* :math:`\rho_z` of :math:`\sum_i\hat J_i\hat\tau_i` is that of :mod:`surefoot.operations.pushing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.calculus.adjoint.backward import backward, zeros
from surefoot.calculus.adjoint.costates import costates
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.forward import Pass, Step
from surefoot.domains import Ball
from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Call
from surefoot.operations.pushing import Pushed, pushed
from surefoot.operations.record import record_of


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


@dataclass(frozen=True)
class ProvedGradient:
    """A gradient as computed in double precision."""

    value: float  # of the function; infinite where it is not known
    slopes: Mapping[str, Tensor]  # the gradient, by path of the parameter
    errors: Mapping[str, float]  # how far it may be off, in norm, by path
    result: Pass  # the forward pass at the weights

    def bent(self, move: Mapping[str, Tensor]) -> float:
        r"""A bound on :math:`\langle Jv, \nabla^2h\,Jv\rangle`, what a loss h of outputs with Jacobian J, on their
        linear model, curves along a move by path; infinite if nothing is proved.

        It is at most :math:`C(\|\hat\tau\| + \epsilon)^2`, with the curvature C of the loss at the outputs and the
        derivative of these along the move, :math:`\hat\tau` up to :math:`\epsilon`
        (:mod:`surefoot.calculus.adjoint.gradient`). For the square loss that is all.
        """
        result = self.result
        graph, last = result.graph, result.steps[-1]
        if graph is None or record_of(last.node).loss is None or last.node.name != result.outputs[0]:
            return math.inf
        names = {leaf.path: leaf.name for leaf in graph.parameters}
        found = {names.get(graph.aliases.get(path, path)): value for path, value in move.items()}
        moves = {name: value for name, value in found.items() if name is not None}
        tangent = push(result, moves, last.names["outputs"])
        if tangent is None:
            return math.inf
        return float(last.bounds.curvature["outputs", "outputs"] * (norm(tangent.value) + tangent.error) ** 2)


def proved_gradient(analysis: Analysis) -> ProvedGradient:
    """The costates of the parameters on the domain that is one point, the weights.

    Their errors contain those of the values, of all costates on the way and of every product
    (:mod:`surefoot.calculus.adjoint.costates`). They are infinite where the pass back is not finite.
    """
    result = analysis.over(Ball(0.0))
    graph, at = analysis.reading.graph, backward(result)
    value = result.enclosures[result.outputs[0]].value
    by_name = {} if at is None else costates(result, at)
    slopes: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for leaf in graph.parameters:
        if leaf.name not in result.region.variables:
            continue
        costate = by_name.get(leaf.name)
        unknown = zeros(result.enclosures[leaf.name].value)
        slopes[leaf.path] = unknown if costate is None else costate.value
        errors[leaf.path] = (math.inf if at is None else 0.0) if costate is None else float(costate.error)
    further = {path: name for path, name in graph.aliases.items() if name in slopes}
    return ProvedGradient(
        math.inf if value is None else float(value),
        slopes | {path: slopes[name] for path, name in further.items()},
        errors | {path: errors[name] for path, name in further.items()},
        result,
    )
