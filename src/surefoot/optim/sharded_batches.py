"""Mini-batches of processes each of which has a part of the weights: all train, by the passes of ``fully_shard``.

A mini-batch is made of the next batch of every process. Each of these runs the model on its own, as it would
without surefoot: weights are gathered layer by layer, and gradients added up and cut again. Losses count by their
weights, so that the gradient is that of all samples together, and the optimizer of each process moves what it has.
Losses, values and lengths are sums over the processes in one order, so that all decide the same. A process whose
loader has ended takes part with a batch that it had, or got, which counts nothing.

What is raised in a forward pass on one process leaves the others waiting for its parts, up to the time-out of the
group, and then they say that it is lost. What loaders and losses raise is raised on all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph.checks import as_targets
from surefoot.graph.outline import Outline
from surefoot.graph.placed import Placed, norms
from surefoot.objectives import Objective
from surefoot.optim.bursts import evaluating
from surefoot.optim.evaluation import OptimizerError, outputs_of
from surefoot.optim.joint import NumberedBatches
from surefoot.processes import Processes, answering
from surefoot.torch_private import is_sharded, lies_elsewhere, sharded_modules
from surefoot.valuation.streamed import batch_weight


class ShardedBatches(NumberedBatches):
    """The mini-batches of processes that train together, each its parts of the weights.

    Args:
        loader: that of this process.
        model: that ``fully_shard`` was called on.
        objective: a loss without targets.
        processes: those of its mesh.
        parameters: what the optimizer moves.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model: nn.Module,
        objective: Objective,
        processes: Processes,
        parameters: Sequence[Tensor],
    ) -> None:
        super().__init__(loader, model, objective, processes)
        self._parameters = parameters
        self._counts = [
            Placed(value, processes).counts if lies_elsewhere(value) else processes.leads for value in parameters
        ]
        self._idle: Any = None  # an input for passes that count nothing
        self.processes.spread(model.buffers())

    def _draw(self) -> int:
        number = super()._draw()
        batch = self._held[number]
        if batch is not None:
            self._idle = batch[0]
        if number == 1:  # when each loader that is not empty has given something
            having = self.processes.gathered(lambda: batch is not None)
            if not all(having):
                given = self.processes.passed_on(having.index(True), lambda: self._idle)
                self._idle = given if batch is None else self._idle
        return number

    def loss(self, number: int, *, backward: bool) -> Tensor:
        """The loss of a mini-batch, with the gradient of all its parts in ``.grad`` if that is asked for."""
        for value in self._parameters:
            value.grad = None
        idle = self._held[number] is None
        x, y = (self._idle, None) if idle else self._held[number]
        with evaluating(self.model) if idle else nullcontext(), torch.set_grad_enabled(backward):
            with answering(model=True):
                outputs = outputs_of(self.model, x)

            def lost() -> tuple[Tensor, Fraction]:
                weight = Fraction(0) if idle else batch_weight(self.objective, outputs, as_targets(y))
                loss = self.objective(outputs, y) if weight else 0 * outputs.sum()
                if backward and not loss.requires_grad:
                    raise OptimizerError("the loss does not depend on the parameters")
                return loss, weight

            loss, weight = self.processes.together(lost)
            everyone = self.processes.gathered(lambda: (float(weight) * float(loss.detach()), weight))
            whole = self._whole(part for _, part in everyone) or 1.0
            if backward:
                with answering():
                    (loss * (float(weight) * self.processes.size / whole)).backward()  # they take the mean
                self._add_slopes()
        for module in sharded_modules(self.model):
            module.reshard()
        self.processes.spread(self.model.buffers())
        return torch.tensor(sum(value for value, _ in everyone) / whole, dtype=torch.float64)

    def _add_slopes(self) -> None:
        """The mean over the processes of the gradient in weights that are whole on each."""
        own = [value for value in self._parameters if value.requires_grad and not lies_elsewhere(value)]
        slopes = [torch.zeros_like(value) if value.grad is None else value.grad for value in own]
        self.processes.add(slopes)
        for value, slope in zip(own, slopes, strict=True):
            value.grad = slope.div_(self.processes.size)

    def agreed(self, holds: bool) -> bool:
        """Whether something holds on all processes."""
        return all(self.processes.gathered(lambda: holds))

    def length(self, parts: Sequence[Tensor]) -> float:
        """The norm of all parameters, or of what lies as they do."""
        return math.hypot(*norms(self.processes, parts, self._counts))


def outline_of(model: nn.Module, group: Any) -> Outline | None:
    """Of a model whose weights lie with the processes of a group, as ``fully_shard`` lays them; ``None`` if its
    weights are whole.

    Raises:
        OptimizerError: if they lie otherwise.
    """
    if not is_sharded(model):
        return None
    outline = None if group is None else Outline.of(model, group)
    managed = {id(value) for module in sharded_modules(model) for value in module.parameters()}
    apart: list[Any] = [value for value in model.parameters() if lies_elsewhere(value)]
    cuts = max((sum(placement.is_shard() for placement in value.placements) for value in apart), default=0)
    if outline is None or cuts > 1 or not managed.issuperset(map(id, apart)):
        raise OptimizerError(
            "the weights of this model lie with several processes: ProvedEpochs takes what fully_shard was called "
            "on, with group=, the processes of its mesh. Else train by surefoot.CertifiedDescent(model, "
            "objective, group=…), or a model that is whole on each process"
        )
    return outline
