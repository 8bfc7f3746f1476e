"""Mini-batches of several processes: one of the training is made of the next batch of each of them.

Process 0 trains; a mini-batch there is a number, and the data behind it stay where they are. For each step process
0 sends the weights; losses and gradients of the parts come back as sums by weight: the number of samples, or what
else the mean of a loss divides by. A process whose loader has ended waits for the next pass of the longest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.objectives import Objective
from surefoot.optim.bursts import EndlessBatches, evaluating
from surefoot.optim.evaluation import weighed
from surefoot.processes import Processes
from surefoot.valuation.streamed import is_mean

_LAST = 4  # mini-batches that may be asked for again, as those that rates are tried on


class NumberedBatches(EndlessBatches):
    """The mini-batches of all processes, one pass after the other, by number.

    Args:
        loader: that of this process.
        model: the same on all of them.
        objective: a loss without targets.
        processes: all of them; each makes one of these at the same time.

    Attributes:
        per_epoch: mini-batches of a pass over the longest loader.
    """

    def __init__(
        self, loader: Iterable[Any], model: nn.Module, objective: Objective, processes: Processes
    ) -> None:
        self.loader, self.model, self.objective, self.processes = loader, model, objective, processes
        self._held, self._drawn, self._begun = dict[int, Any](), 0, 0
        self.per_epoch = max(processes.gathered(lambda: sum(1 for _ in loader)))
        self._stream = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self.loader:
                yield batch
                count += 1
            for _ in range(self.per_epoch - count):
                yield None

    def take(self, count: int) -> Iterator[tuple[int, None]]:
        """The numbers of the next ones, which have no targets of their own."""
        for _ in range(count):
            self._call("draw")
            yield self._draw(), None

    def begin(self) -> None:
        """Begin a new pass, unless the last one has just ended."""
        if (self._drawn - self._begun) % self.per_epoch:
            self._call("begin")
            self._begin()

    def loss(self, number: int, *, backward: bool) -> Tensor:
        """The loss of a mini-batch, with the gradient of all its parts in ``.grad`` if that is asked for."""
        raise NotImplementedError

    def _call(self, what: str, *given: Any) -> None:
        """Let the others do the same, where they would not by themselves."""

    def _draw(self) -> int:
        self._drawn += 1
        self._held = {number: batch for number, batch in self._held.items() if number > self._drawn - _LAST}
        self._held[self._drawn] = self.processes.together(lambda: next(self._stream))
        return self._drawn

    def _begin(self) -> None:
        self._stream, self._begun = self._forever(), self._drawn

    def _whole(self, weights: Iterable[Fraction]) -> float:
        """What the loss of a mini-batch divides by, from what those of its parts do."""
        return float(sum(weights, Fraction(0))) if is_mean(self.objective.options) else 1.0


class JointBatches(NumberedBatches):
    """Those of processes with the same weights, of which the first trains.

    Args:
        loader, model, objective, processes: as above.
        evaluate: takes part in a pass over all data, for which the gradient is wanted or not.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model: nn.Module,
        objective: Objective,
        processes: Processes,
        evaluate: Callable[[bool], object],
    ) -> None:
        super().__init__(loader, model, objective, processes)
        self._evaluate = evaluate

    def _call(self, what: str, *given: Any) -> None:
        self.processes.ask((what, given))

    def loss(self, number: int, *, backward: bool) -> Tensor:
        """The loss of a mini-batch, with the gradient of all its parts in ``.grad`` if that is asked for."""
        given = number, backward, self.model.training
        self._call("lose", *given)
        return self._lose(*given)

    def evaluate(self, slopes: bool) -> None:
        """Let the others take part in a pass over all data."""
        self._call("evaluate", slopes)
        self.spread()

    def spread(self) -> None:
        """Weights and buffers of process 0, on all."""
        self.processes.spread([*self.model.parameters(), *self.model.buffers()])

    def serve(self, word: tuple[str, tuple[Any, ...]]) -> None:
        """On a process that does not lead."""
        what, given = word
        if what == "evaluate":
            self.spread()
            self._evaluate(*given)
        elif what == "draw":
            self._draw()
        elif what == "begin":
            self._begin()
        else:
            self._lose(*given)

    def _lose(self, number: int, backward: bool, training: bool) -> Tensor:
        self.spread()
        parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        loss, weight, slopes = self.processes.together(lambda: self._part(number, backward, training, parameters))
        whole = self._whole(self.processes.gathered(lambda: weight))
        value = torch.tensor([loss], dtype=torch.float64)
        self.processes.add([value, *slopes.values()])
        if backward:
            for name, parameter in parameters.items():
                parameter.grad = (slopes[name] / whole).to(parameter.dtype)
        return value[0] / whole if whole else value[0]

    def _part(
        self, number: int, backward: bool, training: bool, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[float, Fraction, dict[str, Tensor]]:
        """What this process has of a mini-batch: loss by weight, weight, gradient by weight."""
        batch, wanted = self._held[number], parameters if backward else {}
        none = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in wanted.items()}
        if batch is None:
            return 0.0, Fraction(0), none
        (x, y), mode = batch, nullcontext() if training else evaluating(self.model)
        with mode, torch.set_grad_enabled(backward):
            loss, weight, slopes = weighed(self.model, self.objective, x, y, wanted)
        return loss, weight, none | slopes
