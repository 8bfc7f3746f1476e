"""The objective of data that several processes hold: one process decides, the others compute their parts.

Process 0 runs the method. For each pass it sends the weights to all; the values and errors of the parts come back
as a few fractions (:mod:`surefoot.valuation.streamed`), their gradients added up. At the end it sends the weights
and the record of the step. So decisions are made once, and weights and histories are the same on all processes,
bit by bit, even where their processors round differently. Per pass a process hands over a few hundred bytes of
numbers, the gradient in double precision, and process 0 the weights as they are stored; activations stay where
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.optim.evaluation import OptimizerError
from surefoot.optim.point import Passed, Stream, StreamedPass
from surefoot.optim.record import StepRecord
from surefoot.processes import Processes
from surefoot.valuation.streamed import Streamed


def added_up(found: Streamed, weights: Mapping[str, Tensor], processes: Processes) -> Streamed:
    """What all processes found, with the gradient of all their data in these weights."""
    part = found.gradient or {}
    slopes = {
        name: part[name] if name in part else torch.zeros_like(value, dtype=torch.float64)
        for name, value in weights.items()
    }
    processes.add(slopes.values())
    return replace(found, gradient=slopes)


@dataclass
class Shards(Stream):
    """All batches of all processes; its valuer is that of the same processes."""

    processes: Processes

    def at(self, weights: Mapping[str, Tensor]) -> Passed:
        """One pass of all processes, with derivatives; process 0 calls it."""
        self.processes.ask("pass")
        return self._one(weights)

    def _one(self, weights: Mapping[str, Tensor]) -> Passed:
        self.processes.spread(weights.values())
        return StreamedPass(added_up(self.valuer.evaluate(weights, derivatives=True), weights, self.processes))

    def step(self, weights: Mapping[str, Tensor], take: Callable[[], StepRecord]) -> StepRecord:
        """One step of all processes: process 0 takes it, the others help, and all have its weights and record.

        Raises:
            OptimizerError: on all processes, if the step raises on one.
            ProcessLost: if one of them does not answer.
        """
        place = {name: value.detach().clone() for name, value in weights.items()}
        record: StepRecord = self.processes.led(take, lambda _: self._one(place), OptimizerError)
        self.processes.spread(weights.values())
        return record
