"""Keep weights only if the objective of all data is proved to be lower than at the weights kept before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from surefoot.certifying import evaluate
from surefoot.errors import SurefootError
from surefoot.optim.bursts import Snapshot, evaluating
from surefoot.valuation.valuer import Evaluation, EvaluationError


class IntegrationError(SurefootError, RuntimeError):
    """The framework lacks something that is needed; the message says what."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        value: the value of the objective of all data; the exact value is between its ``lower`` and ``upper``.
        kept: whether it is proved to be lower than at the weights kept before.

    >>> from surefoot.integrations.keeping import Check
    >>> Check(sf.evaluate(nn.Linear(2, 1), torch.eye(2), sf.Square(torch.ones(2, 1))), kept=True).kept
    True
    """

    value: Evaluation
    kept: bool


class Keeper:
    """Goes back to the weights that were kept last, unless the objective of all data is proved to be lower.

    Whatever trains the model in between, the exact values at the kept weights decrease: if the upper end of the
    new value is below the lower end of the old one, the exact value is lower too. The objective is that of the
    model in evaluation mode.

    Args:
        model: the model that is trained, a plain module.
        optimizers: the optimizers whose state goes back with the weights.
        data: re-iterable batches ``(x, y)`` without augmentation, or one such pair.
        objective: the loss, without targets, ours or of torch.nn.
        slower: factor of the learning rates after weights were not kept; 1 does not change them.
        group: a process group in which each process has a part of the data; see :func:`surefoot.evaluate`.

    >>> from surefoot.integrations.keeping import Keeper
    >>> model, x, y = nn.Linear(2, 1), torch.eye(2), torch.ones(2, 1)
    >>> keeper = Keeper(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [(x, y)], sf.Square())
    >>> with torch.no_grad():
    ...     _ = model.weight.add_(100.0)
    >>> keeper.check().kept, bool(model.weight.max() < 50)
    (False, True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        data: Any,
        objective: nn.Module,
        *,
        slower: float = 0.5,
        group: Any = None,
    ) -> None:
        self.model, self.optimizers, self.objective, self.group = model, list(optimizers), objective, group
        if not self.optimizers:
            raise IntegrationError("weights go back together with an optimizer, and none was given")
        self.data = [data] if isinstance(data, tuple) else data
        self.slower, self._refused = slower, 0
        self.history = [Check(self._value(), True)]
        self._keep()

    @property
    def value(self) -> Evaluation:
        """The value at the weights that were kept last."""
        return next(check.value for check in reversed(self.history) if check.kept)

    def check(self) -> Check:
        """Keep the present weights, or go back to those that were kept last."""
        value = Evaluation(math.inf, 0.0)
        if all(bool(tensor.isfinite().all()) for tensor in (*self.model.parameters(), *self.model.buffers())):
            with suppress(EvaluationError):  # infinite, or too steep to be enclosed
                value = self._value()
        check = Check(value, value.upper < self.value.lower)
        self.history.append(check)
        if check.kept:
            self._keep()
            return check
        self._refused += 1
        for snapshot in self._snapshots:
            snapshot.restore()
        for optimizer in self.optimizers:
            for settings in optimizer.param_groups:
                settings["lr"] *= self.slower**self._refused
        return check

    def _keep(self) -> None:
        self._snapshots = [Snapshot(self.model, optimizer) for optimizer in self.optimizers]
        self._refused = 0

    def _value(self) -> Evaluation:
        with evaluating(self.model):
            return evaluate(self.model, self.data, self.objective, group=self.group)
