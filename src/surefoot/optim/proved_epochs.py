"""Mini-batches that end in a proof: any optimizer runs, what is kept is proved to be lower on all data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from surefoot.objectives import Objective
from surefoot.optim.all_data import AllData
from surefoot.optim.burst_keeping import BurstKeeper
from surefoot.optim.burst_training import BurstTraining, check, checked_model
from surefoot.optim.bursts import BurstRecord, EndlessBatches, fixed_data
from surefoot.optim.evaluation import OptimizerError, check_objective, explained
from surefoot.optim.joint import JointBatches
from surefoot.optim.pace import Pace
from surefoot.processes import Processes
from surefoot.program.checks import plainly, unwrapped
from surefoot.valuation.valuer import Evaluation

_COOLING = 0.5  # the last part of the work on mini-batches, in which rates fall to zero


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

    *The rate* finds itself; the one that the optimizer was given does not matter, only the ratios of its groups.
    Trials of a few batches from the same state lead to one to start from (:mod:`surefoot.optim.burst_training`).
    Then it is led by success: it rises after an epoch whose mean loss is lower than all before, and falls after
    any other; epochs that do damage are undone (:mod:`surefoot.optim.pace`). What is evaluated is the mean of the
    weights over the last steps of the lowest epoch; training goes on from the last weights. Bursts are of twelve
    epochs, so that evaluations cost a small part of training.

    *The end.* In the second half of :meth:`run` the rates of bursts fall to zero. With ``tail``, that part of the
    work goes at the end into L-BFGS steps of the objective of all data (:mod:`surefoot.optim.tail`). Where a
    network tells all samples apart, these lower the cross-entropy by orders of magnitude and make it surer of what
    it says, right or wrong: the loss of other samples is often higher. Dropout, augmentation and weight decay have
    no part in them.

    *What changes.* If the model computes another function than at the end of the last burst (an attribute, a hook,
    other weights), that is noted, and what was kept is evaluated anew. If it changes while a burst trains, or the
    data change, nothing can be compared, which is an error.

    None of this is a proof, nor needs one: what is kept is decided by the evaluation alone. Work is counted
    (:mod:`surefoot.optim.all_data`) and no time is measured, so the same seed gives the same run.

    Args:
        optimizer: any ``torch.optim`` optimizer of the parameters of the model, or what makes one from them, such
            as the class ``torch.optim.Adam``.
        objective: a loss without targets, such as ``surefoot.CrossEntropy()`` or one of ``torch.nn``.
        loader: a ``DataLoader`` or another re-iterable of batches ``(x, y)``, which the optimizer is given.
        model: the network.
        data: what the objective is the mean over; by default the samples that the loader gives, in a fixed order
            where it is a plain ``DataLoader``. One that draws its samples at random needs them.
        burst: epochs of a burst, by default twelve.
        average: over which part of an epoch, at its end, weights are averaged, at most half; 0 for none.
        tail: which part of its work :meth:`run` spends at the end on steps on all data, below 1; by default none.
        progress: called with the record of each burst.
        group: a process group of ``torch.distributed`` whose processes have the same model and a loader each,
            which may be empty: a mini-batch is made of the next batch of every loader, the objective is that of
            all data. All of them call ``step`` or ``run``; process 0 trains and decides
            (:mod:`surefoot.optim.joint`). Weights and history are the same on all, the state to be saved is that
            of process 0.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 4)
    >>> batches = list(zip(x.split(16), (x[:, 0] > 0).long().split(16)))
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> training = sf.ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), batches, model=model, burst=2)
    >>> losses = [training.step() for _ in range(3)]
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
        tail: float = 0.0,
        progress: Callable[[BurstRecord], object] | None = None,
        group: Any = None,
    ) -> None:
        given = checked_model(optimizer, model)
        self.model = unwrapped(given)
        self.optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(self.model.parameters())
        self.objective = check_objective(objective, "the batches (x, y)")
        check(self.optimizer, self.model, loader, burst, average, tail)
        self.loader, self.burst, self.average, self.tail = loader, burst, average, tail
        self.progress = progress
        self.processes = None if group is None else Processes(group)
        data = fixed_data(loader) if data is None else data
        all_data = AllData(self.model, self.objective, data, self.processes)
        self._batches: EndlessBatches
        if self.processes is None:
            self._batches = EndlessBatches(loader)
        else:
            here = all_data.pass_here
            self._batches = JointBatches(loader, self.model, self.objective, self.processes, here)
            all_data.summon = self._batches.evaluate
        training = BurstTraining(self.model, self.optimizer, self.objective, self._batches, average)
        self._keeper = BurstKeeper(training, all_data)

    @property
    def rate(self) -> float:
        """The learning rate of the next burst, of the first parameter group; others keep their ratio to it."""
        return self._keeper.training.pace.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._keeper.training.pace.rate = rate

    @property
    def history(self) -> list[BurstRecord]:
        """One record per burst."""
        return self._keeper.ledger.history

    @property
    def value(self) -> Evaluation | None:
        """The objective of all data at the weights that were kept last; ``None`` before the first step."""
        return self._keeper.value

    @property
    def work(self) -> float:
        """What all bursts took so far, counted, in gradients of all data."""
        return self._keeper.ledger.work

    def step(self) -> float:
        """One burst; returns the objective of all data afterwards, as computed.

        Raises:
            EvaluationError: if the objective cannot be enclosed, or the data changed from pass to pass.
            UnsupportedOperation: naming an operation that has no rule.
        """
        return self._led(self._step)

    def _step(self, left: float = math.inf, cooling: float = 0.0) -> float:
        self._keeper.burst(self.burst, left, cooling)
        return self._told()

    def _told(self) -> float:
        if self.progress is not None:
            self.progress(self.history[-1])
        self._keeper.ledger.speak_of_stalls(self.rate)
        assert self.value is not None
        return self.value.value

    def run(self, epochs: float) -> float:
        """Bursts until the work of that many training epochs is spent; returns the objective of all data.

        Trials, bursts that were not kept and evaluations count; reading the model, once, does not. The last burst
        is as long as fits. The last record, of no batches, is that of the steps on all data. No more is spent,
        unless the first burst is more, or the optimizer asks for several gradients per step.
        """

        def spend() -> float:
            end, trained = self.work + epochs, (1 - self.tail) * epochs
            turn = self.work + trained
            while self._keeper.has_room(turn - self.work):
                self._step(turn - self.work, _COOLING * trained)
            if self.tail and self._keeper.descend(end - self.work):
                self._told()
            assert self.value is not None
            return self.value.value

        return self._led(spend)

    @plainly
    def _led(self, train: Callable[[], float]) -> float:
        """Process 0 trains and decides; afterwards all have its weights and its history."""
        joint = self._batches
        if not isinstance(joint, JointBatches):
            return train()

        def lead() -> tuple[float, dict[str, Any]]:
            value = train()
            return value, self._keeper.state_dict()

        value, told = joint.processes.led(lead, joint.serve, OptimizerError)
        joint.spread()
        if not joint.processes.leads:
            self._keeper.load_state_dict(told)
        return float(value)

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        return self._keeper.ledger.guarantee

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the model's own state; safe for ``weights_only`` loading.

        The place in the loader is not in it: a resumed run begins a new pass, from the weights that were kept.
        """
        kind, own = {"kind": type(self).__name__}, self._keeper.state_dict()
        return kind | {"optimizer": self.optimizer.state_dict()} | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; load the model's own state before.

        Raises:
            ValueError: if the state is that of something else, or of an earlier version.
        """
        if state_dict.get("kind") != type(self).__name__:
            raise ValueError(
                f"this is the state of {state_dict.get('kind') or 'an optimizer'}, not of ProvedEpochs"
            )
        if state_dict["pace"].keys() != {field.name for field in fields(Pace)}:
            raise ValueError(
                "this state was saved by an earlier version, which led its rates in another way: begin anew, from "
                "the weights that were saved with it"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._keeper.load_state_dict(state_dict)
