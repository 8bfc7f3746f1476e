"""The learning rate of bursts: where it begins, and how it goes on from epoch to epoch (:class:`Pace`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

_WIDE = 4.0  # between rates that are tried
_TRIALS = 10
_UP, _DOWN = 1.25, 0.7  # what the rate is multiplied by after an epoch that is lower than all, and after another
_HALF = 0.5  # the same after an epoch that did damage
_FAR = 4.0  # an epoch did damage if its mean loss is that many times the lowest
_PATIENCE = 3  # so many epochs in a row that are not lower are undone


class Verdict(Enum):
    """What an epoch of training is worth."""

    LOWER = auto()  #: its mean loss is lower than that of all before
    HIGHER = auto()  #: it is not, which may be noise
    BACK = auto()  #: training goes back to the lowest


@dataclass
class Pace:
    """The next rate.

    A rate that is too small wastes time, and one that is too large does damage; which is which changes as training
    goes on. So rates are led by success: an epoch whose mean loss is lower than all before raises the rate, and
    any other lowers it. It stays where three of five epochs are lower, as 1.25³ · 0.7² ≈ 1. (Evolution strategies
    adapt their steps so: Rechenberg's rule of success, 1973.) Damage does not heal by itself: an epoch at four
    times the lowest loss is undone and the rate is halved, and after three epochs in a row that are not lower
    training goes back to the lowest.

    Attributes:
        rate: of the next epoch.
        lowest: the lowest mean loss of an epoch so far.
        misses: how many epochs in a row were not lower.
    """

    rate: float
    lowest: float = math.inf
    misses: int = 0

    @property
    def limit(self) -> float:
        """The mean loss beyond which an epoch does damage. Losses that may be negative have none."""
        return _FAR * self.lowest if self.lowest > 0 else math.inf

    def judge(self, level: float) -> Verdict:
        """Go on from an epoch with this mean loss, infinite if it was broken off."""
        if level > self.limit or level == math.inf:
            self.rate, self.misses = self.rate * _HALF, 0
            return Verdict.BACK
        if level < self.lowest:
            self.rate, self.lowest, self.misses = self.rate * _UP, level, 0
            return Verdict.LOWER
        self.rate, self.misses = self.rate * _DOWN, self.misses + 1
        if self.misses < _PATIENCE:
            return Verdict.HIGHER
        self.misses = 0
        return Verdict.BACK

    def fail(self, first: float, lowest: float) -> None:
        """Go on from a burst that was undone, and began with this rate and with this lowest mean loss."""
        self.rate, self.lowest, self.misses = _HALF * min(self.rate, first), lowest, 0


def best_rate(first: float, start: float, judged: Callable[[float], float]) -> tuple[float, int]:
    """The rate with the lowest loss after a trial, of rates a factor of four apart, and how many were tried.

    Args:
        first: what to try first; then larger and smaller ones until the best is between two others.
        start: the loss before.
        judged: the loss after a trial at a rate.
    """
    levels = {first: judged(first)}
    while len(levels) < _TRIALS:
        best = min(levels, key=lambda rate: (levels[rate], rate))
        if best == max(levels) and levels[best] <= start:
            further = best * _WIDE
        elif best == min(levels):
            further = best / _WIDE
        else:
            break
        levels[further] = judged(further)
    return min(levels, key=lambda rate: (levels[rate], rate)), len(levels)
