r"""A function of a model's parameters along segments from its present weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.analysis import Analysis
from surefoot.calculus.segment.majorant import Majorant, majorant
from surefoot.calculus.segment.walk import expand, leaf_models
from surefoot.domains import DomainError
from surefoot.norms.hermitian import times_power
from surefoot.operations.moving import Norms
from surefoot.taylor import TaylorModel, is_finite, reach

_EXTREME = 50  # lengths between 2^-50 and 2^50 are taken as they are
_LOST = 2.0**-1000
_TRIALS = 40  # reductions of a segment before giving up


class Along:
    """A function of a model's parameters along segments from its present weights.

    Built once per batch. Whatever changed in between, a segment starts at the weights as they are when it is
    asked for, and is one of the function that the model computes then. ``expansions`` counts them.

    Args:
        model: the model, with values.
        x: a batch.
        objective: a loss bound to its targets, or ``None`` for the model's output.
        norms: what is known about the norms of its layers, shared from batch to batch and from step to step.
        stored: whether what is said of steps of an eighth of a segment or more shall hold for weights that are
            rounded to double precision at the end.
        aside: by path, how far other directions may be from those that are asked for, in norm, if what is said
            shall hold along them as well.
        previous: an analysis of the same, which is used as long as it is true.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        objective: nn.Module | None,
        norms: Norms | None = None,
        *,
        stored: bool = False,
        aside: Mapping[str, float] | None = None,
        previous: Analysis | None = None,
    ) -> None:
        self._stored, self._aside, self.expansions = stored, aside or {}, 0
        self._last = Analysis.of(model, x, objective, previous, norms)
        self._last.require_values()

    @property
    def analysis(self) -> Analysis:
        """The analysis of the function as it is now."""
        self._last = Analysis.of(self._last.model, self._last.x, self._last.objective, self._last)
        return self._last

    def expand(self, direction: Mapping[str, Tensor], length: float, order: int) -> tuple[TaylorModel, ...]:
        """The outputs along a direction, by parameter path.

        Raises:
            DomainError: if the direction does not fit the parameters, or the length is not finite.
        """
        self.expansions += 1
        return _expand(self.analysis, direction, length, order, self._stored, self._aside)

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
    analysis: Analysis,
    direction: Mapping[str, Tensor],
    length: float,
    order: int,
    stored: bool,
    aside: Mapping[str, float],
) -> tuple[TaylorModel, ...]:
    """The outputs, for extreme lengths by way of one from 1 to 2: the direction is multiplied by a power of two.

    That is exact, but for entries that underflow; see :mod:`surefoot.taylor` for why these do not count.
    """
    length = float(length)
    if not 0 <= length < math.inf:
        raise DomainError(f"the length of a segment is a finite number ≥ 0, got {length}")
    graph, values = analysis.reading.graph, analysis.values
    names = {leaf.path: leaf.name for leaf in graph.parameters}
    exponent = 0 if 2.0**-_EXTREME <= length <= 2.0**_EXTREME else math.frexp(length)[1] - 1
    moves, off = {}, {}
    for path, move in direction.items():
        name = names.get(graph.aliases.get(path, path))
        if name is None:
            raise DomainError(f"the direction names '{path}', which is no parameter that varies")
        if move.shape != values[name].shape:
            raise DomainError(
                f"the direction of '{path}' has shape {tuple(move.shape)}, not {tuple(values[name].shape)}"
            )
        if not is_finite(move):
            raise DomainError(f"the direction of '{path}' is not finite")
        moves[name] = times_power(move.double(), exponent)
        off[name] = math.ldexp(aside.get(path, 0.0), exponent)
    prepared = analysis.reading.prepared
    leaves = leaf_models(prepared, values, moves, math.ldexp(length, -exponent), order, stored, off)
    outputs = expand(prepared, leaves, order, analysis.reading.norms)
    if not exponent:
        return outputs
    return tuple(_unscaled(model, length, exponent) for model in outputs)


def _unscaled(model: TaylorModel, length: float, exponent: int) -> TaylorModel:
    r"""The model of a function of :math:`2^{-k}\eta` as one of :math:`\eta`.

    Bounds that underflow become the smallest normal number. A coefficient that underflows loses at most
    :math:`2^{-1022}\sqrt n`: an error of the slope, or :math:`\bar\eta^{j-2}` times that one of second order.
    """
    coefficients = tuple(
        None if c is None else times_power(c, -j * exponent) for j, c in enumerate(model.coefficients)
    )
    if model.tail is None:
        return TaylorModel(coefficients, length, None, model.rowwise)
    degrees = zip((model.order, 0, 1, 2), model.tail.split(1, dim=1), strict=True)
    tail = torch.cat([times_power(bound, -degree * exponent) for degree, bound in degrees], dim=1)
    lost = _LOST * tail.new_tensor([0.0, 0.0, 1.0, sum(reach(length, j) for j in range(model.order - 2))])
    return TaylorModel(coefficients, length, tail.clamp(min=2.0**-1022) + lost, model.rowwise)
