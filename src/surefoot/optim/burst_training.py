"""The mini-batch steps of a burst, at rates that follow what its epochs show: :class:`BurstTraining`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.graph.checks import is_loader
from surefoot.objectives import Objective
from surefoot.optim.bursts import (
    Average,
    Bend,
    EndlessBatches,
    Snapshot,
    as_one,
    built_up,
    evaluating,
    only_looking,
)
from surefoot.optim.evaluation import OptimizerError, outputs_of
from surefoot.optim.joint import JointBatches
from surefoot.optim.pace import Pace
from surefoot.torch_private import is_sharded

_FORWARD = 1 / 3  # the work of a forward pass, over that of a gradient
_FEW, _PART = (2, 4), 0.2  # mini-batches of a trial of a rate, and of what tells noise: least, most, part of all
_PROBES = 2  # steps of an epoch whose curvature is measured
_ABOVE, _HIGHER, _PATIENCE = 1.1, 2.0, 3  # too high: so many epochs more than 1.1 times the lowest, or one twice
_RAMP = 2.0  # epochs in which the first rates rise from zero
_FAR = 2.0  # an epoch counts as at least half of the loss it ends at, on the few batches that tell noise


class BurstTraining:
    """An optimizer that runs over mini-batches, epoch by epoch.

    Each epoch is judged by three numbers. Its *noise*: how many times higher the loss of a few batches, always
    the same, is at the last weights than at the mean of those of its last steps. Its *bend*: for a few steps, how
    much of the decrease that the gradient promises is lost to curvature, on the same batch. Its *level*: the mean
    of the losses of its batches, which costs nothing. If that is twice the lowest of the epochs before, or above
    1.1 times that for three epochs, training goes back to the lowest and the rate falls, as it does after a
    burst that is not kept. In the first two epochs rates rise from zero: larger ones then do no damage, above all
    with Adam, whose first steps are as long as later ones. (To go on from the mean would be slower, as it lags
    behind. The loss at the last weights is no measure of a rate: it is lowest where a small rate has just cooled
    the noise down.)

    Args:
        model, optimizer, objective: as given to :class:`surefoot.optim.ProvedEpochs`; ratios of rates stay.
        batches: the mini-batches.
        average: over which part of an epoch, at its end, weights are averaged.

    Attributes:
        pace: the learning rate of the first parameter group.
        work: of training so far, in gradients of all data; a forward pass counts as a third of one.
        ramped: how many of the first steps, whose rates rise, were taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        batches: EndlessBatches | JointBatches,
        average: float,
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"the optimizer's rates are positive numbers to begin with, got {rates}")
        self.model, self.optimizer, self.objective, self.batches = model, optimizer, objective, batches
        self.average = average
        self.pace = Pace(rates[0])
        self.work, self.ramped = 0.0, 0
        self._ratios = [rate / rates[0] for rate in rates]
        self._judges: list[Any] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer moves."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def epoch_work(self) -> float:
        """That of an epoch of a burst, with the forward passes that judge it."""
        looks = min(_PROBES, (self.batches.per_epoch + 1) // 2) + (2 if self.average else 1) * self._few
        return 1 + _FORWARD * looks / self.batches.per_epoch

    def set_rate(self, rate: float) -> None:
        """Give the optimizer a rate, every group in its ratio."""
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def loss(self, x: Any, y: Any, *, backward: bool = False) -> Tensor:
        """The loss of a batch, with its gradient in ``.grad`` if that is asked for."""
        if isinstance(self.batches, JointBatches):
            return self.batches.loss(x, backward=backward)
        loss: Tensor = self.objective(outputs_of(self.model, x), y)
        if backward:
            self.optimizer.zero_grad()
            loss.backward()
        return loss.detach()

    def search(self, start: Snapshot) -> str:
        """Find a rate to begin with: trials from the same state, judged on a few other batches."""
        level = self._level()
        trial = list(self.batches.take(self._few))

        def judged(rate: float) -> float:
            value = self._level() if self._train(trial, len(trial), rate) < math.inf else math.inf
            start.restore()
            return value

        tried = self.pace.search(level, judged)
        self.pace.rate *= built_up(self.optimizer, len(trial))
        return f"{tried} rates were tried for {len(trial)} mini-batches each"

    def run(
        self, count: int, start: Snapshot, ahead: Snapshot | None, lowest: float, late: float
    ) -> tuple[float | None, Snapshot | None]:
        """Train for so many batches, adapt the rate at each epoch, and undo those that end too high.

        Afterwards the model has the weights after the epoch with the lowest mean loss, or their mean.

        Args:
            count: of batches.
            start: what was kept last.
            ahead: where to begin, if that is not where it was kept.
            lowest: the lowest mean loss of the epochs so far.
            late: after how many epochs of this burst rates are to fall.

        Returns:
            the lowest mean loss, or ``None`` if no epoch was good and the last one met a loss that is not finite;
            and where to go on, if that is not where the loss is lowest.
        """
        parts = max(1, round(count / self.batches.per_epoch))
        best, above, level = start, 0, math.inf
        if ahead is not None:
            ahead.restore()
        for part in range(parts):
            if above == _PATIENCE:
                best.restore()
                above = 0
            size = count * (part + 1) // parts - count * part // parts
            mean, bend, rate = Average(self.parameters), Bend(self.parameters), self.pace.rate
            level = self._train(self.batches.take(size), size, rate, mean, bend)
            last, middle = self._levels(mean) if level < math.inf else (math.inf, math.inf)
            level = max(level, min(last, middle) / _FAR)
            noise = last / middle if 0 < middle < math.inf else 1.0
            gain = lowest / level if level > 0 else math.inf
            self.pace.adapt(noise, gain, bend.part, late=part > late)
            if level < lowest or (best is start and part == parts - 1 and level < math.inf):
                with mean.instead(middle < last):
                    best = Snapshot(self.model, self.optimizer)
            if level < lowest:
                lowest, above = level, 0
                continue
            above = _PATIENCE if level > _HIGHER * lowest else above + (level > _ABOVE * lowest)
            if above == _PATIENCE:
                self.pace.fail(rate)
        ahead = Snapshot(self.model, self.optimizer) if above < _PATIENCE else None
        if best is not start:
            best.restore()
        return (lowest if level < math.inf or best is not start else None), ahead

    def _train(
        self,
        batches: Iterable[Any],
        count: int,
        rate: float,
        mean: Average | None = None,
        bend: Bend | None = None,
    ) -> float:
        """Mini-batch steps at a rate; the mean of their losses, infinite as soon as one is not finite."""
        self.set_rate(rate)
        ramp = 0.0 if mean is None else _RAMP * self.batches.per_epoch
        last = min(round(self.average * self.batches.per_epoch), count // 2)
        steps, total, step = 0, 0.0, 1 / self.batches.per_epoch
        for steps, (x, y) in enumerate(batches, start=1):
            if self.ramped < ramp:
                self.ramped += 1
                self.set_rate(rate * self.ramped / ramp)
            self.work += step
            closure: Callable[[], Any] = partial(self.loss, x, y, backward=True)
            probed = bend is not None and steps % max(2, -(-count // _PROBES)) == 1
            if bend is not None and probed:
                bend.begin()
            loss = self.optimizer.step(closure)
            if bend is not None and probed and loss is not None:
                self.work += _FORWARD * step
                with only_looking(self.model):
                    bend.end(float(loss), float(self.loss(x, y)))
            total += math.inf if loss is None else float(loss)
            if not math.isfinite(total):
                return math.inf
            if mean is not None and steps > count - last:
                mean.add()
        return total / steps

    @property
    def _few(self) -> int:
        """Batches of a trial, and of what judges trials and epochs."""
        return min(max(round(_PART * self.batches.per_epoch), _FEW[0]), _FEW[1], self.batches.per_epoch)

    def _levels(self, mean: Average) -> tuple[float, float]:
        """The loss at the last weights of an epoch and at their mean, where there is one."""
        last = self._level()
        if not mean.count:
            return last, last
        with mean.instead():
            return last, self._level()

    def _level(self) -> float:
        """The loss on a few batches that stay the same."""
        if not self._judges:
            self._judges = as_one(self.batches.take(self._few))
        self.work += _FORWARD * self._few / self.batches.per_epoch
        with evaluating(self.model), torch.no_grad():
            value = sum(float(self.loss(x, y)) for x, y in self._judges) / len(self._judges)
        return value if math.isfinite(value) else math.inf


def checked_model(optimizer: Any, model: Any) -> nn.Module:
    """The model, where both are of the right kind."""
    usage = "write ProvedEpochs(torch.optim.Adam(model.parameters()), objective, loader, model=model)"
    if not isinstance(optimizer, Optimizer) and not (
        isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    ):
        raise TypeError(f"the first argument is a torch optimizer, got {type(optimizer).__name__}: {usage}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"the objective of all data needs the model, got {type(model).__name__}: {usage}")
    if is_sharded(model):
        raise OptimizerError(
            "the weights of this model lie with several processes, and its optimizer moves a part of them: train "
            "by surefoot.CertifiedDescent(model, objective, group=…), or a model that is whole on each process"
        )
    return model


def check(optimizer: Optimizer, model: nn.Module, loader: Any, burst: float | None, average: float) -> None:
    """Refuse what cannot be trained, with a sentence."""
    if not is_loader(loader) or isinstance(loader, Iterator):
        raise TypeError(
            "the loader is a DataLoader, a list of batches (x, y), or another iterable that can be read many "
            f"times, got {type(loader).__name__}"
        )
    if any("lr" not in group for group in optimizer.param_groups):
        raise OptimizerError(f"{type(optimizer).__name__} has no learning rate 'lr' that could be set")
    known = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise ValueError(f"{strangers} of the optimizer's parameters are not parameters of the model")
    if burst is not None and not burst > 0:
        raise ValueError(f"a burst is a positive number of epochs, got {burst!r}")
    if not 0 <= average <= 1:
        raise ValueError(f"weights are averaged over a part of an epoch between 0 and 1, got {average!r}")
