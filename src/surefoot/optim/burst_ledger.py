"""What became of the bursts of a training: :class:`Ledger`."""

from __future__ import annotations

import math

from surefoot.optim.bursts import BurstRecord
from surefoot.optim.by_evaluation import speak_of_stall
from surefoot.valuation.valuer import Evaluation

_STALLED = 2


class Ledger:
    """One record per burst, and what they say together."""

    def __init__(self) -> None:
        self.history: list[BurstRecord] = []
        self.stalls = 0  # bursts in a row that were not kept

    @property
    def work(self) -> float:
        """Of all bursts, in training epochs."""
        return sum(record.work for record in self.history)

    def enter(
        self,
        before: Evaluation,
        after: Evaluation | None,
        rate: float,
        batches: int,
        epochs: float,
        work: float,
        note: str,
    ) -> None:
        """A burst, with its evaluations; the later one is ``None`` if it is not finite."""
        kept = after is not None and after.upper < before.lower
        if not kept:
            same = after is not None and after.lower <= before.upper
            why = "lower cannot be told from round-off" if same else "not lower"
            note = "; ".join(filter(None, (note, "the loss was not finite" if after is None else why)))
        values = before.value, before.error, after.value if after else math.inf, after.error if after else 0.0
        self.history.append(BurstRecord(len(self.history), *values, rate, kept, batches, epochs, work, note))
        if kept or batches:
            self.stalls = 0 if kept else self.stalls + 1

    def speak_of_stalls(self, rate: float) -> None:
        """Warn once, when as many bursts as that were not kept."""
        if self.stalls == _STALLED and self.history[-1].batches:
            speak_of_stall(
                f"{_STALLED} bursts in a row were not kept ({self.history[-1].note}); the rate is now "
                f"{rate:.2g}. If it goes on, the training is at the noise of its mini-batches: use larger "
                "ones, or surefoot.CertifiedDescent on all data"
            )

    @property
    def guarantee(self) -> str:
        """What is proved, in words."""
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
