r"""Certificates along a segment.

For a real-valued function the constants are those a step needs, seen from its beginning:

.. math:: |F(\eta) - F_0| \le \ell\eta, \qquad F(\eta) \le F_0 + F_1\eta + \tfrac L2\eta^2
    \qquad (0 \le \eta \le \bar\eta),

for several outputs :math:`\|z(\eta) - z_0\| \le \ell\eta` and :math:`\|z(\eta) - z_0 - \eta z_1\| \le \frac
L2\eta^2`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.certify import captured, present_value
from surefoot.calculus.prepare import prepared
from surefoot.calculus.segment.majorant import Majorant, largest, majorant
from surefoot.calculus.segment.walk import expand, leaf_models
from surefoot.certificate import Certificate
from surefoot.domains import DomainError, Segment
from surefoot.graph import Graph
from surefoot.graph.evaluate import run_in_double
from surefoot.magnitude import Magnitude
from surefoot.operations.moving import Norms
from surefoot.taylor.model import TaylorModel

_TRIALS = 40  # reductions of a segment before giving up
_REFINEMENTS = 10


class Along:
    """A function of a model's parameters along segments from its present weights.

    Built once per batch; norms of layers may be shared from batch to batch and from step to step.

    Args:
        model: the model, with values.
        x: a batch.
        objective: a loss bound to its targets, or ``None`` for the model's output.
        norms: what is known about the norms of its layers.
    """

    def __init__(self, model: nn.Module, x: Any, objective: nn.Module | None, norms: Norms | None = None) -> None:
        graph, inputs = captured(model, x, objective)
        parameters = dict(model.named_parameters())
        values = {name: present_value(graph, leaf, parameters, inputs) for name, leaf in graph.leaves.items()}
        if any(value.device.type == "meta" for value in values.values()):
            raise DomainError("a segment starts at the present weights, and on the meta device there are none")
        self.graph: Graph = prepared(graph)
        self.values = values  # parameters by reference: they are read when a segment is expanded
        self.norms = Norms() if norms is None else norms
        self.names = {leaf.path: leaf.name for leaf in graph.parameters}
        self.aliases = graph.aliases

    def expand(self, direction: Mapping[str, Tensor], length: float, order: int) -> tuple[TaylorModel, ...]:
        """The outputs along a direction, by parameter path.

        Raises:
            DomainError: if the direction does not fit the parameters.
        """
        moves = {}
        for path, move in direction.items():
            name = self.names.get(self.aliases.get(path, path))
            if name is None:
                raise DomainError(f"the direction names '{path}', which is no parameter that varies")
            if move.shape != self.values[name].shape:
                raise DomainError(
                    f"the direction of '{path}' has shape {tuple(move.shape)}, "
                    f"not {tuple(self.values[name].shape)}"
                )
            if not bool(torch.isfinite(move).all()):
                raise DomainError(f"the direction of '{path}' is not finite")
            moves[name] = move
        leaves = leaf_models(self.graph, self.values, moves, float(length))
        return expand(self.graph, leaves, order, self.norms)

    def majorant(self, direction: Mapping[str, Tensor], length: float, order: int) -> Majorant:
        """The quadratic upper bound of the objective along a direction."""
        (output,) = self.expand(direction, length, order)
        return majorant(output)

    def longest(
        self, direction: Mapping[str, Tensor], whole: Majorant, order: int, refinements: int = 0
    ) -> Majorant:
        """The bound on a part of the segment, from its beginning, that is not much longer than the step it allows.

        The bound of a shorter segment is lower, so its step may be longer. The best part is as long as its step:
        the length is reduced until the step is a quarter of it, then, if wanted, found by halving the interval.
        Where nothing is found, the step is zero.

        Args:
            direction: by parameter path.
            whole: the bound on all of the segment.
            order: Taylor coefficients.
            refinements: how often the interval is halved.
        """
        bound, too_long = whole, whole.length
        for _ in range(_TRIALS):
            if bound.step >= 0.25 * bound.length:
                break
            too_long = bound.length
            shorter = 2 * bound.step if bound.step > 0.1 * bound.length else bound.length / 5
            if shorter == 0:
                break
            bound = self.majorant(direction, shorter, order)
        low = bound.step
        for _ in range(refinements):
            if not low < 0.99 * too_long:
                break
            middle = self.majorant(direction, 0.5 * (low + too_long), order)
            bound = middle if middle.step > bound.step else bound
            if middle.step >= 0.999 * middle.length:
                low = middle.length
            else:
                too_long = middle.length
        return bound

    def steepest_descent(self) -> dict[str, Tensor]:
        """Minus the gradient of the objective, in double precision."""
        leaves = {path: self.values[name].detach().double().requires_grad_() for path, name in self.names.items()}
        values = {**self.values, **{self.names[path]: leaf for path, leaf in leaves.items()}}
        outputs = _run(self.graph, values)
        if outputs[0].numel() != 1:
            raise DomainError("steepest descent is that of an objective: give one, or a direction")
        gradients = torch.autograd.grad(outputs[0].sum(), list(leaves.values()), allow_unused=True)
        return {
            path: torch.zeros_like(leaf) if gradient is None else -gradient
            for (path, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }


def certify_segment(model: nn.Module, x: Any, objective: nn.Module | None, domain: Segment) -> Certificate:
    """The certificate of an objective, or of the outputs, along a segment.

    Raises:
        DomainError: if the direction does not fit.
        UnsupportedOperation: if an operation has no rule.
    """
    along = Along(model, x, objective)
    direction = along.steepest_descent() if domain.direction is None else domain.direction
    outputs = along.expand(direction, domain.length, domain.order)
    scalar = len(outputs) == 1 and outputs[0].value.numel() == 1
    step = None
    if scalar:
        step = along.longest(direction, majorant(outputs[0]), domain.order, _REFINEMENTS).step
    bound, lipschitz, smoothness = _of_number(outputs[0]) if scalar else _of_vector(outputs)
    return Certificate(
        bound=_magnitude(bound),
        lipschitz=_magnitude(lipschitz),
        smoothness=_magnitude(smoothness),
        block_lipschitz={},
        block_smoothness=Magnitude.zero((0, 0)),
        reasons=() if math.isfinite(smoothness) else (_REASON,),
        domain=str(domain),
        wrt="params",
        scalar=scalar,
        segment_step=step,
    )


_REASON = (
    "along the segment a kink or an unbounded curvature is within reach: use smooth activations "
    "(surefoot.smooth), or a shorter segment"
)


def _of_number(model: TaylorModel) -> tuple[float, float, float]:
    """Bound, Lipschitz constant and curvature of a real-valued function, seen from the beginning."""
    upper = majorant(model)
    numbers = [0.0 if c is None else float(c) for c in model.coefficients]
    rest, error = (0.0, 0.0) if model.tail is None else (float(t) for t in model.tail[0])
    slope = sum(abs(c) * model.length ** (j - 1) for j, c in enumerate(numbers) if j)
    slope = (slope + rest * model.length ** (model.order - 1)) * (1 + 2.0**-40)
    bound = abs(numbers[0]) + slope * model.length + error
    return bound, slope, max(upper.curvature, 0.0)


def _of_vector(models: tuple[TaylorModel, ...]) -> tuple[float, float, float]:
    whole = [model.merged() for model in models]
    bound = math.hypot(*(float(model.sizes) for model in whole))
    slopes, bends = [], []
    for model in whole:
        numbers = [0.0 if size is None else float(size) for size in model.norms]
        rest = 0.0 if model.tail is None else float(model.tail[0, 0])
        polynomial = [*numbers, rest]
        slopes.append(largest(polynomial[1:], model.length))
        bends.append(2 * largest(polynomial[2:] or [0.0], model.length))
    return bound, math.hypot(*slopes), math.hypot(*bends)


def _magnitude(value: float) -> Magnitude:
    return Magnitude.of(value * (1 + 2.0**-26)) if math.isfinite(value) else Magnitude.infinity()


def _run(graph: Graph, values: Mapping[str, Tensor]) -> list[Tensor]:
    known: dict[str, Any] = {
        name: value.double() if value.is_floating_point() else value for name, value in values.items()
    }
    for node in graph.nodes:
        known[node.name] = run_in_double(node, {name: known[name] for name in node.inputs})
    return [known[name] for name in graph.outputs]
