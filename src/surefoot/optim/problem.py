"""The objective of a model on given data, and its points: weights with value, gradient and enclosure when asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import first_of, tensors_of
from surefoot.errors import EvaluationError
from surefoot.graph import Graph, Source
from surefoot.graph.checks import as_targets, is_loader
from surefoot.graph.guard import Guard
from surefoot.objectives import Objective, Regularizer
from surefoot.operations.captured import capture
from surefoot.processes import Processes
from surefoot.valuation.single import is_exact_here
from surefoot.valuation.streamed import Streamed, StreamedValuer
from surefoot.valuation.valuer import Evaluation, InfiniteValue, Valuer

_NARROW = 3.0  # times a tenth of a decrease: errors in single precision that prove it
_SHORTEST, _LONGEST = 8, 512  # passes in double precision after one in single that did not decide


class Problem:
    r"""F(u): the loss of a model on fixed data, plus a regulariser, as a function of one vector of weights.

    Model and data are read once. :meth:`is_about` says whether both are still what was read; if not, there has to
    be another problem.

    Args:
        model: the network.
        loss: without targets.
        x: a batch, or a loader that brings the targets.
        y: the targets of a batch.
        weights: the parameters that vary, by path; the others are constants.
        regularizer: added to the loss; gradients are without its absolute values.
        processes: those that have a part of the data each. All of them make the problem, then process 0 asks for
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
        self.sizes = [value.numel() for value in self.weights.values()]
        self._shapes = [value.shape for value in self.weights.values()]
        self._types = [value.dtype for value in self.weights.values()]
        self.is_double = set(self._types) == {torch.float64}
        self._options = f"{loss.options}{regularizer}"
        self._data = () if is_loader(x) else _copies(_tensors(x, y))
        batch = first_of(x) if is_loader(x) else (x, y)
        if batch is None or (processes is not None and not is_loader(x) and not len(y)):
            batch = None
        elif not isinstance(batch, list | tuple) or len(batch) != 2:
            raise EvaluationError("a loader gives pairs (x, y) of inputs and targets")
        self._sample = None if batch is None else batch[0]
        self.graph: Graph | None = None if batch is None else capture(model, batch[0])
        self._guard = Guard(model)
        self._rest = {n: p.detach() for n, p in model.named_parameters() if n not in self.weights}
        leaves = {} if self.graph is None else self.graph.held
        read = [v for n, v in leaves.items() if self.graph and self.graph.leaves[n].source is Source.BUFFER]
        self._fixed = tuple(value.detach() for value in (*self._rest.values(), *read))
        self._copies = _copies(self._fixed)
        self._patience, self._waiting = _SHORTEST, 0  # of passes in single precision
        self.stream: StreamedValuer | None = None
        if processes is not None or is_loader(x):
            loader = x if is_loader(x) else [] if batch is None else [(x, y)]
            self.stream = StreamedValuer(model, loader, loss, processes)
        else:
            self.valuer = Valuer.of(model, x, loss.bound_to(y), single=True)

    def is_about(self, x: Any, y: Any) -> bool:
        """Whether these data, the model as it is now and the loss are what was read.

        Tensors are compared with copies, as torch does not count what is written through ``.data`` or by numpy. A
        loader is compared by its samples at each pass.
        """
        if is_loader(x):
            if self.x is not x:
                return False
        elif is_loader(self.x) or not _same(_tensors(x, y), self._data):
            return False
        if not self._guard.holds():
            if self._sample is None or capture(self.model, self._sample) is not self.graph:
                return False
            self._guard = Guard(self.model)
        return _same(self._fixed, self._copies) and f"{self.loss.options}{self.regularizer}" == self._options

    @property
    def start(self) -> Point:
        """The point of the present weights."""
        return self._point({name: value.detach().clone() for name, value in self.weights.items()})

    def near(self, point: Point, direction: Tensor, step: float) -> Point:
        """The point at a step along a direction from another, rounded to the types of the weights."""
        return self.at(torch.add(point.vector, direction, alpha=step))

    def at(self, vector: Tensor) -> Point:
        """The point of this vector, rounded likewise."""
        parts = zip(self.weights, vector.split(self.sizes), self._shapes, self._types, strict=True)
        weights = {name: part.view(shape).to(kind) for name, part, shape, kind in parts}
        return self._point(weights, vector if self.is_double else None)

    def _point(self, weights: dict[str, Tensor], vector: Tensor | None = None) -> Point:
        return (Point if self.stream is None else StreamedPoint)(self, weights, vector)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors by path as one vector in double precision; what is missing is zero."""
        parts = zip(self.weights, self.sizes, strict=True)
        device = next(iter(self.weights.values())).device
        zero = torch.zeros(0, dtype=torch.float64, device=device)
        return torch.cat([
            tensors[name].detach().reshape(-1).double() if name in tensors else zero.new_zeros(size)
            for name, size in parts
        ])  # fmt: skip

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector, as views."""
        parts = zip(self.weights, vector.split(self.sizes), self._shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}

    def all_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With the parameters that do not vary."""
        return {**self._rest, **weights}

    def write(self, point: Point) -> None:
        """Set the weights of the model."""
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(point.weights[name])

    def streamed(self, weights: Mapping[str, Tensor], *, derivatives: bool, single: bool) -> Streamed:
        """One pass over all data; with several processes, process 0 asks the others to help."""
        assert self.stream is not None
        if self.processes is not None:
            self.processes.ask("pass")
            return self.assist(weights)
        return self.stream.evaluate(self.all_weights(weights), derivatives=derivatives, single=single)

    def assist(self, weights: Mapping[str, Tensor] | None = None) -> Streamed:
        """A pass with derivatives that all processes make together; the gradient is that of all data on each."""
        assert self.processes is not None and self.stream is not None
        if weights is None:  # process 0 says which
            weights = {name: value.detach().clone() for name, value in self.weights.items()}
        self.processes.spread(weights.values())
        part = self.stream.evaluate(self.all_weights(weights), derivatives=True)
        slopes = {n: torch.zeros_like(value, dtype=torch.float64) for n, value in weights.items()}
        slopes |= {n: slope for n, slope in (part.gradient or {}).items() if n in slopes}
        self.processes.add(slopes.values())
        return replace(part, gradient=slopes)

    # Passes are made in single precision first as long as that decides now and then.

    def in_single(self) -> bool:
        """Whether the next pass is to be made in single precision."""
        self._waiting -= 1
        return self._waiting < 0

    def undecided(self) -> None:
        """A pass in single precision did not decide: it is tried again later, and later still if it fails again."""
        if self._waiting < 0:
            self._waiting, self._patience = self._patience, min(4 * self._patience, _LONGEST)

    def decided(self) -> None:
        """A pass in single precision did decide."""
        self._patience = _SHORTEST


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
        slopes = self.problem.pack(self._slopes)
        if self.problem.regularizer is not None:
            slopes += self.problem.pack(
                self.problem.regularizer.gradient({name: w.double() for name, w in self.weights.items()})
            )
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
        problem, weights = self.problem, self.problem.all_weights(self.weights)
        narrow = problem.valuer.in_single
        if narrow is not None and problem.in_single() and is_exact_here(weights):
            run = narrow.run(weights, light=True)
            if math.isfinite(run.value):
                return narrow, run
        return problem.valuer, problem.valuer.run(weights, light=True)

    @property
    def _loss(self) -> float:
        value: float = self._run[1].value
        return value

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
        run = valuer.foreseen(run, enough * (_NARROW if valuer.tape.single else 1.0))
        self.__dict__["_run"] = valuer, run

    def _enclose(self, enough: float) -> Evaluation:
        problem, (valuer, run) = self.problem, self._run
        evaluation: Evaluation = valuer.enclosed(run, enough)
        if not valuer.tape.single:
            return evaluation
        if evaluation.error <= enough:
            if enough < math.inf:
                problem.decided()
            return evaluation
        problem.undecided()  # in double: by a pass forward and, if that does not say enough, one with derivatives
        weights = problem.all_weights(self.weights)
        evaluation = problem.valuer.enclosed(problem.valuer.run(weights, derivatives=False), enough)
        if evaluation.error > enough:
            evaluation = problem.valuer.enclosed(problem.valuer.run(weights), enough)
        return evaluation


class StreamedPoint(Point):
    """A point of the objective of a loader: a pass has value, gradient and error at once."""

    statistics = ()  # running statistics are taken as they are

    @cached_property
    def _run(self) -> tuple[Streamed, bool]:
        """The pass, and whether it was in single precision."""
        single = self.problem.processes is None and self.problem.in_single()
        return self.problem.streamed(self.weights, derivatives=True, single=single), single

    @property
    def _loss(self) -> float:
        return self._run[0].evaluation.value

    @property
    def _slopes(self) -> Mapping[str, Tensor]:
        assert self._run[0].gradient is not None
        return self._run[0].gradient

    def foresee(self, enough: float) -> None:
        """Nothing: the pass has it."""

    def _enclose(self, enough: float) -> Evaluation:
        evaluation, single = self._run[0].evaluation, self._run[1]
        for derivatives in (False, True) if single else ():
            if evaluation.error <= enough:
                break
            self.problem.undecided()
            evaluation = self.problem.streamed(self.weights, derivatives=derivatives, single=False).evaluation
        return evaluation


def _tensors(x: Any, y: Any) -> tuple[Tensor, ...]:
    """All tensors of a batch."""
    return (*tensors_of(x), *(() if y is None else (as_targets(y),)))


def _copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone() for tensor in tensors)


def _same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    """Whether tensors hold the same numbers, in the same types and places."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) or not torch.equal(a, b):
            return False
    return True
