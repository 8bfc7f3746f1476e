"""The objective of all data, enclosed, while mini-batches train: :class:`AllData`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph.outline import Outline
from surefoot.objectives import Objective
from surefoot.optim.bursts import evaluating
from surefoot.optim.evaluation import outputs_of
from surefoot.processes import Processes
from surefoot.valuation.streamed import StreamedValuer, batch_weight
from surefoot.valuation.valuer import Evaluation, EvaluationError, InfiniteValue

_EVALUATION, _ANEW = 0.5, 1.0  # what an evaluation takes, in gradients, and one for which the model is read anew
_LOOK = 0.25  # the same for a look: a forward pass in larger batches
ROUNDING = 1e-9  # sums of work are not exact


class AllData:
    """Evaluations of a model in evaluation mode: one forward pass each, and the work they are.

    Work is counted as what such passes take on the average, in gradients of all data: half a gradient for an
    evaluation, one and a half where running statistics have moved with the weights, a quarter for a look. Counting
    makes runs repeatable, which a clock would not.

    Args:
        model: read when the first evaluation is asked for, and again when its buffers have changed.
        objective: a loss without targets.
        data: batches ``(x, y)``, the same in every pass.
        processes: those that share the data, which evaluate at the same time.
        outline: of the model, if its weights lie with them.

    Attributes:
        work: of all evaluations and looks so far.
        summon: calls other processes to an evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        data: Iterable[Any],
        processes: Processes | None,
        outline: Outline | None = None,
    ) -> None:
        self.model, self.objective, self.data, self.processes = model, objective, data, processes
        self._outline = outline
        self.work = 0.0
        self.summon: Callable[[], object] | None = None
        self._valuer: StreamedValuer | None = None
        self._buffers: list[Tensor] = []

    def evaluate(self) -> Evaluation:
        """The objective at the present weights."""
        if self.summon is not None:
            self.summon()
        return self.evaluate_here()

    def evaluate_here(self) -> Evaluation:
        """The same, for a process that takes part."""
        self.work += _EVALUATION + _ANEW * self._moved
        with evaluating(self.model):
            outline = self._outline = self._outline and self._outline.refreshed()
            model = self.model if outline is None else outline.plain
            if self._valuer is None or (outline is not None and self._valuer.model is not model):
                self._valuer = StreamedValuer(model, self.data, self.objective, self.processes)
            elif self._moved:  # other running statistics: another graph, of the same data
                self._valuer = self._valuer.anew()
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]
            return self._valuer.evaluate(None if outline is None else outline.weights()).evaluation

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

    def search_work(self, looks: int) -> float:
        """What so many looks and an evaluation take, while running statistics stay."""
        return _EVALUATION + looks * (_LOOK if self.processes is None else _EVALUATION)

    def looks_within(self, left: float, most: int) -> int:
        """How many looks fit into this work besides an evaluation here."""
        left -= _ANEW * self._moved - ROUNDING
        return max((looks for looks in range(1, most + 1) if self.search_work(looks) <= left), default=0)

    def look(self) -> float:
        """The objective as plain arithmetic gives it, losses in double; infinite where it is not finite."""
        if self.processes is not None:
            found = self.if_finite()
            return math.inf if found is None else found.value
        total, weights = 0.0, 0.0
        self.work += _LOOK
        with evaluating(self.model), torch.no_grad():
            for x, y in self.data:
                outputs = outputs_of(self.model, x)
                weight = float(batch_weight(self.objective, outputs, y))
                y = y.double() if y.is_floating_point() else y
                total += weight * float(self.objective(outputs.double(), y)) if weight else 0.0
                weights += weight
        value = total / weights if self.objective.options["reduction"] in ("mean", "entries") else total
        return value if math.isfinite(value) else math.inf

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
