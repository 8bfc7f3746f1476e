r"""A function of a model's parameters along segments from its present weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.analysis import Analysis
from surefoot.calculus.segment.majorant import Majorant, majorant
from surefoot.calculus.segment.walk import expand, leaf_models
from surefoot.domains import DomainError
from surefoot.operations.moving import Norms
from surefoot.taylor import TaylorModel

_TRIALS = 40  # reductions of a segment before giving up


class Along:
    """A function of a model's parameters along segments from its present weights.

    Built once per batch. Whatever changed in between, a segment starts at the weights as they are when it is
    asked for, and is one of the function that the model computes then.

    Args:
        model: the model, with values.
        x: a batch.
        objective: a loss bound to its targets, or ``None`` for the model's output.
        norms: what is known about the norms of its layers, shared from batch to batch and from step to step.
    """

    def __init__(self, model: nn.Module, x: Any, objective: nn.Module | None, norms: Norms | None = None) -> None:
        self._last = Analysis.of(model, x, objective, norms=norms)
        self._last.require_values()

    @property
    def analysis(self) -> Analysis:
        """Of the function as it is now."""
        self._last = Analysis.of(self._last.model, self._last.x, self._last.objective, self._last)
        return self._last

    def expand(self, direction: Mapping[str, Tensor], length: float, order: int) -> tuple[TaylorModel, ...]:
        """The outputs along a direction, by parameter path.

        Raises:
            DomainError: if the direction does not fit the parameters.
        """
        return _expand(self.analysis, direction, length, order)

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
        return {path: -slope for path, slope in self.analysis.gradient.items()}


def _expand(
    analysis: Analysis, direction: Mapping[str, Tensor], length: float, order: int
) -> tuple[TaylorModel, ...]:
    graph, values = analysis.reading.graph, analysis.values
    names = {leaf.path: leaf.name for leaf in graph.parameters}
    moves = {}
    for path, move in direction.items():
        name = names.get(graph.aliases.get(path, path))
        if name is None:
            raise DomainError(f"the direction names '{path}', which is no parameter that varies")
        if move.shape != values[name].shape:
            raise DomainError(
                f"the direction of '{path}' has shape {tuple(move.shape)}, not {tuple(values[name].shape)}"
            )
        if not bool(torch.isfinite(move).all()):
            raise DomainError(f"the direction of '{path}' is not finite")
        moves[name] = move
    leaves = leaf_models(analysis.reading.prepared, values, moves, float(length))
    return expand(analysis.reading.prepared, leaves, order, analysis.reading.norms)
