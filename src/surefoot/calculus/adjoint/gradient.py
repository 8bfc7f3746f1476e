"""The gradient of an objective at the present weights, with a proved bound on its error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from surefoot.calculus.adjoint.backward import backward, zeros
from surefoot.calculus.adjoint.costates import costates
from surefoot.calculus.adjoint.push import push
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.forward import Pass
from surefoot.domains import Ball
from surefoot.enclosure import norm
from surefoot.operations.record import record_of


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
        (:mod:`surefoot.calculus.adjoint.push`). For the square loss that is all.
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

    Raises:
        DomainError: if there are no values.
        UnsupportedOperation: if an operation has no rule.
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
