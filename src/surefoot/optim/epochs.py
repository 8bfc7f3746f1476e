"""Mini-batches that end in a proof: any optimizer runs, and what is accepted is proved to be lower on all data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.objectives import Objective
from surefoot.optim.descent import OptimizerError, check_loss
from surefoot.optim.history import History
from surefoot.optim.keep import EpochRecord, KeepIfLower
from surefoot.program.checks import as_inputs, is_loader, plainly, selected, unwrapped
from surefoot.valuation.valuer import Evaluation

_EVERY, _CHECK = 10, 0.5  # epochs between two checks, and what a check costs in epochs
_UP, _DOWN, _HALF = (
    1.25,
    0.7,
    0.5,
)  # of the rate: after an epoch lower than all before, after any other, after damage
_FLOOR = 0.01  # of the rate that trials led to: it falls no lower
_FAR = 4.0  # times the lowest loss of an epoch: damage
_MOVE = 0.03  # by which part of their length weights are to move in the first step of the first trial
_WIDE, _TRIALS = 4.0, 10  # between the rates that are tried; how many, at most
_CARE = 0.3  # the part of a rate, found by a few steps, that is taken with momentum
_PATIENCE = 5  # checks in a row on held-out data that are not lower, after which a run ends


class ProvedEpochs:
    r"""Let an optimizer run over mini-batches, accept what is proved to be lower on all data, and roll back else.

    Every ten epochs the objective F of all data is evaluated in exact arithmetic within an error, and the weights
    are accepted only if :math:`F(u_{\text{new}}) \le \hat F_{\text{new}} + e_{\text{new}} < \hat F - e \le F(u)`
    (:class:`KeepIfLower`). What is proved is about the deterministic objective: the mean over all samples, with
    the model in evaluation mode, without the penalty of ``weight_decay``.

    *The schedule* needs no learning rate; of that which the optimizer was given only the ratios of its groups
    matter. Trials of a few batches, from the same state and judged on the same batches, lead to a rate to start
    from; the first of them moves the weights by a few hundredths of their length in one step. Then the rate is led
    by success: it rises after an epoch whose mean loss is lower than all before, and falls after any other
    (Rechenberg's rule, 1973: it stays where three of five are lower, as 1.25³ · 0.7² ≈ 1). An epoch that does
    damage, at four times the lowest loss, is rolled back and the rate halved. In the second half of a run rates
    fall to zero. None of this is a proof, nor needs one.

    Args:
        optimizer: any ``torch.optim`` optimizer of the parameters of the model, or the class of one.
        loss: without targets, ours or of torch.nn.
        loader: a ``DataLoader`` or another re-iterable of batches ``(x, y)``, which the optimizer is given.
        model: the network.
        data: what the objective is the mean over; by default the samples of the loader. A loader that draws or
            changes its samples at random (augmentation) needs them.
        held_out: batches that are not trained on. Then their objective decides in place of that of the training
            data, after each epoch; what was lowest on them is what a run ends with, and it ends early where they
            do not get lower.
        progress: called with the record of each check.

    Attributes:
        rate: the learning rate of the first parameter group; 0 before it was found.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 4)
    >>> batches = list(zip(x.split(16), (x[:, 0] > 0).long().split(16)))
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> training = sf.ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), batches, model=model)
    >>> training.run(epochs=20) < 0.1, all(record.proved for record in training.history)
    (True, True)
    """

    def __init__(
        self,
        optimizer: Optimizer | type[Optimizer],
        loss: Objective | nn.Module,
        loader: Iterable[Any],
        *,
        model: nn.Module,
        data: Iterable[Any] | None = None,
        held_out: Iterable[Any] | None = None,
        progress: Callable[[EpochRecord], object] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module) or not (isinstance(optimizer, Optimizer) or callable(optimizer)):
            raise TypeError("write ProvedEpochs(torch.optim.Adam(model.parameters()), loss, loader, model=model)")
        make: Any = optimizer
        chosen: Optimizer = optimizer if isinstance(optimizer, Optimizer) else make(unwrapped(model).parameters())
        if not is_loader(loader) or isinstance(loader, Iterator):
            raise TypeError(
                "the loader is a DataLoader, a list of batches (x, y), or another iterable that can be read many "
                f"times, got {type(loader).__name__}"
            )
        members = {id(value) for value in unwrapped(model).parameters()}
        self._parameters = [value for settings in chosen.param_groups for value in settings["params"]]
        if strangers := sum(id(value) not in members for value in self._parameters):
            raise ValueError(f"{strangers} of the optimizer's parameters are not parameters of the model")
        rates = [float(settings.get("lr", math.nan)) for settings in chosen.param_groups]
        if not all(0 < rate < math.inf for rate in rates):
            raise OptimizerError(f"the optimizer's rates 'lr' are positive numbers to begin with, got {rates}")
        self.model, self.optimizer, self.loader = model, chosen, loader
        self.loss, self.progress = check_loss(loss, "the batches (x, y)"), progress
        self.held_out = held_out is not None
        judges: Any = held_out if held_out is not None else loader if data is None else data
        self.keep = KeepIfLower(model, chosen, self.loss, judges, slower=1.0)
        self.rate, self._first, self._lowest = 0.0, 0.0, math.inf  # that of trials; mean loss of an epoch
        self._ratios = [rate / rates[0] for rate in rates]
        try:
            self._count = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self._count = sum(1 for _ in loader)

    @property
    def history(self) -> History[EpochRecord]:
        """One record per check; the first is that of the weights at the start."""
        return self.keep.history

    @property
    def value(self) -> Evaluation:
        """The objective at the weights that were accepted last."""
        return self.keep.value

    @plainly
    def run(self, epochs: float | None = None, *, seconds: float | None = None) -> float:
        """Train until so many epochs, with trials and checks, or seconds are spent; returns the objective.

        The weights are then those that were accepted last.
        """
        if (epochs is None) == (seconds is None) or not (epochs or seconds or 0) > 0:
            raise ValueError("a run takes a positive number of epochs=… or of seconds=…")
        self._spent, start = 0.0, time.monotonic()

        def left() -> float:  # the part of the budget
            if epochs is not None:
                return 1 - self._spent / epochs
            return 1 - (time.monotonic() - start) / (seconds or 1.0)

        if not self.rate:
            self._find_rate()
        every, pending, failures, cost = 1 if self.held_out else _EVERY, 0, 0, 0.0
        best, rest = self.keep.snapshot(), left()
        while failures < _PATIENCE and (rest > 1.5 * cost or not cost):
            level = self._epoch(self.loader, self.rate * min(1.0, max(2 * rest, _FLOOR)))
            pending, self._spent = pending + 1, self._spent + 1
            if level < self._lowest:
                self.rate, self._lowest, best = self.rate * _UP, level, self.keep.snapshot()
            elif level < math.inf:
                self.rate = max(self.rate * _DOWN, _FLOOR * self._first)
            else:
                self.rate = max(self.rate * _HALF, _FLOOR * self._first)
                self._lowest *= 2  # it may have been luck
                self.keep.restore(best)
            before, rest = rest, left()
            cost = max(cost, before - rest)  # of an epoch: with a check, no other is begun that will not fit
            if rest > 1.5 * cost and (pending < every or rest < every / 2 * cost):
                continue
            if not self.held_out:
                self.keep.restore(best)
            if self.keep.check(pending):
                failures, self._lowest = 0, max(self._lowest, self.value.value)  # epochs may miss hard samples
            elif self.held_out:
                failures += 1  # training goes on meanwhile
            else:
                self.keep.roll_back()
                self.rate = max(self.rate * _HALF, _FLOOR * self._first)
                self._lowest, best = max(self._lowest, self.value.value), self.keep.snapshot()
            pending, self._spent, rest = 0, self._spent + _CHECK, left()
            if self.progress is not None:
                self.progress(self.history[-1])
        self.keep.roll_back()
        return self.value.value

    def _epoch(self, batches: Iterable[Any], rate: float) -> float:
        """The mean of the losses of batches while they are trained on; infinite as soon as it is damage."""
        for settings, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            lr = settings["lr"]
            settings["lr"] = lr.fill_(rate * ratio) if isinstance(lr, Tensor) else rate * ratio
        # losses that may be negative have no limit
        total, count, limit = 0.0, 0, _FAR * self._lowest * self._count if self._lowest > 0 else math.inf
        for x, y in batches:

            def closure(x: Any = x, y: Any = y) -> Any:
                self.optimizer.zero_grad()
                loss = self._loss_of(x, y)
                loss.backward()
                return loss

            loss: Any = self.optimizer.step(closure)
            total, count = total + (math.inf if loss is None else float(loss.detach())), count + 1
            if not total <= limit or total == math.inf:
                total = math.inf
                break
        return total / max(count, 1)

    def _loss_of(self, x: Any, y: Any) -> Any:
        args, kwargs = as_inputs(x)
        return self.loss(selected(self.model(*args, **kwargs)), y)

    def _find_rate(self) -> None:
        """A rate to begin with: trials of a few batches from the same state, judged on these."""
        start, few = self.keep.snapshot(), []
        for batch in self.loader:
            few.append(batch)
            if len(few) >= min(4, max(2, self._count // 5)):
                break

        def trial(rate: float) -> float:
            level = self._epoch(few, rate)
            if level < math.inf:
                with torch.no_grad():
                    level = math.fsum(float(self._loss_of(x, y)) for x, y in few) / len(few)
            self.keep.restore(start)
            self._spent += 4 / 3 * len(few) / self._count
            return level if math.isfinite(level) else math.inf

        rate = float(self.optimizer.param_groups[0]["lr"])
        before = [value.detach().double().clone() for value in self._parameters]
        length = math.hypot(*(float(value.norm()) for value in before))
        for _ in range(3 if length else 0):
            self._epoch(few[:1], rate)
            pairs = zip(self._parameters, before, strict=True)
            moved = math.hypot(*(float((new.detach().double() - old).norm()) for new, old in pairs))
            self.keep.restore(start)
            rate *= _MOVE * length / moved if 0 < moved < math.inf else 1e3 if moved == 0 else 1e-3
        rate = float(f"{rate:.2g}")
        levels = {rate: trial(rate)}
        while len(levels) < _TRIALS:
            best = min(levels, key=lambda each: (levels[each], each))
            if best == max(levels) and levels[best] < math.inf:
                further = best * _WIDE
            elif best == min(levels):
                further = best / _WIDE
            else:
                break
            levels[further] = trial(further)
        self.rate = min(levels, key=lambda each: (levels[each], each))
        momentum = max(float(settings.get("momentum", 0.0)) for settings in self.optimizer.param_groups)
        if 0 < momentum < 1:  # what helped for a few steps overshoots when momentum has built up
            self.rate *= _CARE * sum(1 - momentum**k for k in range(1, len(few) + 1)) / len(few)
        self._first = self.rate

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the model's own state; safe for ``weights_only`` loading."""
        own = {"rates": [self.rate, self._first, self._lowest], "history": self.history.to_columns()}
        return {"kind": type(self).__name__, "optimizer": self.optimizer.state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; load the model's own state before.

        Raises:
            ValueError: if the state is that of something else.
        """
        if state_dict.get("kind") != type(self).__name__:
            raise ValueError(
                f"this is the state of {state_dict.get('kind') or 'an optimizer'}, not of ProvedEpochs"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.rate, self._first, self._lowest = state_dict["rates"]
        self.keep.history = History.of(EpochRecord, state_dict["history"])
        self.keep.accept()  # the weights that were loaded
