"""The learning rate of bursts, from what became of the last ones: :class:`Pace`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.optim.bursts import BurstRecord

_WIDE = 8.0  # between the rates of the first search
_TRIALS = 14
_NOISE = 1.01  # a trial that ends below that many times its start did no harm
_SHADE = 0.6  # the rate that is best for a few steps is too large for many
_TURN, _SHRINK, _AWAY = math.sqrt(2), 2.0, 1.5
_PATIENCE = 4  # kept bursts after which a rate that failed may be tried again
_SLOWER, _COLLAPSE = 0.6, 0.25  # of the progress per epoch of the burst before: the rate is too large
_EARLY = 3  # kept bursts whose progress is not compared, as it always falls there


@dataclass
class Pace:
    """The next rate.

    Attributes:
        rate: of the next burst.
        cap: what it does not exceed, because a rate above failed.
        since: bursts since then.
        gain: progress per epoch of the last burst: how much the logarithm of the objective fell; 0 if not known.
    """

    rate: float
    cap: float = math.inf
    since: int = 0
    gain: float = 0.0

    def search(self, start: float, judged: Callable[[float], float]) -> int:
        """Look for a rate to begin with: a factor of eight apart until the best is between two, then two apart.

        Args:
            start: how high the loss is before.
            judged: how high it is after a trial at a rate.

        Returns:
            how many were tried.
        """
        found = {self.rate: judged(self.rate)}
        best = self.rate
        while len(found) < _TRIALS:
            best = min(found, key=lambda rate: (found[rate], rate))
            if found[best] >= start:  # too large, or so small that the noise of the judges is all there is
                harmless = found[max(found)] <= start * _NOISE
                further = max(found) * _WIDE if harmless else min(found) / _WIDE
            elif best == max(found):
                further = best * _WIDE
            elif best == min(found):
                further = best / _WIDE
            else:
                break
            found[further] = judged(further)
        found |= {rate: judged(rate) for rate in (best * math.cbrt(_WIDE), best / math.cbrt(_WIDE))}
        self.rate = _SHADE * min(found, key=lambda rate: (found[rate], rate))
        return len(found)

    def adapt(self, record: BurstRecord, history: Sequence[BurstRecord], *, extended: bool) -> None:
        """Go on from a burst.

        Args:
            record: the burst.
            history: those before it.
            extended: whether it went on from one that ended too high.
        """
        before, self.gain = self.gain, 0.0
        if record.kept and not extended and record.after > 0:
            self.gain = math.log(record.before / record.after) / record.epochs
        compared = sum(one.kept for one in history) >= _EARLY and before > 0 and self.gain > 0
        if not record.kept or (compared and self.gain < _COLLAPSE * before):
            self.cap, self.since, self.gain = self.rate / _AWAY, 0, 0.0
            self.rate /= _SHRINK
            return
        self.since += 1
        if self.since > _PATIENCE:
            self.cap = math.inf
        grown = bool(history) and history[-1].rate < record.rate
        if compared and grown and self.gain < _SLOWER * before:
            self.rate /= _TURN
        elif not extended and self.rate * _TURN <= self.cap:
            self.rate *= _TURN


__all__ = ["Pace"]
