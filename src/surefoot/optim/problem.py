"""The objective of a model on given data, and its points: weights with value, gradient and enclosure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import first_of
from surefoot.errors import EvaluationError
from surefoot.graph import Graph, Source
from surefoot.graph.guard import Guard
from surefoot.objectives import Objective, Regularizer
from surefoot.operations.captured import capture
from surefoot.processes import Processes
from surefoot.program.checks import as_inputs, as_targets, is_loader
from surefoot.torch_private import copied_together
from surefoot.valuation.single import is_exact_here
from surefoot.valuation.streamed import Streamed, StreamedValuer
from surefoot.valuation.valuer import Evaluation, InfiniteValue, Valuer

_NARROW = 3.0  # times a tenth of a decrease: errors in single precision that prove it
_SHORTEST, _LONGEST = 8, 512  # passes in double precision after one in single that did not decide


class Problem:
    r"""F(u): the loss of a model on fixed data, plus a regulariser, as a function of one vector of weights.

    Model and data are read once. :meth:`is_about` says whether both are still what was read.

    Args:
        model: the network.
        loss: without targets.
        x: a batch, or a loader that brings the targets.
        y: the targets of a batch.
        weights: the parameters that vary, by path; the others are constants.
        regularizer: added to the loss.
        processes: those that have a part of the data each. All of them make the problem; then process 0 asks for
            passes, and the others help (:meth:`assist`).
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Objective,
        x: Any,
        y: Any = None,
        *,
        weights: Mapping[str, nn.Parameter],
        regularizer: Regularizer | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.model, self.loss, self.x, self.y = model, loss, x, y
        self.weights, self.regularizer, self.processes = dict(weights), regularizer, processes
        self._given, self._tensors = (x, y), () if is_loader(x) else _tensors(x, y)
        self._data = tuple(tensor.detach().clone() for tensor in self._tensors)
        self._settings = dict(vars(loss))
        batch = first_of(x) if is_loader(x) else (x, y) if processes is None or len(y) else None
        if batch is not None and (not isinstance(batch, list | tuple) or len(batch) != 2):
            raise EvaluationError("a loader gives pairs (x, y) of inputs and targets")
        self._sample = None if batch is None else batch[0]
        self.graph: Graph | None = None if batch is None else capture(model, batch[0])
        self.sizes = [value.numel() for value in self.weights.values()]
        self.is_double = all(value.dtype == torch.float64 for value in self.weights.values())
        self._guard = Guard(model)
        self._rest = {name: p.detach() for name, p in model.named_parameters() if name not in self.weights}
        read = {} if self.graph is None else self.graph.held
        buffers = [v for n, v in read.items() if self.graph and self.graph.leaves[n].source is Source.BUFFER]
        self._fixed = tuple(value.detach() for value in (*self._rest.values(), *buffers))
        self._copies = tuple(value.clone() for value in self._fixed)
        self._patience, self._waiting = _SHORTEST, 0
        self.stream: StreamedValuer | None = None
        if processes is not None or is_loader(x):
            loader = x if is_loader(x) else [] if batch is None else [batch]
            self.stream = StreamedValuer(model, loader, loss, processes)
        else:
            self.valuer = Valuer.of(model, x, loss.bound_to(y), single=True)

    def is_about(self, x: Any, y: Any) -> bool:
        """Whether these data, the model as it is now and the loss are what was read.

        Tensors are compared with copies, as torch does not count what is written through ``.data`` or by numpy. A
        loader is compared by its samples at each pass.
        """
        if self._given[0] is not x or self._given[1] is not y or not isinstance(x, Tensor):
            if is_loader(x) or is_loader(self.x):
                if self.x is not x:
                    return False
            else:
                self._given, self._tensors = (x, y), _tensors(x, y)
        if not _same(self._tensors, self._data):
            return False
        if not self._guard.holds():
            if self._sample is None or capture(self.model, self._sample) is not self.graph:
                return False
            self._guard = Guard(self.model)
        return _same(self._fixed, self._copies) and vars(self.loss) == self._settings

    def is_at(self, point: Point) -> bool:
        """Whether the model has the weights of a point."""
        return all(map(torch.equal, self.weights.values(), point.weights.values()))

    @property
    def start(self) -> Point:
        """The point of the present weights."""
        return self._point({name: value.detach().clone() for name, value in self.weights.items()})

    def near(self, point: Point, direction: Tensor, step: float) -> Point:
        """The point at a step along a direction from another, rounded to the types of the weights."""
        return self.at(torch.add(point.vector, direction, alpha=step))

    def at(self, vector: Tensor) -> Point:
        """The point of this vector, rounded likewise."""
        parts = self.unpack(vector)
        if self.is_double:
            return self._point(parts, vector)
        return self._point({name: part.to(self.weights[name].dtype) for name, part in parts.items()})

    def _point(self, weights: dict[str, Tensor], vector: Tensor | None = None) -> Point:
        return (Point if self.stream is None else StreamedPoint)(self, weights, vector)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors by path as one vector in double precision; what is missing is zero."""
        parts = []
        for name, value in self.weights.items():
            part = tensors[name].detach() if name in tensors else torch.zeros_like(value)
            parts.append(part.reshape(-1).double())
        return torch.cat(parts)

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector, as views."""
        parts = {}
        for (name, value), part in zip(self.weights.items(), vector.split(self.sizes), strict=True):
            parts[name] = part.view(value.shape)
        return parts

    def everything(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights with the parameters that do not vary."""
        return {**self._rest, **weights}

    def write(self, point: Point) -> None:
        """Set the weights of the model, in one call that no interrupt comes between."""
        with torch.no_grad():
            copied_together(list(self.weights.values()), list(point.weights.values()))

    def streamed(self, weights: Mapping[str, Tensor], derivatives: bool, single: bool) -> Streamed:
        """One pass over all data; with several processes, process 0 asks the others to help."""
        assert self.stream is not None
        if self.processes is None:
            return self.stream.evaluate(self.everything(weights), derivatives=derivatives, single=single)
        self.processes.ask("pass")
        return self.assist(weights)

    def assist(self, weights: Mapping[str, Tensor] | None = None) -> Streamed:
        """A pass that all processes make together, at the weights of process 0; all get the whole gradient."""
        assert self.processes is not None
        assert self.stream is not None
        point = {name: value.detach().clone() for name, value in (weights or self.weights).items()}
        self.processes.spread(point.values())
        part = self.stream.evaluate(self.everything(point), derivatives=True)
        slopes = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in point.items()}
        slopes |= {name: slope for name, slope in (part.gradient or {}).items() if name in slopes}
        self.processes.add(slopes.values())
        return replace(part, gradient=slopes)

    def in_single(self) -> bool:
        """Whether the next pass is to be made in single precision first: as long as that decides now and then."""
        self._waiting -= 1
        return self._waiting < 0

    def learn(self, decided: bool) -> None:
        """Whether a pass in single precision did decide; else it is tried again later, and later still."""
        if decided:
            self._patience = _SHORTEST
        elif self._waiting < 0:
            self._waiting, self._patience = self._patience, min(4 * self._patience, _LONGEST)


class Point:
    """Weights as they are stored, and what the objective is there; everything is computed when asked for.

    Attributes:
        problem: the objective.
        weights: by path.
    """

    def __init__(self, problem: Problem, weights: dict[str, Tensor], vector: Tensor | None = None) -> None:
        self.problem, self.weights = problem, weights
        self._enclosed: tuple[Evaluation, float] | None = None  # and what its error was asked to be
        if vector is not None:
            self.vector = vector

    @cached_property
    def vector(self) -> Tensor:
        """The weights, exactly, in double precision."""
        return self.problem.pack(self.weights)

    @cached_property
    def value(self) -> float:
        """The objective as computed; infinite where it is not a number."""
        try:
            total = self._loss + self._penalty[0]
        except InfiniteValue:
            return math.inf
        return total if math.isfinite(total) else math.inf

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient as computed, as a vector."""
        slopes, regularizer = self.problem.pack(self._slopes), self.problem.regularizer
        if regularizer is not None:
            wide = {name: value.double() for name, value in self.weights.items()}
            slopes += self.problem.pack(regularizer.gradient(wide))
        return slopes

    @cached_property
    def gradient_norm(self) -> float:
        """The Euclidean norm of the gradient."""
        return float(torch.linalg.vector_norm(self.gradient))

    @cached_property
    def _penalty(self) -> tuple[float, float]:
        regularizer = self.problem.regularizer
        return (0.0, 0.0) if regularizer is None else regularizer.enclosed(self.weights)

    def enclosed(self, enough: float = 0.0) -> Evaluation:
        """The objective in exact arithmetic; an error below ``enough`` is not made smaller."""
        last = self._enclosed
        if last is None or (last[0].error > enough and enough < last[1]):
            loss, (penalty, lost) = self._enclose(enough), self._penalty
            total = loss.value + penalty
            error = (loss.error + lost + abs(total) * 2.0**-53) * (1 + 2.0**-50)
            last = self._enclosed = Evaluation(total, error), enough
            self.__dict__["value"] = total  # which may now be more precise
        return last[0]

    def is_below(self, other: Point) -> bool:
        """Whether the objective is proved to be lower than at another point, in exact arithmetic.

        Errors are made as small as that takes, and no smaller.
        """
        for part in (0.4, 0.1):
            enough = part * (other.value - self.value)
            upper = self.enclosed(enough).upper
            if upper < other.enclosed(math.inf).lower or upper < other.enclosed(enough).lower:
                return True
        return False

    def release(self) -> None:
        """Drop the pass, once value, gradient and proof are there."""
        _ = self.value, self.gradient, self.statistics
        self.__dict__.pop("_run", None)

    # One batch: a pass forward, and backward when the gradient is asked for.

    @cached_property
    def _run(self) -> Any:
        problem, weights = self.problem, self.problem.everything(self.weights)
        narrow = problem.valuer.in_single
        if narrow is not None and problem.in_single() and is_exact_here(weights):
            run = narrow.run(weights, light=True)
            if math.isfinite(run.value):
                return narrow, run
        return problem.valuer, problem.valuer.run(weights, light=True)

    @property
    def _loss(self) -> float:
        return float(self._run[1].value)

    @property
    def _slopes(self) -> Mapping[str, Tensor]:
        valuer, run = self._run
        slopes: Mapping[str, Tensor] = valuer.gradient(run)
        return slopes

    @cached_property
    def statistics(self) -> Any:
        """What batch normalisation computed of the batch; ``None`` if that is not known."""
        return self._run[1].statistics

    def foresee(self, enough: float) -> None:
        """Be ready to tell the objective up to an error of ``enough``, before the gradient is asked for."""
        valuer, run = self._run
        self.__dict__["_run"] = valuer, valuer.foreseen(run, enough * (_NARROW if valuer.tape.single else 1.0))

    def _enclose(self, enough: float) -> Evaluation:
        problem, (valuer, run) = self.problem, self._run
        evaluation: Evaluation = valuer.enclosed(run, enough)
        if valuer.tape.single and enough < math.inf:
            problem.learn(evaluation.error <= enough)
        for derivatives in (False, True) if valuer.tape.single else ():
            if evaluation.error > enough:
                again = problem.valuer.run(problem.everything(self.weights), derivatives=derivatives)
                evaluation = problem.valuer.enclosed(again, enough)
        return evaluation


class StreamedPoint(Point):
    """A point of the objective of a loader: a pass has value, gradient and error at once."""

    statistics = ()  # running statistics are taken as they are

    @cached_property
    def _run(self) -> tuple[Streamed, bool]:
        """The pass, and whether it was in single precision."""
        single = self.problem.processes is None and self.problem.in_single()
        return self.problem.streamed(self.weights, True, single), single

    @property
    def _loss(self) -> float:
        return self._run[0].evaluation.value

    @property
    def _slopes(self) -> Mapping[str, Tensor]:
        return self._run[0].gradient or {}

    def foresee(self, enough: float) -> None:
        """Nothing: the pass has it."""

    def _enclose(self, enough: float) -> Evaluation:
        evaluation, single = self._run[0].evaluation, self._run[1]
        for derivatives in (False, True) if single else ():
            if evaluation.error > enough:
                self.problem.learn(decided=False)
                evaluation = self.problem.streamed(self.weights, derivatives, False).evaluation
        return evaluation


def _tensors(x: Any, y: Any) -> tuple[Tensor, ...]:
    """All tensors of a batch."""
    args, kwargs = as_inputs(x)
    return (*args, *kwargs.values(), *(() if y is None else (as_targets(y),)))


def _same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    """Whether tensors hold the same numbers, in the same types and places."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) or not torch.equal(a, b):
            return False
    return True
