"""Mini-batches that end in a proof: any optimizer runs, what is kept is proved to be lower on all data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from torch import nn
from torch.optim import Optimizer

from surefoot.graph.checks import unwrapped
from surefoot.objectives import Objective
from surefoot.optim.all_data import AllData
from surefoot.optim.beyond import Way
from surefoot.optim.burst_ledger import Ledger, joined
from surefoot.optim.burst_training import BurstTraining, check, checked_model
from surefoot.optim.bursts import BurstRecord, EndlessBatches, Snapshot, fixed_data
from surefoot.optim.evaluation import OptimizerError, check_objective
from surefoot.optim.joint import JointBatches
from surefoot.optim.pace import Pace
from surefoot.processes import Processes
from surefoot.valuation.valuer import Evaluation, EvaluationError

_LATE = 0.7  # in the last part of a budget rates fall
_SHARE = 0.06  # of the work of training that evaluations take, about
_FIRST, _SHORTEST, _LONGEST = 2.0, 4.0, 8.0  # epochs of the first burst, of the shortest afterwards, the longest
_LOOKS = 5  # evaluations beyond the end


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

    *The rate* finds itself: trials of a few batches from the same state lead to one to start from, and each epoch
    says how to go on (:mod:`surefoot.optim.pace`, :mod:`surefoot.optim.burst_training`). Training goes on from
    the last weights. What is evaluated are those after the epoch with the lowest mean loss, or their mean over its
    last steps. :meth:`run` lowers rates near its end, and then looks for a lower point beyond the last weights, on
    the line from the first ones (:mod:`surefoot.optim.beyond`). Where a network tells all samples apart, that
    lowers the cross-entropy by orders of magnitude and makes the network surer of what it says, right or wrong.
    None of this is a proof, nor needs one: what is kept is decided by the evaluation alone. Bursts are as long as
    it takes for evaluations to cost about a sixteenth of training.

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
        beyond: whether :meth:`run` may end beyond the last weights.
        progress: called with the record of each burst.
        group: a process group of ``torch.distributed`` whose processes have the same model and a loader each,
            which may be empty: a mini-batch is made of the next batch of every loader, the objective is that of
            all data. All of them call ``step`` or ``run``; process 0 trains and decides
            (:mod:`surefoot.optim.joint`). Weights and history are the same on all, the state to be saved is that
            of process 0.

    >>> import torch
    >>> import surefoot as sf
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 4)
    >>> batches = list(zip(x.split(16), (x[:, 0] > 0).long().split(16)))
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> training = ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), batches, model=model, burst=2)
    >>> losses = [training.step() for _ in range(5)]
    >>> all(after <= before for before, after in zip(losses, losses[1:])), losses[-1] < 0.3
    (True, True)
    """

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
        beyond: bool = True,
        progress: Callable[[BurstRecord], object] | None = None,
        group: Any = None,
    ) -> None:
        self.model = unwrapped(checked_model(optimizer, model))
        self.optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(self.model.parameters())
        self.objective = check_objective(objective, "the batches (x, y)")
        check(self.optimizer, self.model, loader, burst, average)
        self.loader, self.burst, self.beyond = loader, burst, beyond
        self._ledger = Ledger(progress)
        self.processes = None if group is None else Processes(group)
        data = fixed_data(loader) if data is None else data
        self._all = AllData(self.model, self.objective, data, self.processes)
        self._batches: EndlessBatches | JointBatches
        if self.processes is None:
            self._batches = EndlessBatches(loader)
        else:
            here = self._all.evaluate_here
            self._batches = JointBatches(loader, self.model, self.objective, self.processes, here)
            self._all.summon = self._batches.evaluate
        self._training = BurstTraining(self.model, self.optimizer, self.objective, self._batches, average)
        self._lowest = math.inf  # the lowest mean of the losses of an epoch
        self._kept: Snapshot | None = None
        self._ahead: Snapshot | None = None  # where training goes on, if that is not where it was kept
        self._value: Evaluation | None = None
        self._way: Way | None = None
        self._searched = False
        self._began, self._budget = 0.0, math.inf  # work before, and for, the present call of run

    @property
    def rate(self) -> float:
        """The learning rate of the next burst, of the first parameter group; others keep their ratio to it."""
        return self._training.pace.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._training.pace.rate = rate

    @property
    def history(self) -> list[BurstRecord]:
        """One record per burst."""
        return self._ledger.history

    @property
    def value(self) -> Evaluation | None:
        """The objective of all data at the weights that were kept last; ``None`` before the first step."""
        return self._value

    @property
    def work(self) -> float:
        """What all bursts took so far, in training epochs: processor time, all but reading the model once."""
        return self._ledger.work

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
        is as long as fits.
        """

        def spend() -> float:
            self._began, self._budget = self.work, epochs
            try:
                while True:
                    left = self._began + epochs - self.work
                    if self._value is not None and left < self._ending:
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
            del told["optimizer"], told["origin"]
            return value, told

        value, told = joint.processes.led(lead, joint.serve, OptimizerError)
        joint.spread()
        if not joint.processes.leads:
            self._resume(told)
        return float(value)

    def _round(self, left: float) -> float:
        """One burst: what is not kept, or interrupted, goes back."""
        start = time.process_time()
        try:
            note = self._look()
            assert self._kept is not None
            room = left - self._spent(start) - self._evaluation
            self._burst(self._kept, room, note, start)
        except BaseException:
            if self._kept is not None:
                self._kept.restore()
                self._training.set_rate(self.rate)
            raise
        self._ledger.speak_of_stalls(self.rate)
        assert self._value is not None
        return self._value.value

    def _look(self) -> str:
        """Evaluate and search where nothing is known yet, or the weights are not those that were kept."""
        note = ""
        if self._kept is None or not self._kept.is_live():
            known, self._kept = self._value, None
            self._value = self._all.evaluate()
            if not math.isfinite(self._value.error):
                raise EvaluationError(
                    f"no error of the objective {self._value.value:g} can be proved: nothing could be kept. Begin "
                    "with smaller weights, or use surefoot.evaluate to find the batch"
                )
            self._kept, self._ahead = Snapshot(self.model, self.optimizer), None
            same = known is not None and known.lower <= self._value.upper and self._value.lower <= known.upper
            if known is not None and not same:
                note = "weights or data were changed since the last burst"
            if self._way is None or not same:
                self._way, self._lowest = Way(self._training.parameters), self._value.value
        if not self._searched:
            note = self._training.search(self._kept)
            self._searched = True
        return note

    def _burst(self, start: Snapshot, room: float, note: str, began: float) -> None:
        """Train for one burst and compare."""
        assert self._value is not None
        assert self._way is not None
        length, ends = self._length, room < self._length + self._ending
        if ends:
            length = max(room + self._evaluation + 0.25 - self._ending, 0.25)
        count, rate = max(1, round(length * self._batches.per_epoch)), self.rate
        late = self._began + _LATE * self._budget - self.work
        lowest, ahead = self._training.run(count, start, self._ahead, self._lowest, late)
        before, after = self._value, None if lowest is None else self._all.if_finite()
        if after is not None and ((ends and self.beyond) or self._way.part):
            after = self._way.go_on(self._training.parameters, after, self._all.if_finite, _LOOKS)
            note = joined(note, f"{self._way.part:.2g} of the way beyond its end" if self._way.part else "")
        if lowest is not None and after is not None and after.upper < before.lower:
            self._kept, self._value = Snapshot(self.model, self.optimizer), after
            self._lowest, self._ahead = lowest, ahead
        else:
            start.restore()
            self._ahead = None
            self._training.pace.fail(rate)
        self._training.set_rate(self.rate)
        work, self._all.reading = self._spent(began), 0.0
        epochs = count / self._batches.per_epoch
        self._ledger.enter(before, after, note, rate=rate, batches=count, epochs=epochs, work=work)

    @property
    def _length(self) -> float:
        """Epochs of the next burst."""
        if self.burst is not None:
            return float(self.burst)
        if not self.history:
            return _FIRST
        return min(max(_SHORTEST, self._evaluation / _SHARE), _LONGEST)

    @property
    def _evaluation(self) -> float:
        """What an evaluation costs, in training epochs."""
        return self._training.in_epochs(self._all.cost)

    @property
    def _ending(self) -> float:
        """What is not enough for another burst, in training epochs."""
        return (1 + (_LOOKS if self.beyond else 0)) * self._evaluation + 0.25

    def _spent(self, start: float) -> float:
        """Processor time since then, in training epochs; without reading the model."""
        return self._training.in_epochs(time.process_time() - start - self._all.reading)

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        return self._ledger.guarantee

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the model's own state; safe for ``weights_only`` loading.

        The place in the loader is not in it: a resumed run begins a new pass, from the weights that were kept.
        """
        value = None if self._value is None else [self._value.value, self._value.error]
        training, way = self._training, self._way
        return {
            "kind": type(self).__name__,
            "optimizer": self.optimizer.state_dict(),
            "history": [asdict(record) for record in self.history],
            "value": value,
            "searched": self._searched,
            "pace": asdict(training.pace),
            "seconds": training.seconds,
            "trained": training.trained,
            "cost": self._all.cost,
            "stalls": self._ledger.stalls,
            "lowest": self._lowest,
            "origin": None if way is None else way.origin,
            "part": 0.0 if way is None else way.part,
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
        self._ledger.history = [BurstRecord(**record) for record in state_dict["history"]]
        self._value = None if state_dict["value"] is None else Evaluation(*state_dict["value"])
        self._kept, self._searched = None, state_dict["searched"]
        training = self._training
        training.seconds, training.trained = state_dict["seconds"], state_dict["trained"]
        training.pace = Pace(**state_dict["pace"])
        training.set_rate(self.rate)
        self._all.cost, self._ledger.stalls = state_dict["cost"], state_dict["stalls"]
        self._way, self._lowest = None, state_dict.get("lowest", math.inf)
        if state_dict.get("origin") is not None:
            self._way = Way(state_dict["origin"])
            self._way.part = state_dict["part"]


__all__ = ["ProvedEpochs"]
