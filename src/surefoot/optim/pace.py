"""The learning rate of bursts, from what their epochs show: :class:`Pace`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_WIDE = 8.0  # between the rates of the first search
_TRIALS = 14
_HARMLESS = 1.01  # a trial that ends below that many times its start did no harm
_EARLY = 0.05  # the part of the loss by which a trial is to lower it, if that grows with the rate: where to look next
_STEEP = 1.5  # times what is lost at the smaller rate: more at the larger one says little of the best between
_SHADE = 0.8  # the rate that is best for a few steps is too large for many
_NOISE = 2.0  # what the noise of an epoch is led to
_UP, _ON, _DOWN = 1.5, 1.2, 2.0  # the most by which an epoch changes the rate
_WORSE = 0.7  # the least change after one that ended higher than the lowest before
_SLOW, _FAST = 1.002, 8.0  # an epoch that gains and varies by less was far too slow, and what the rate is then multiplied by
_BELOW, _EASED = 1.4, 1.1  # by how much it then stays below one that ended too high, and how fast that is forgotten


@dataclass
class Pace:
    """The next rate.

    Attributes:
        rate: of the next epoch.
        ceiling: what it does not exceed, since one near it ended too high; it rises with each epoch.
    """

    rate: float
    ceiling: float = math.inf

    def search(self, start: float, judged: Callable[[float], float]) -> int:
        """Look for a rate to begin with: a factor of eight apart until the best is between two others.

        From rates that are far too small it goes on in larger steps, as the decrease is in proportion to them. The
        best is refined to where the parabola through the three, over the logarithm of the rate, is lowest.

        Args:
            start: how high the loss is before.
            judged: how high it is after a trial at a rate.

        Returns:
            how many were tried.
        """
        levels = {self.rate: judged(self.rate)}
        while True:
            best = min(levels, key=lambda rate: (levels[rate], rate))
            below = max((rate for rate in levels if rate < best), default=None)
            above = min((rate for rate in levels if rate > best), default=None)
            if levels[best] > start * _HARMLESS:
                further = best / _WIDE
            elif above is None:
                gain = max(start - levels[best], start / _WIDE**3)
                further = best * min(max(_WIDE, _EARLY * start / gain), _WIDE**3)
            elif above > 2 * _WIDE * best:
                further = _WIDE * best
            elif below is None:
                further = best / _WIDE
            else:
                break
            if len(levels) == _TRIALS:
                break
            levels[further] = judged(further)
        below, above = below or best, above or best
        harmless = max((rate for rate in levels if levels[rate] <= start * _HARMLESS), default=best)
        left, right = (max(min(levels[rate], start) - levels[best], 0.0) for rate in (below, above))
        right = min(right, _STEEP * left)
        shift = (left - right) / (2 * (left + right)) if left > 0 else 0.0
        sure = min(max(start - levels[best], 0.0) / (_EARLY * start), 1.0)
        self.rate = (_SHADE * best * _WIDE**shift) ** sure * (max(harmless, best) / 4) ** (1 - sure)
        return len(levels)

    def adapt(self, noise: float, gain: float, wanted: float = _NOISE, bend: float=0.0) -> None:
        """Go on from an epoch.

        Args:
            noise: how many times higher the loss is at the last weights than at the mean of the weights of its
                last steps, or than the lowest before where there is no mean.
            gain: how many times higher the lowest loss was before the epoch; below 1 if the epoch ended higher.
            wanted: what the noise is led to.
        """
        least, most = 1 / _DOWN, _UP if self.ceiling == math.inf else _ON
        if bend > 0.3:
            most = 1.1
        if bend > 0.75:
            most = 0.8
        if gain < 0.8:
            most = _WORSE
        elif max(noise, gain) < _SLOW:
            least = most = _FAST
        self.rate = min(self.rate * min(most, max(least, wanted / noise if noise > 0 else math.inf)), self.ceiling)
        self.ceiling *= _EASED

    def fail(self, first: float) -> None:
        """Go on from an epoch or a burst that ended too high, and began with this rate."""
        self.rate, self.ceiling = min(self.rate, first / _DOWN), first / _BELOW


__all__ = ["Pace"]
