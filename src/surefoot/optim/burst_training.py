"""The mini-batch steps of a burst, at rates that follow what its epochs show: :class:`BurstTraining`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.objectives import Objective
from surefoot.optim.bursts import Average, EndlessBatches, Snapshot, built_up, only_looking
from surefoot.optim.evaluation import OptimizerError, outputs_of
from surefoot.optim.joint import NumberedBatches
from surefoot.optim.pace import Pace, Verdict, best_rate
from surefoot.optim.vectors import held_by
from surefoot.program.checks import is_loader

_FORWARD = 1 / 3  # the work of a forward pass, over that of a gradient
_FEW, _PART = (2, 4), 0.2  # mini-batches of a trial of a rate, and of what judges it: least, most, part of all
_CARE = 0.3  # the part of a rate, found by a few steps, that is taken with momentum
_STATES = 3  # lowest states that are held
_MOVE = 0.03  # by which part of their length weights are to move in the first step of the first trial
_MEASURED, _STRIDE = 3, 1e3  # steps for that; what multiplies a rate at which weights do not move


class BurstTraining:
    """An optimizer that runs over mini-batches, epoch by epoch.

    Each epoch is judged by the mean of the losses of its batches, which costs nothing
    (:mod:`surefoot.optim.pace`), and is broken off as soon as that is sure to be too high. What is evaluated is
    the mean of the weights over the last steps of the lowest epoch: much of what single steps do is noise that
    cancels.

    The first rate is found from trials of a few batches, all from the same state. The first of them moves the
    weights by a few hundredths of their length in one step, whatever the optimizer; so the rate that the optimizer
    was given does not matter, only the ratios of those of its groups.

    Args:
        model, optimizer, objective: as given to :class:`surefoot.optim.ProvedEpochs`.
        batches: the mini-batches.
        average: over which part of an epoch, at its end, weights are averaged.

    Attributes:
        pace: the learning rate of the first parameter group.
        work: of training so far, in gradients of all data; a forward pass counts as a third of one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        batches: EndlessBatches,
        average: float,
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"the optimizer's rates are positive numbers to begin with, got {rates}")
        self.model, self.optimizer, self.objective, self.batches = model, optimizer, objective, batches
        self.average = average
        self.pace = Pace(rates[0])
        self.work = 0.0
        self._ratios = [rate / rates[0] for rate in rates]

    @property
    def moved(self) -> list[Tensor]:
        """What the optimizer moves."""
        return held_by(self.optimizer)

    @property
    def parameters(self) -> list[Tensor]:
        """The same, as far as this process has it."""
        return [value.detach() for value in self.moved]

    def set_rate(self, rate: float) -> None:
        """Give the optimizer a rate, every group in its ratio."""
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def loss(self, x: Any, y: Any, *, backward: bool = False) -> Tensor:
        """The loss of a batch, with its gradient in ``.grad`` if that is asked for."""
        self.work += (1 if backward else _FORWARD) / self.batches.per_epoch
        if isinstance(self.batches, NumberedBatches):
            return self.batches.loss(x, backward=backward)
        loss: Tensor = self.objective(outputs_of(self.model, x), y)
        if backward:
            self.optimizer.zero_grad()
            loss.backward()
        return loss.detach()

    def search(self, start: Snapshot) -> str:
        """Find a rate to begin with: trials from the same state, judged on the batches that they train on.

        Small rates are sure to do some good there; on other batches, a few steps from a flat start do none that
        could be told from noise. The model is judged in the modes in which it is trained: running statistics know
        little after a few steps. With momentum a part of the rate is taken: what helped for a few steps overshoots
        when momentum has built up, which rectifiers may not survive (at all of it 8 of 20 runs on digits ended
        above 0.1, at that part 3).
        """
        trial = list(self.batches.take(self._few))

        def level() -> float:
            with only_looking(self.model):
                value = sum(float(self.loss(x, y)) for x, y in trial) / len(trial)
            return value if math.isfinite(value) else math.inf

        def judged(rate: float) -> float:
            value = level() if self._steps(trial, lambda: rate)[0] < math.inf else math.inf
            start.restore()
            return value

        self.pace.lowest = level()
        rate, tried = best_rate(self._rate_of_a_move(trial[:1], start), self.pace.lowest, judged)
        part = built_up(self.optimizer, len(trial))
        self.pace.rate = rate * (_CARE * part if part < 1 else 1.0)
        return f"{tried} rates were tried for {len(trial)} mini-batches each"

    def _rate_of_a_move(self, batch: list[Any], start: Snapshot) -> float:
        """The rate at which one step moves the weights by a few hundredths of their length, to two digits."""
        rate = self.pace.rate
        before = [parameter.double().clone() for parameter in self.parameters]
        length = self.batches.length(before)
        if not 0 < length < math.inf:
            return rate
        for _ in range(_MEASURED):  # always as many, so that the work does not depend on the first rate
            self._steps(batch, partial(float, rate))
            moved = self.batches.length(
                [new.double() - old for new, old in zip(self.parameters, before, strict=True)]
            )
            start.restore()
            rate *= _MOVE * length / moved if 0 < moved < math.inf else _STRIDE if moved == 0 else 1 / _STRIDE
        return float(f"{rate:.2g}")

    def run(
        self, count: int, starts: list[Snapshot], warmth: Callable[[], float]
    ) -> tuple[list[Snapshot], Snapshot]:
        """Train for so many batches from the present state, adapt the rate at each epoch, and undo damage.

        A lowest state may be luck, or on the brink. If training has to go back to it twice without coming to a
        lower one, the state before takes its place.

        Args:
            count: of batches.
            starts: states that are known: what was kept, and the present one where that is another.
            warmth: what rates are multiplied by at present, at most 1.

        Returns:
            the last lowest states, with mean weights, the lowest first; if no epoch was lower, that after the last
            one, unless it was broken off. And where training is now.
        """
        states, taken, undone = [(self.pace.lowest, start) for start in starts], 0, False
        while taken < count:
            size, epoch = count - taken, self.batches.per_epoch
            if size >= epoch:  # from pass to pass, so that no sample is left out
                size = epoch if size >= 2 * epoch else size
                self.batches.begin()
            last = min(round(self.average * epoch), size // 2)
            mean = Average(self.parameters, size - last)
            level, steps = self._steps(
                self.batches.take(size), lambda: self.pace.rate * warmth(), mean, size * self.pace.limit
            )
            taken += steps
            verdict = self.pace.judge(level)
            end = None
            if verdict is Verdict.LOWER or (level < math.inf and taken >= count and states[-1][1] in starts):
                with mean.instead():
                    end = Snapshot(self.model, self.optimizer)
            if verdict is Verdict.LOWER:
                assert end is not None
                states, undone = [*states[1 - _STATES :], (level, end)], False
            elif verdict is Verdict.BACK:
                if undone and len(states) > 1:
                    states.pop()
                    self.pace.lowest = states[-1][0]
                states[-1][1].restore()
                undone = True
        lowest = [state for _, state in reversed(states) if state not in starts]
        return lowest or ([] if end is None else [end]), Snapshot(self.model, self.optimizer)

    def _steps(
        self,
        batches: Iterable[Any],
        rate: Callable[[], float],
        mean: Average | None = None,
        limit: float = math.inf,
    ) -> tuple[float, int]:
        """Mini-batch steps: the mean of their losses, and how many there were.

        Args:
            batches: one per step.
            rate: of the next step.
            mean: takes in the weights after each step.
            limit: as soon as the sum of the losses is higher, or not finite, the mean is infinite, and they end.
        """
        steps, total = 0, 0.0
        for steps, (x, y) in enumerate(batches, start=1):
            self.set_rate(rate())
            closure: Callable[[], Any] = partial(self.loss, x, y, backward=True)
            loss = self.optimizer.step(closure)
            total += math.inf if loss is None else float(loss)
            if not total <= limit or total == math.inf:
                return math.inf, steps
            if mean is not None:
                mean.add()
        return total / steps, steps

    @property
    def _few(self) -> int:
        """Batches of a trial, and of what judges trials."""
        return min(max(round(_PART * self.batches.per_epoch), _FEW[0]), _FEW[1], self.batches.per_epoch)


def checked_model(optimizer: Any, model: Any) -> nn.Module:
    """The model, where both are of the right kind."""
    usage = "write ProvedEpochs(torch.optim.Adam(model.parameters()), objective, loader, model=model)"
    if not isinstance(optimizer, Optimizer) and not (
        isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    ):
        raise TypeError(f"the first argument is a torch optimizer, got {type(optimizer).__name__}: {usage}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"the objective of all data needs the model, got {type(model).__name__}: {usage}")
    return model


def check(
    optimizer: Optimizer, model: nn.Module, loader: Any, burst: float | None, average: float, tail: float
) -> None:
    """Refuse what cannot be trained, with a sentence."""
    if not is_loader(loader) or isinstance(loader, Iterator):
        raise TypeError(
            "the loader is a DataLoader, a list of batches (x, y), or another iterable that can be read many "
            f"times, got {type(loader).__name__}"
        )
    if any("lr" not in group for group in optimizer.param_groups):
        raise OptimizerError(f"{type(optimizer).__name__} has no learning rate 'lr' that could be set")
    known = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(value) not in known for value in held_by(optimizer))
    if strangers:
        raise ValueError(f"{strangers} of the optimizer's parameters are not parameters of the model")
    if burst is not None and not burst > 0:
        raise ValueError(f"a burst is a positive number of epochs, got {burst!r}")
    if not 0 <= average <= 1:
        raise ValueError(f"weights are averaged over a part of an epoch between 0 and 1, got {average!r}")
    if not 0 <= tail < 1:
        raise ValueError(f"steps on all data take a part of the work from 0 to less than 1, got {tail!r}")
