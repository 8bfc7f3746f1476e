"""Mini-batches that end in a proof: any optimizer runs, what is kept is proved to be lower on all data."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.graph.checks import is_loader, unwrapped
from surefoot.objectives import Objective
from surefoot.optim.bursts import (
    Average,
    Batches,
    Bend,
    BurstRecord,
    Snapshot,
    as_one,
    built_up,
    evaluating,
    fixed_data,
    only_looking,
)
from surefoot.optim.by_evaluation import StalledWarning
from surefoot.optim.evaluation import OptimizerError, check_objective, explained, outputs_of
from surefoot.optim.joint import JointBatches
from surefoot.optim.pace import Pace
from surefoot.processes import Processes
from surefoot.torch_private import is_sharded
from surefoot.valuation.streamed import StreamedValuer
from surefoot.valuation.valuer import Evaluation, EvaluationError, InfiniteValue

_FEW, _PART = (2, 4), 0.2  # mini-batches of a trial of a rate, and of what tells noise: least, most, part of all
_PROBES = 4  # steps of an epoch whose curvature is measured, about
_ABOVE, _HIGHER, _PATIENCE = 1.1, 2.0, 3  # too high: so many epochs more than 1.1 times the lowest, or one twice
_FAR = 5.0  # an epoch counts as at least a fifth of the loss it ends at, on the few batches that tell noise
_LATE, _COOL = 0.7, 1.2  # in the last part of a budget the noise is led to this
_SHARE = 0.06  # of the work of training that evaluations take, about
_FIRST, _LONGEST = 2.0, 8.0  # epochs of the first burst, the shortest, and of the longest
_STALLED = 2


class ProvedEpochs:
    r"""Let an optimizer run over mini-batches; keep what is proved to be lower on all data, and go back otherwise.

    The optimizer runs a *burst* of mini-batches. Then the objective F of all data is evaluated in exact arithmetic
    within an error (:func:`surefoot.evaluate`, one forward pass), and the burst is kept only if
    :math:`F(u_{\text{new}}) \le \hat F_{\text{new}} + e_{\text{new}} < \hat F - e \le F(u)`. Otherwise weights,
    buffers and the state of the optimizer go back to what was kept last, bit by bit. Random numbers and the order
    of the batches are not set back, so that a burst that failed is not repeated.

    *The function.* What is proved is about the deterministic objective: the mean over all samples, with the model
    in evaluation mode. Dropout is off; batch normalisation uses its running statistics, which are part of what is
    kept or set back. While the optimizer runs, the model is in the modes in which it was left. The penalty of
    ``weight_decay`` is not part of the objective. If the loader changes its samples at random (augmentation), pass
    the plain ones as ``data``.

    *The rate* finds itself. Trials of a few batches from the same state, a factor of eight apart, lead to one to
    start from. From then on each epoch says how to go on, by three numbers. Its *noise*: with the weights of its
    last steps averaged, how many times higher the loss of a few batches, always the same, is at the last weights
    than at the mean. A rate without noise wastes time, one whose noise dominates gets nowhere, so the rate is
    multiplied by 2.5/noise, within 1/2 and 1.5. Its *bend*: for a few steps, how much of the decrease that the
    gradient promises is lost to curvature, on the same batch. Above 0.3 the rate hardly grows, above 0.75 it
    falls: rates that are too large at the beginning do damage that is not made good. Its *level*: the mean of the
    losses of its batches, which costs nothing. If that is twice the lowest of the epochs before, or above 1.1
    times that for three epochs, training goes back to the lowest and the rate is halved, as it is after a burst
    that is not kept.

    Training goes on from the last weights. What is evaluated and kept are those after the epoch with the lowest
    level, or their mean if the loss of the few batches is lower there. (To go on from the mean would be slower,
    as it lags behind. The loss at the last weights is no measure of a rate: it is lowest where a small rate has
    just cooled the noise down.) None of this is a proof, nor needs one: what is kept is decided by the evaluation
    alone. Bursts are as long as it takes for evaluations to cost about a sixteenth of training.

    Args:
        optimizer: any ``torch.optim`` optimizer of the parameters of the model, or what makes one from them, such
            as the class ``torch.optim.Adam``.
        objective: a loss without targets, such as ``surefoot.CrossEntropy()`` or one of ``torch.nn``.
        loader: a ``DataLoader`` or another re-iterable of batches ``(x, y)``, which the optimizer is given.
        model: the network.
        data: what the objective is the mean over; by default all samples of the loader, in a fixed order.
        burst: epochs of a burst; by default as said above, by processor times. Give a number to be able to repeat
            a run exactly.
        average: over which part of an epoch, at its end, weights are averaged, at most half; 0 for none.
        progress: called with the record of each burst.
        group: a process group of ``torch.distributed`` whose processes have the same model and a loader each,
            which may be empty: a mini-batch is made of the next batch of every loader, the objective is that of
            all data. All of them call ``step`` or ``run``; process 0 trains and decides
            (:mod:`surefoot.optim.joint`).
            Weights and history are the same on all, the state to be saved is that of process 0.

    Attributes:
        history: one record per burst.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 4)
    >>> batches = list(zip(x.split(16), (x[:, 0] > 0).long().split(16)))
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> training = sf.ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), batches, model=model, burst=2)
    >>> losses = [training.step() for _ in range(5)]
    >>> all(after <= before for before, after in zip(losses, losses[1:])), losses[-1] < 0.3
    (True, True)
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer | Callable[..., Optimizer],
        objective: Objective | nn.Module,
        loader: Iterable[Any],
        *,
        model: nn.Module | None = None,
        data: Iterable[Any] | None = None,
        burst: float | None = None,
        average: float = 0.5,
        progress: Callable[[BurstRecord], object] | None = None,
        group: Any = None,
    ) -> None:
        self.model = unwrapped(_checked_model(optimizer, model))
        self.optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(self.model.parameters())
        self.objective = check_objective(objective, "the batches (x, y)")
        _check(self.optimizer, self.model, loader, burst, average)
        self.loader, self.burst, self.average = loader, burst, average
        self.progress = progress
        self.history: list[BurstRecord] = []
        self._pace = Pace(_rate(self.optimizer))
        self._ratios = [float(group["lr"]) / self.rate for group in self.optimizer.param_groups]
        self.processes = None if group is None else Processes(group)
        self._batches: Batches | JointBatches = (
            Batches(loader)
            if self.processes is None
            else JointBatches(loader, self.model, self.objective, self.processes, self._evaluated)
        )
        self._data = fixed_data(loader) if data is None else data
        self._valuer: StreamedValuer | None = None
        self._buffers: list[Tensor] = []
        self._judges: list[Any] = []
        self._lowest = math.inf  # the lowest mean of the losses of an epoch
        self._kept: Snapshot | None = None
        self._ahead: Snapshot | None = None  # where training goes on, if that is not where it was kept
        self._value: Evaluation | None = None
        self._seconds, self._trained = 0.0, 0  # processor time of training so far, and for how many batches
        self._cost = 0.0  # of an evaluation, in seconds: the least that was seen
        self._reading = 0.0  # seconds that reading the model took, once
        self._searched = False
        self._began, self._budget = 0.0, math.inf  # work before, and for, the present call of run
        self._stalls = 0

    @property
    def rate(self) -> float:
        """The learning rate of the next burst, of the first parameter group; others keep their ratio to it."""
        return self._pace.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._pace.rate = rate

    @property
    def value(self) -> Evaluation | None:
        """The objective of all data at the weights that were kept last; ``None`` before the first step."""
        return self._value

    @property
    def work(self) -> float:
        """What all bursts took so far, in training epochs: processor time, all but reading the model once."""
        return sum(record.work for record in self.history)

    def step(self) -> float:
        """One burst; returns the objective of all data afterwards, as computed.

        Raises:
            EvaluationError: if the objective cannot be enclosed, or the data changed from pass to pass.
            UnsupportedOperation: naming an operation that has no rule.
        """
        return self._led(lambda: self._round(math.inf))

    def run(self, epochs: float) -> float:
        """Bursts until the work of that many training epochs is spent; returns the objective of all data.

        Trials, bursts that were not kept and evaluations count; reading the model, once, does not. The last burst
        is as long as fits, and for the last third of the work rates are lower if mini-batches are noisy.
        """

        def spend() -> float:
            self._began, self._budget = self.work, epochs
            try:
                while True:
                    left = self._began + epochs - self.work
                    if self._value is not None and left < self._evaluation + 0.25:
                        return self._value.value
                    self._round(left)
            finally:
                self._budget = math.inf

        return self._led(spend)

    def _led(self, train: Callable[[], float]) -> float:
        """Process 0 trains and decides; afterwards all have its weights and its history."""
        joint = self._batches
        if not isinstance(joint, JointBatches):
            return train()

        def lead() -> tuple[float, dict[str, Any]]:
            value = train()
            told = self.state_dict()
            del told["optimizer"]
            return value, told

        value, told = joint.processes.led(lead, joint.serve, OptimizerError)
        joint.spread()
        if not joint.processes.leads:
            self._resume(told)
        return float(value)

    def _round(self, left: float) -> float:
        start = time.process_time()
        try:
            note = self._look()
            assert self._kept is not None
            room = left - self._in_epochs(time.process_time() - start - self._reading) - self._evaluation
            record = self._burst(self._kept, room, note)
            if not record.kept:
                self._kept.restore()
            self._set_rate(self.rate)
            self._conclude(record, start)
        except BaseException:
            if self._kept is not None:
                self._kept.restore()
                self._set_rate(self.rate)
            raise
        self._speak_of_stalls()
        assert self._value is not None
        return self._value.value

    def _look(self) -> str:
        """Evaluate and search where nothing is known yet, or the weights are not those that were kept."""
        note = ""
        if self._kept is None or not self._kept.is_live():
            known = self._value
            self._kept, self._value = None, self._evaluate()
            if not math.isfinite(self._value.error):
                raise EvaluationError(
                    f"no error of the objective {self._value.value:g} can be proved: nothing could be kept. Begin "
                    "with smaller weights, or use surefoot.evaluate to find the batch"
                )
            self._kept, self._ahead = Snapshot(self.model, self.optimizer), None
            self._lowest = self._value.value
            if known is not None and (known.upper < self._value.lower or self._value.upper < known.lower):
                note = "weights or data were changed since the last burst"
        if not self._searched:
            note = self._search(self._kept)
            self._searched = True
        return note

    def _burst(self, start: Snapshot, room: float, note: str) -> BurstRecord:
        """Train for one burst and compare; the record says whether it is kept."""
        assert self._value is not None
        length = self._length
        if room < length + self._evaluation + 0.25:
            length = max(room, 0.25)
        count = max(1, round(length * self._batches.per_epoch))
        rate = self.rate
        lowest, ahead = self._epochs(count, start)
        after = None if lowest is None else self._evaluate_or_none()
        before, kept = self._value, after is not None and after.upper < self._value.lower
        if after is None:
            note = _joined(note, "the loss was not finite")
        elif not kept:
            same = after.lower <= before.upper
            note = _joined(note, "lower cannot be told from round-off" if same else "not lower")
        values = (math.inf, 0.0) if after is None else (after.value, after.error)
        epochs = count / self._batches.per_epoch
        number = len(self.history)
        if kept and lowest is not None:
            self._kept, self._value = Snapshot(self.model, self.optimizer), after
            self._lowest, self._ahead = lowest, ahead
        else:
            self._ahead = None
            self._pace.fail(rate)
        return BurstRecord(number, before.value, before.error, *values, rate, kept, count, epochs, 0.0, note)

    def _epochs(self, count: int, start: Snapshot) -> tuple[float | None, Snapshot | None]:
        """Train for so many batches, adapt the rate at each epoch, and undo those that end too high.

        Afterwards the model has the weights whose loss is the lowest, on the batches that judge.

        Returns:
            that loss, or ``None`` if no epoch was good and the last one met a loss that is not finite; and where
            to go on, if that is not where the loss is lowest.
        """
        parts = max(1, round(count / self._batches.per_epoch))
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        lowest, best, above, level = self._lowest, start, 0, math.inf
        if self._ahead is not None:
            self._ahead.restore()
        for part in range(parts):
            if above == _PATIENCE:
                best.restore()
                above = 0
            size = count * (part + 1) // parts - count * part // parts
            mean, bend, rate = Average(held), Bend(held), self.rate
            level = self._train(self._batches.take(size), size, rate, mean, bend)
            last, middle = self._levels(mean) if level < math.inf else (math.inf, math.inf)
            level = max(level, min(last, middle) / _FAR)
            noise = last / middle if 0 < middle < math.inf else 1.0
            late = self.work + part - self._began > _LATE * self._budget
            gain = lowest / level if level > 0 else math.inf
            self._pace.adapt(noise, gain, bend.part, *([_COOL] if late else []))
            if level < lowest or (best is start and part == parts - 1 and level < math.inf):
                with mean.instead(middle < last):
                    best = Snapshot(self.model, self.optimizer)
            if level < lowest:
                lowest, above = level, 0
                continue
            above = _PATIENCE if level > _HIGHER * lowest else above + (level > _ABOVE * lowest)
            if above == _PATIENCE:
                self._pace.fail(rate)
        ahead = Snapshot(self.model, self.optimizer) if above < _PATIENCE else None
        if best is not start:
            best.restore()
        return (lowest if level < math.inf or best is not start else None), ahead

    def _levels(self, mean: Average) -> tuple[float, float]:
        """The loss at the last weights of an epoch and at their mean, where there is one."""
        last = self._level()
        if not mean.count:
            return last, last
        with mean.instead():
            return last, self._level()

    def _conclude(self, record: BurstRecord, start: float) -> None:
        work = self._in_epochs(time.process_time() - start - self._reading)
        self._reading = 0.0
        self.history.append(BurstRecord(**{**asdict(record), "work": work}))
        if self.progress is not None:
            self.progress(self.history[-1])

    @property
    def _length(self) -> float:
        """Epochs of the next burst."""
        if self.burst is not None:
            return float(self.burst)
        return min(max(_FIRST, self._evaluation / _SHARE), _LONGEST) if self.history else _FIRST

    @property
    def _few(self) -> int:
        """Batches of a trial, and of what judges trials and epochs."""
        return min(max(round(_PART * self._batches.per_epoch), _FEW[0]), _FEW[1], self._batches.per_epoch)

    @property
    def _evaluation(self) -> float:
        """What an evaluation costs, in training epochs."""
        return self._in_epochs(self._cost)

    def _in_epochs(self, seconds: float) -> float:
        if not self._trained or not self._seconds:
            return 0.0
        return seconds / (self._seconds / self._trained * self._batches.per_epoch)

    def _train(
        self,
        batches: Iterable[Any],
        count: int,
        rate: float,
        mean: Average | None = None,
        bend: Bend | None = None,
    ) -> float:
        """Mini-batch steps at a rate; the mean of their losses, infinite as soon as one is not finite."""
        self._set_rate(rate)
        last = min(round(self.average * self._batches.per_epoch), count // 2)
        start, steps, total = time.process_time(), 0, 0.0
        try:
            for steps, (x, y) in enumerate(batches, start=1):
                closure: Callable[[], Any] = partial(self._loss, x, y, backward=True)
                probed = bend is not None and steps % max(2, count // _PROBES) == 1
                if bend is not None and probed:
                    bend.begin()
                loss = self.optimizer.step(closure)
                if bend is not None and probed and loss is not None:
                    with only_looking(self.model):
                        bend.end(float(loss), float(self._loss(x, y)))
                total += math.inf if loss is None else float(loss)
                if not math.isfinite(total):
                    return math.inf
                if mean is not None and steps > count - last:
                    mean.add()
        finally:
            self._seconds, self._trained = self._seconds + time.process_time() - start, self._trained + steps
        return total / steps

    def _loss(self, x: Any, y: Any, *, backward: bool = False) -> Tensor:
        if isinstance(self._batches, JointBatches):
            return self._batches.loss(x, backward=backward)
        loss: Tensor = self.objective(outputs_of(self.model, x), y)
        if backward:
            self.optimizer.zero_grad()
            loss.backward()
        return loss.detach()

    def _level(self) -> float:
        """The loss on a few batches that stay the same."""
        if not self._judges:
            self._judges = as_one(self._batches.take(self._few))
        with evaluating(self.model), torch.no_grad():
            value = sum(float(self._loss(x, y)) for x, y in self._judges) / len(self._judges)
        return value if math.isfinite(value) else math.inf

    def _search(self, start: Snapshot) -> str:
        """A rate to begin with: trials from the same state, judged on a few other batches."""
        level = self._level()
        trial = list(self._batches.take(self._few))

        def judged(rate: float) -> float:
            value = self._level() if self._train(trial, len(trial), rate) < math.inf else math.inf
            start.restore()
            return value

        tried = self._pace.search(level, judged)
        self._pace.rate *= built_up(self.optimizer, len(trial))
        return f"{tried} rates were tried for {len(trial)} mini-batches each"

    def _set_rate(self, rate: float) -> None:
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def _evaluate(self) -> Evaluation:
        """The objective of all data, enclosed; of all processes, if there are several."""
        if isinstance(self._batches, JointBatches):
            self._batches.evaluate()
        return self._evaluated()

    def _evaluated(self) -> Evaluation:
        start = time.process_time()
        buffers = list(self.model.buffers())
        same = len(buffers) == len(self._buffers) and all(map(torch.equal, buffers, self._buffers))
        with evaluating(self.model):
            if self._valuer is None:
                self._valuer = StreamedValuer(self.model, self._data, self.objective, self.processes)
                self._valuer.evaluate()
                self._reading = time.process_time() - start
                start = time.process_time()
            elif not same:  # other running statistics: another graph, of the same data
                self._valuer = self._valuer.anew()
            self._buffers = [buffer.clone() for buffer in buffers]
            found = self._valuer.evaluate().evaluation
        spent = time.process_time() - start
        self._cost = min(self._cost, spent) if self._cost else spent
        return found

    def _evaluate_or_none(self) -> Evaluation | None:
        """``None`` where the objective, or a running statistic, is not finite."""
        statistics = (buffer for buffer in self.model.buffers() if buffer.is_floating_point())
        if not all(bool(torch.isfinite(buffer).all()) for buffer in statistics):
            return None
        try:
            return self._evaluate()
        except EvaluationError as error:
            if self.processes is not None and isinstance(error, InfiniteValue):
                return None
            with evaluating(self.model), torch.no_grad():
                if all(math.isfinite(float(self._loss(x, y))) for x, y in self._data):
                    raise
            return None

    def _speak_of_stalls(self) -> None:
        self._stalls = 0 if self.history[-1].kept else self._stalls + 1
        if self._stalls == _STALLED:
            warnings.warn(
                f"{_STALLED} bursts in a row were not kept ({self.history[-1].note}); the rate is now "
                f"{self.rate:.2g}. If it goes on, the training is at the noise of its mini-batches: use larger "
                "ones, or surefoot.CertifiedDescent on all data",
                StalledWarning,
                stacklevel=4,
            )

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        kept = [record for record in self.history if record.kept]
        if not kept:
            return "nothing yet: no burst was kept, and the weights are those it began with"
        fell = kept[0].before - kept[-1].after
        return (
            f"Each of the {len(kept)} bursts that were kept, of {len(self.history)}, lowers the objective of all "
            f"data, in exact arithmetic between the weights as they are stored: from {kept[0].before:.6g} to "
            f"{kept[-1].after:.6g}, by {fell:.3g}. The objective is the deterministic one: the model in "
            "evaluation mode, without dropout, augmentation or the penalty of weight decay, batch normalisation "
            "with its running statistics. Nothing is proved about single mini-batch steps or about other data."
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the model's own state; safe for ``weights_only`` loading.

        The place in the loader is not in it: a resumed run begins a new pass, from the weights that were kept.
        """
        value = None if self._value is None else [self._value.value, self._value.error]
        spent = {"seconds": self._seconds, "trained": self._trained, "cost": self._cost, "stalls": self._stalls}
        return {
            "kind": type(self).__name__,
            "optimizer": self.optimizer.state_dict(),
            "history": [asdict(record) for record in self.history],
            "value": value,
            "searched": self._searched,
            "pace": asdict(self._pace),
            **spent,
        }

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
        self._resume(state_dict)

    def _resume(self, state_dict: dict[str, Any]) -> None:
        """All but the state of the optimizer."""
        self.history = [BurstRecord(**record) for record in state_dict["history"]]
        self._value = None if state_dict["value"] is None else Evaluation(*state_dict["value"])
        self._kept, self._searched = None, state_dict["searched"]
        self._seconds, self._trained = state_dict["seconds"], state_dict["trained"]
        self._cost, self._stalls = state_dict["cost"], state_dict["stalls"]
        self._pace = Pace(**state_dict["pace"])
        self._set_rate(self.rate)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _rate(optimizer: Optimizer) -> float:
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError(f"the optimizer's rates are positive numbers to begin with, got {rates}")
    return rates[0]


def _checked_model(optimizer: Any, model: Any) -> nn.Module:
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


def _check(optimizer: Optimizer, model: nn.Module, loader: Any, burst: float | None, average: float) -> None:
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
