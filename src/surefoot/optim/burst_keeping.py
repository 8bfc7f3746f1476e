"""One burst after the other: trained, evaluated, kept or undone, by :class:`BurstKeeper`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from surefoot.optim.all_data import ROUNDING, AllData
from surefoot.optim.burst_ledger import Ledger
from surefoot.optim.burst_training import BurstTraining
from surefoot.optim.bursts import BurstRecord, Snapshot
from surefoot.optim.pace import Pace
from surefoot.optim.tail import WholeObjective
from surefoot.valuation.valuer import Evaluation, EvaluationError

_LENGTH = 12.0  # epochs of a burst: evaluations then cost a small part of training
_SCRAP = 0.25  # epochs
_FEWEST = 3  # gradients of all data: fewer are not worth an evaluation


class BurstKeeper:
    """What was kept last, and how it comes to something lower.

    Args:
        training: runs over mini-batches.
        all_data: evaluates what decides.

    Attributes:
        ledger: what became of bursts.
        value: the objective of what was kept last; ``None`` before the first burst.
    """

    def __init__(self, training: BurstTraining, all_data: AllData) -> None:
        self.training, self.all_data, self.ledger = training, all_data, Ledger()
        self.value: Evaluation | None = None
        self._kept: Snapshot | None = None
        self._ahead: Snapshot | None = None  # where training goes on, if that is not where it was kept
        self._searched = False

    @property
    def work(self) -> float:
        """What was spent so far, in gradients of all data."""
        return self.training.work + self.all_data.work

    def has_room(self, left: float) -> bool:
        """Whether another burst fits into this work."""
        return self.value is None or left >= self.all_data.coming + self._least

    @property
    def _least(self) -> float:
        """Epochs: less is not worth a burst."""
        return max(_SCRAP, 1 / self.training.batches.per_epoch)

    def burst(self, length: float | None, left: float = math.inf, cooling: float = 0.0) -> None:
        """Train for one burst, evaluate, and keep what is lower.

        Args:
            length: in epochs; by default twelve.
            left: all the work that there is.
            cooling: the last part of it, in which rates fall to zero.
        """
        began, training = self.work, self.training
        end = began + left - self.all_data.coming

        def warmth() -> float:
            return min(1.0, max(0.0, end - self.work) / cooling) if cooling else 1.0

        with self._back_if_interrupted():
            note = self._look()
            start, before = self._standing()
            length, room = length or _LENGTH, end - self.work
            if room < 1.5 * length:  # the last one is as long as fits
                length = max(room, self._least)
            count = max(1, int(length * training.batches.per_epoch + ROUNDING))
            rate, lowest = training.pace.rate, training.pace.lowest
            starts = [start] if self._ahead is None else [start, self._ahead]
            starts[-1].restore()
            states, ahead = training.run(count, starts, warmth)
            after, kept = None, False
            for number, state in enumerate(states):
                if number and self.work + self.all_data.coming > began + left:
                    break
                state.restore()
                after = self._evaluated()
                if after is not None and after.upper < before.lower:
                    kept = True
                    self._kept, self.value = Snapshot(training.model, training.optimizer), after
                    self._ahead = ahead if number == 0 else state
                    if number:
                        training.pace.fail(rate, training.pace.lowest)
                    training.pace.lowest = max(training.pace.lowest, after.value)  # epochs may miss hard samples
                    break
            if not kept:
                start.restore()
                if self.all_data.disturbed():
                    self._evaluated()
                self._ahead = None
                training.pace.fail(rate, lowest)
            training.set_rate(training.pace.rate)
            epochs = count / training.batches.per_epoch
            self.ledger.enter(before, after, rate, count, epochs, self.work - began, note)

    def descend(self, left: float) -> bool:
        """Steps on all data from what was kept, if some fit into this work besides an evaluation; they are kept if
        they end lower, and then training will go on from there.
        """
        began, training, passes = self.work, self.training, self.all_data.slopes_within(left)
        if not self._is_live() or passes < _FEWEST:
            return False
        start, before = self._standing()
        with self._back_if_interrupted():
            passes = WholeObjective(self.all_data, training.moved).descend(passes)
            after = self._evaluated()
            if after is not None and after.upper < before.lower:
                self._kept, self._ahead, self.value = Snapshot(training.model, training.optimizer), None, after
            else:
                start.restore()
            note = f"steps on all data: {passes} gradients"
            self.ledger.enter(before, after, training.pace.rate, 0, passes, self.work - began, note)
        return True

    def _evaluated(self) -> Evaluation | None:
        """What a burst led to, unless it is of another function than what it began with."""
        found = self.all_data.if_finite()
        if found is not None and self.all_data.changed:
            self.value = None
            raise EvaluationError(
                "the model changed while it was trained: it computes another function of its weights than before, "
                "so that nothing can be compared. Leave attributes, hooks and temperatures alone during step() "
                "and run(); weights and buffers are what they were before this burst"
            )
        return found

    def _is_live(self) -> bool:
        """Whether the model is still what was kept last."""
        kept = None if self.value is None else self._kept
        return kept is not None and kept.is_live()

    def _standing(self) -> tuple[Snapshot, Evaluation]:
        assert self._kept is not None
        assert self.value is not None
        return self._kept, self.value

    @contextmanager
    def _back_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._kept is not None:
                self._kept.restore()
                self.training.set_rate(self.training.pace.rate)
            raise

    def _look(self) -> str:
        """Evaluate and search where nothing is known yet, or the weights are not those that were kept."""
        note, training = "", self.training
        known, live = self.value, self._is_live()
        if not live:
            self._kept = None
        try:
            self.all_data.check_data()
        except EvaluationError:
            self.value = None
            raise
        looked = self.all_data.evaluate() if not live or self.all_data.disturbed() else None
        if looked is not None and (not live or self.all_data.changed):
            self.value = looked
            if not math.isfinite(self.value.error):
                raise EvaluationError(
                    f"no error of the objective {self.value.value:g} can be proved: nothing could be kept. Begin "
                    "with smaller weights, or use surefoot.evaluate to find the batch"
                )
            self._kept, self._ahead = Snapshot(training.model, training.optimizer), None
            same = known is not None and known.lower <= self.value.upper and self.value.lower <= known.upper
            same = same and not self.all_data.changed
            if known is not None and not same:
                note = "weights, model or data were changed since the last burst"
            if not same:
                training.pace.lowest = math.inf
        if not self._searched:
            note = training.search(self._standing()[0])
            self._searched = True
        return note

    def state_dict(self) -> dict[str, Any]:
        """All but the states of model and optimizer."""
        return {
            "history": [asdict(record) for record in self.ledger.history],
            "value": None if self.value is None else [self.value.value, self.value.error],
            "searched": self._searched,
            "pace": asdict(self.training.pace),
            "stalls": self.ledger.stalls,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        training, ledger = self.training, self.ledger
        ledger.history, ledger.stalls = [BurstRecord(**record) for record in state["history"]], state["stalls"]
        self.value = None if state["value"] is None else Evaluation(*state["value"])
        self._kept, self._searched = None, state["searched"]
        training.pace = Pace(**state["pace"])
        training.set_rate(training.pace.rate)
