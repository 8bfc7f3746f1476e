"""The objective of all data, enclosed, while mini-batches train: :class:`AllData`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph.guard import Guard
from surefoot.objectives import Objective
from surefoot.optim.bursts import evaluating
from surefoot.optim.evaluation import outputs_of, weighed
from surefoot.optim.shards import added_up
from surefoot.processes import Processes
from surefoot.valuation.streamed import Streamed, StreamedValuer, is_mean
from surefoot.valuation.valuer import Evaluation, EvaluationError, InfiniteValue

_EVALUATION, _ANEW = 0.5, 1.0  # what an evaluation takes, in gradients, and one for which the model is read anew
_SLOPES = 0.5  # the same for a gradient, in larger batches than those of training, without steps between them
ROUNDING = 1e-9  # sums of work are not exact


class AllData:
    """Evaluations and gradients of a model in evaluation mode: one pass each, and the work they are.

    Work is counted as what such passes take on the average or more, in gradients by mini-batches: half a gradient
    for an evaluation, one and a half where running statistics have moved with the weights, half a gradient for one
    that is computed in larger batches, without steps between them. Counting makes runs repeatable, which a clock
    would not.

    Args:
        model: read when the first evaluation is asked for, and again when its buffers have changed.
        objective: a loss without targets.
        data: batches ``(x, y)``, the same in every pass.
        processes: those that share the data, which evaluate at the same time.

    Attributes:
        work: of all passes so far.
        changed: whether the function of weights and buffers was another one at the last evaluation than before.
        summon: calls other processes to a pass, for which the gradient is wanted or not.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, data: Iterable[Any], processes: Processes | None
    ) -> None:
        self.model, self.objective, self.data, self.processes = model, objective, data, processes
        self.work = 0.0
        self.summon: Callable[[bool], object] | None = None
        self.changed = False
        self._valuer: StreamedValuer | None = None
        self._guard: Guard | None = None
        self._functions: dict[Any, str] = {}
        self._buffers: list[Tensor] = []

    def evaluate(self) -> Evaluation:
        """The objective at the present weights."""
        return self._passed(False).evaluation

    def slopes(self) -> Streamed:
        """The objective and its gradient at the present weights, roughly: by the model as it runs, without errors.

        Losses are computed in double precision from the outputs, so that they are not lost to round-off where they
        are small.
        """
        return self._passed(True)

    def _passed(self, slopes: bool) -> Streamed:
        if self.summon is not None:
            self.summon(slopes)
        return self.pass_here(slopes)

    def pass_here(self, slopes: bool) -> Streamed:
        """The same, for a process that takes part."""
        self.work += (_SLOPES if slopes else _EVALUATION) + (0.0 if slopes else _ANEW * self._moved)
        with evaluating(self.model):
            if slopes:
                return self._sloping()
            if self._valuer is None:
                self._valuer = StreamedValuer(self.model, self.data, self.objective, self.processes)
            elif self._moved or not self._holds:  # maybe another graph, of the same data
                self._valuer = self._valuer.anew()
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]
            found = self._valuer.evaluate()
            functions, before = self._valuer.functions, self._functions
            self.changed = any(functions[kind] != before.get(kind, functions[kind]) for kind in functions)
            self._functions = functions
            if not self._holds:
                self._guard = Guard(self.model)
            return found

    @property
    def _holds(self) -> bool:
        """Whether nothing that the model reads, but parameters and buffers, was touched since the last evaluation;
        to be asked in evaluation mode.
        """
        return self._guard is not None and self._guard.holds()

    def disturbed(self) -> bool:
        """Whether the model may compute another function of weights and buffers than at the last evaluation."""
        with evaluating(self.model):
            return self._valuer is not None and not self._holds

    def check_data(self) -> None:
        """Look at all data, where one process has them.

        Raises:
            EvaluationError: if they are not those of the first evaluation.
        """
        if self._valuer is not None and self.processes is None:
            self._valuer.check_data()

    def _sloping(self) -> Streamed:
        """Value and gradient by plain passes of the model, of the data of all processes."""
        weights = {path: value for path, value in self.model.named_parameters() if value.requires_grad}

        def here() -> tuple[Streamed, Fraction]:  # by weight
            value, total, slopes = 0.0, Fraction(0), dict[str, Tensor]()
            for x, y in self.data:
                loss, weight, found = weighed(self.model, self.objective, x, y, weights, double=True)
                value, total = value + loss, total + weight
                slopes |= {path: slopes[path].add_(s) if path in slopes else s for path, s in found.items()}
            return Streamed(Evaluation(value, math.inf), slopes, 0, 0), total

        found, weight = here() if self.processes is None else self.processes.together(here)
        parts = [(found.evaluation.value, weight)]
        if self.processes is not None:
            parts = self.processes.gathered(lambda: (found.evaluation.value, weight))
            found = added_up(found, weights, self.processes)
        whole = float(sum(weight for _, weight in parts)) if is_mean(self.objective.options) else 1.0
        mean = Evaluation(math.fsum(value for value, _ in parts) / whole, math.inf)
        return replace(found, evaluation=mean, gradient={p: s / whole for p, s in (found.gradient or {}).items()})

    @property
    def coming(self) -> float:
        """What an evaluation will take after training."""
        moving = any(buffer.is_floating_point() for buffer in self.model.buffers())
        return _EVALUATION + (_ANEW if moving else 0.0)

    @property
    def _moved(self) -> bool:
        """Whether there was an evaluation, with other buffers than those of now."""
        now, then = list(self.model.buffers()), self._buffers
        return self._valuer is not None and not (len(now) == len(then) and all(map(torch.equal, now, then)))

    def slopes_within(self, left: float) -> int:
        """How many gradients fit into this work besides an evaluation here."""
        return max(0, math.floor((left - _EVALUATION - _ANEW * self._moved + ROUNDING) / _SLOPES))

    def if_finite(self) -> Evaluation | None:
        """The same; ``None`` where the objective, or a running statistic, is not finite."""
        statistics = (buffer for buffer in self.model.buffers() if buffer.is_floating_point())
        if not all(bool(torch.isfinite(buffer).all()) for buffer in statistics):
            return None
        try:
            return self.evaluate()
        except EvaluationError as error:
            if self.processes is not None:
                if isinstance(error, InfiniteValue):
                    return None
                raise
            with evaluating(self.model), torch.no_grad():
                if all(math.isfinite(float(self.objective(outputs_of(self.model, x), y))) for x, y in self.data):
                    raise
            return None
