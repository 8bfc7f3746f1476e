"""One burst after the other: trained, evaluated, kept or undone, by :class:`BurstKeeper`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from surefoot.optim.all_data import ROUNDING, AllData
from surefoot.optim.beyond import Way
from surefoot.optim.burst_ledger import Ledger
from surefoot.optim.burst_training import BurstTraining
from surefoot.optim.bursts import BurstRecord, Snapshot
from surefoot.optim.pace import Pace
from surefoot.valuation.valuer import Evaluation, EvaluationError

_LENGTH = 12.0  # epochs of a burst: evaluations then cost a small part of training
_SCRAP = 0.25  # epochs
_LOOKS = 7  # beyond the end


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
        self._way: Way | None = None
        self._searched = False

    @property
    def work(self) -> float:
        """What was spent so far, in gradients of all data."""
        return self.training.work + self.all_data.work

    def has_room(self, left: float, *, beyond: bool) -> bool:
        """Whether another burst fits into this work, besides a search beyond its end."""
        return self.value is None or left >= self._ending(beyond) + self._least

    @property
    def _least(self) -> float:
        """Epochs: less is not worth a burst."""
        return max(_SCRAP, 1 / self.training.batches.per_epoch)

    def _ending(self, beyond: bool) -> float:
        """The work that follows the last batch."""
        return self.all_data.coming + (self.all_data.search_work(_LOOKS) if beyond else 0.0)

    def burst(self, length: float | None, left: float = math.inf, cooling: float = 0.0, *, beyond: bool) -> None:
        """Train for one burst, evaluate, and keep what is lower.

        Args:
            length: in epochs; by default twelve.
            left: all the work that there is.
            cooling: the last part of it, in which rates fall to zero.
            beyond: whether a search beyond its end is to come.
        """
        began, training = self.work, self.training
        end = began + left - self._ending(beyond)

        def warmth() -> float:
            return min(1.0, max(0.0, end - self.work) / cooling) if cooling else 1.0

        with self._back_if_interrupted():
            note = self._look()
            start, before, way = self._standing()
            length, room = length or _LENGTH, end - self.work
            if room < 1.5 * length:  # the last one is as long as fits
                length = max(room, self._least)
            count = max(1, int(length * training.batches.per_epoch + ROUNDING))
            rate, lowest, part = training.pace.rate, training.pace.lowest, way.part
            starts = [start] if self._ahead is None else [start, self._ahead]
            starts[-1].restore()
            states, ahead = training.run(count, starts, warmth)
            after, kept = None, False
            for number, state in enumerate(states):
                if number and self.work + self.all_data.coming > began + left:
                    break
                state.restore()
                after = self.all_data.if_finite()
                evaluated = math.inf if after is None else after.value
                if after is not None and part:
                    after = self._further(way, after, began + left - self.work)
                kept = after is not None and after.upper < before.lower
                if kept:
                    self._kept, self.value = Snapshot(training.model, training.optimizer), after
                    self._ahead = ahead if number == 0 else state
                    if number:
                        training.pace.fail(rate, training.pace.lowest)
                    training.pace.lowest = max(training.pace.lowest, evaluated)  # epochs may miss hard samples
                    break
            if not kept:
                start.restore()
                self._ahead, way.part = None, part
                training.pace.fail(rate, lowest)
            training.set_rate(training.pace.rate)
            self._enter(before, after, note, count, rate, began)

    def go_beyond(self, left: float) -> bool:
        """Look for a lower point beyond what was kept, once, if that fits into the work that is left.

        Training will go on from where it was.
        """
        began, training = self.work, self.training
        if not self._is_live() or not self.all_data.looks_within(left, _LOOKS):
            return False
        start, before, way = self._standing()
        if way.part:
            return False
        with self._back_if_interrupted():
            after = self._further(way, before, left)
            if way.part:
                self._ahead = self._ahead or start
                self._kept, self.value = Snapshot(training.model, training.optimizer), after
            self._enter(before, after, f"{way.part:.2g} of the way beyond its end", 0, training.pace.rate, began)
        return True

    def _further(self, way: Way, here: Evaluation, left: float) -> Evaluation:
        looks = self.all_data.looks_within(left, _LOOKS)
        return way.go_on(self.training.parameters, here, self.all_data.look, self.all_data.if_finite, looks)

    def _is_live(self) -> bool:
        """Whether the model is still what was kept last."""
        return self._kept is not None and self.training.batches.agreed(self._kept.is_live())

    def _standing(self) -> tuple[Snapshot, Evaluation, Way]:
        assert self._kept is not None
        assert self.value is not None
        assert self._way is not None
        return self._kept, self.value, self._way

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
        if not self._is_live():
            known, self._kept = self.value, None
            self.value = self.all_data.evaluate()
            if not math.isfinite(self.value.error):
                raise EvaluationError(
                    f"no error of the objective {self.value.value:g} can be proved: nothing could be kept. Begin "
                    "with smaller weights, or use surefoot.evaluate to find the batch"
                )
            self._kept, self._ahead = Snapshot(training.model, training.optimizer), None
            same = known is not None and known.lower <= self.value.upper and self.value.lower <= known.upper
            if known is not None and not same:
                note = "weights or data were changed since the last burst"
            if self._way is None or not same:
                self._way = Way(training.parameters)
                training.pace.lowest = math.inf
        if not self._searched:
            note = training.search(self._standing()[0])
            self._searched = True
        return note

    def _enter(
        self, before: Evaluation, after: Evaluation | None, note: str, count: int, rate: float, began: float
    ) -> None:
        self.ledger.enter(before, after, rate, count, self.training.batches.per_epoch, self.work - began, note)

    def state_dict(self) -> dict[str, Any]:
        """All but the states of model and optimizer."""
        training, way = self.training, self._way
        return {
            "history": [asdict(record) for record in self.ledger.history],
            "value": None if self.value is None else [self.value.value, self.value.error],
            "searched": self._searched,
            "pace": asdict(training.pace),
            "stalls": self.ledger.stalls,
            "origin": None if way is None else way.origin,
            "part": 0.0 if way is None else way.part,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        training, ledger = self.training, self.ledger
        ledger.history, ledger.stalls = [BurstRecord(**record) for record in state["history"]], state["stalls"]
        self.value = None if state["value"] is None else Evaluation(*state["value"])
        self._kept, self._searched = None, state["searched"]
        training.pace = Pace(**state["pace"])
        training.set_rate(training.pace.rate)
        self._way = None
        if state.get("origin") is not None:
            self._way = Way(state["origin"])
            self._way.part = state["part"]
