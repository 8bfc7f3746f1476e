"""An objective at points: values when asked, gradients and proofs when wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from surefoot.objectives import Regularizer
from surefoot.optim.projection import shrunk
from surefoot.optim.vectors import Layout, Tensors
from surefoot.valuation.normalising import Statistics
from surefoot.valuation.passes import Run
from surefoot.valuation.single import is_exact_here
from surefoot.valuation.streamed import Streamed, StreamedValuer
from surefoot.valuation.valuer import Evaluation, InfiniteValue, Valuer

_NARROW = 3.0  # times a tenth of a decrease: errors in single precision that prove it
_SHORTEST, _LONGEST = 8, 512  # passes in double after one in single precision that did not decide


class Passed(Protocol):
    """One pass over the data at some weights."""

    @property
    def value(self) -> float:
        """The value of the loss."""

    @property
    def gradient(self) -> Mapping[str, Tensor]:
        """The gradient of the loss, by path."""

    @property
    def statistics(self) -> Sequence[Statistics] | None:
        """The statistics of the batch, one for each normalisation; ``None`` if they are not known."""

    def foresee(self, enough: float) -> None:
        """Be ready to tell the loss up to an error of ``enough``, before the gradient is asked for."""

    def enclosed(self, enough: float) -> Evaluation:
        """The loss in exact arithmetic; an error below ``enough`` is not made smaller."""


class Data(Protocol):
    """The loss of given data at any weights."""

    @property
    def name(self) -> str:
        """The name of the data; that of a loader is known after the first pass."""

    def at(self, weights: Mapping[str, Tensor]) -> Passed:
        """One pass."""


@dataclass
class _BatchPass:
    """A pass, in single precision if that may decide; its value is told in double where it does not."""

    batch: Batch
    valuer: Valuer
    run: Run
    _in_double: Evaluation | None = None

    @property
    def value(self) -> float:
        return self.run.value

    @cached_property
    def gradient(self) -> Tensors:
        return self.valuer.gradient(self.run)

    @property
    def statistics(self) -> Sequence[Statistics] | None:
        return self.run.statistics

    def foresee(self, enough: float) -> None:
        self.run = self.valuer.foreseen(self.run, enough * (_NARROW if self.valuer.tape.single else 1.0))

    def enclosed(self, enough: float) -> Evaluation:
        found = self._in_double or self.valuer.enclosed(self.run, enough)
        if not self.valuer.tape.single:
            return found
        if found.error > enough:
            self.batch.turns.wait()
            found = self._in_double = self._told(enough)
        elif self._in_double is None and enough < math.inf:
            self.batch.turns.decided()
        return found

    def _told(self, enough: float) -> Evaluation:
        """In double: by a pass forward and, if that does not say enough, one with derivatives."""
        wide = self.batch.valuer
        weights = {leaf.path: self.run.parameters[leaf.name] for leaf in self.valuer.tape.graph.parameters}
        found = wide.enclosed(wide.run(weights, derivatives=False), enough)
        return found if found.error <= enough else wide.enclosed(wide.run(weights), enough)


class Turns:
    """When passes are made in single precision first: as long as they decide now and then."""

    def __init__(self) -> None:
        self._waiting, self._patience = 0, _SHORTEST

    def in_single(self) -> bool:
        """Whether the next pass is to be made so."""
        self._waiting -= 1
        return self._waiting < 0

    def wait(self) -> None:
        """Single precision did not decide: it is tried again later, and later still if that does not either."""
        if self._waiting < 0:
            self._waiting, self._patience = self._patience, min(4 * self._patience, _LONGEST)

    def decided(self) -> None:
        """Single precision did decide."""
        self._patience = _SHORTEST


@dataclass
class Batch:
    """One batch."""

    valuer: Valuer
    name: str
    turns: Turns

    def at(self, weights: Mapping[str, Tensor]) -> Passed:
        """A pass forward; backward when the gradient is asked for."""
        chosen = self.valuer.in_single
        if chosen is not None and self.turns.in_single() and is_exact_here(weights):
            run = chosen.run(weights, light=True)
            if math.isfinite(run.value):
                return _BatchPass(self, chosen, run)
        return _BatchPass(self, self.valuer, self.valuer.run(weights, light=True))


@dataclass
class StreamedPass:
    """A pass over a loader, which has everything at once; its value is told in double where single precision does
    not decide.

    Attributes:
        found: what it has.
        again: another pass in double, with derivatives or without; ``None`` if this was one.
    """

    found: Streamed
    again: Callable[[bool], Streamed] | None = None

    @property
    def value(self) -> float:
        """The value of the loss."""
        return self.found.evaluation.value

    @property
    def gradient(self) -> Mapping[str, Tensor]:
        """The gradient of the loss, by path."""
        assert self.found.gradient is not None
        return self.found.gradient

    @property
    def statistics(self) -> Sequence[Statistics] | None:
        """Not known: a loader takes running statistics as they are."""
        return None

    def foresee(self, enough: float) -> None:
        """Nothing: it is known."""

    def enclosed(self, enough: float) -> Evaluation:
        """The loss in exact arithmetic."""
        for derivatives in (False, True):
            if self.again is None or self.found.evaluation.error <= enough:
                break
            told = self.again(derivatives)
            self.found = replace(self.found, evaluation=told.evaluation)
            self.again = None if derivatives else self.again
        return self.found.evaluation


@dataclass
class Stream:
    """All batches of a loader."""

    valuer: StreamedValuer
    turns: Turns

    @property
    def name(self) -> str:
        """From its numbers, in any order."""
        return self.valuer.data

    def at(self, weights: Mapping[str, Tensor]) -> Passed:
        """One pass over the loader, with derivatives: most trials need them."""
        if not self.turns.in_single():
            return StreamedPass(self.valuer.evaluate(weights, derivatives=True))

        def again(derivatives: bool) -> Streamed:
            self.turns.wait()
            return self.valuer.evaluate(weights, derivatives=derivatives)

        return StreamedPass(self.valuer.evaluate(weights, derivatives=True, single=True), again)


class Function:
    r"""The loss of given data plus a regulariser, as a function of the vector of parameters that are optimised.

    Args:
        data: the loss.
        regularizer: added to it, or ``None``; gradients are without its absolute values.
        weights: the parameters; points are rounded to their types.
    """

    def __init__(self, data: Data, regularizer: Regularizer | None, weights: Mapping[str, Tensor]) -> None:
        self.data, self.regularizer, self.layout = data, regularizer, Layout.of(weights)
        self._types = {name: value.dtype for name, value in weights.items()}
        self._is_double = set(self._types.values()) == {torch.float64}

    def at(self, weights: Mapping[str, Tensor]) -> Point:
        """The point of these weights, which are of their types."""
        return Point(self, {name: value.detach() for name, value in weights.items()})

    def near(self, point: Point, direction: Tensor, step: float) -> Point:
        """The point at a step along a direction from another, rounded to the types of the parameters."""
        return self._stored(torch.add(point.vector, direction, alpha=step))

    def proximal(self, point: Point, step: float) -> tuple[Point, float]:
        r"""The point :math:`\arg\min_p\frac1{2\gamma}\|p - u + \gamma\nabla F(u)\|^2 +
        \sum_t\lambda_t\|p_t\|_1` after a proximal step of size :math:`\gamma`, rounded likewise, and how far it is
        before that.
        """
        assert self.regularizer is not None
        aim = self.layout.unpack(point.vector - step * point.gradient)
        thresholds = {name: step * self.regularizer.threshold_of(name) for name in aim}
        vector = self.layout.pack(shrunk(aim, thresholds))
        return self._stored(vector), self.layout.norm(vector - point.vector)

    def penalty(self, weights: Mapping[str, Tensor]) -> tuple[float, float]:
        """The regulariser and its round-off."""
        return (0.0, 0.0) if self.regularizer is None else self.regularizer.enclosed(weights)

    def _stored(self, vector: Tensor) -> Point:
        moved = self.layout.unpack(vector)
        if self._is_double:
            return Point(self, moved, vector)
        return Point(self, {name: value.to(self._types[name]) for name, value in moved.items()})


@dataclass(eq=False)
class Point:
    """Weights as they are stored, and what the function is there; everything is computed when asked for."""

    function: Function
    weights: Tensors
    _vector: Tensor | None = None
    _enclosed: Evaluation | None = None
    _enough: float = math.inf  # what the error was asked to be
    _along: tuple[Tensor | None, float] = (None, 0.0)  # a direction, and the slope along it

    @cached_property
    def vector(self) -> Tensor:
        """The weights, exactly."""
        return self.function.layout.pack(self.weights) if self._vector is None else self._vector

    @cached_property
    def _pass(self) -> Passed:
        return self.function.data.at(self.weights)

    @cached_property
    def _penalty(self) -> tuple[float, float]:
        """The regulariser and its round-off."""
        return self.function.penalty(self.weights)

    @cached_property
    def value(self) -> float:
        """The value of the objective, as computed; infinite where it is not a number."""
        try:
            total = self._pass.value + self._penalty[0]
        except InfiniteValue:  # a loader has no value then, and says so again if it is asked for the gradient
            return math.inf
        return total if math.isfinite(total) else math.inf

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient as a vector."""
        found = self._pass.gradient
        if len(found) < len(self.weights):
            unread = {name: torch.zeros_like(value) for name, value in self.weights.items() if name not in found}
            found = {**unread, **found}
        slopes = self.function.layout.pack(found)
        regularizer = self.function.regularizer
        if regularizer is not None:
            added = regularizer.gradient({name: value.double() for name, value in self.weights.items()})
            for name, part in self.function.layout.unpack(slopes).items():
                part += added[name]
        return slopes

    @cached_property
    def gradient_norm(self) -> float:
        """Of the gradient, as computed."""
        return self.function.layout.norm(self.gradient)

    def enclosed(self, enough: float = 0.0) -> Evaluation:
        """The objective in exact arithmetic; an error below ``enough`` is not made smaller."""
        if self._enclosed is None or (self._enclosed.error > enough and enough < self._enough):
            loss, (penalty, lost) = self._pass.enclosed(enough), self._penalty
            total = loss.value + penalty
            error = (loss.error + lost + abs(total) * 2.0**-53) * (1 + 2.0**-50)
            self._enclosed, self._enough = Evaluation(total, error), enough
            self.__dict__["value"] = total  # which may have been told more precisely
        return self._enclosed

    def foresee(self, enough: float) -> None:
        """Be ready to tell the objective up to an error of ``enough``, before the gradient is asked for."""
        self._pass.foresee(enough)

    def slope(self, direction: Tensor) -> float:
        """The derivative along a direction, as computed."""
        if self._along[0] is not direction:
            self._along = direction, self.function.layout.dot(self.gradient, direction)
        return self._along[1]

    @cached_property
    def statistics(self) -> Sequence[Statistics] | None:
        """Those of the batch that its normalisations computed; ``None`` if they are not known."""
        return self._pass.statistics

    def forget_pass(self) -> None:
        """Drop what the pass holds, once value, gradient and proof are known."""
        _ = self.value, self.gradient, self.enclosed(math.inf), self.statistics
        self.__dict__.pop("_pass", None)
