"""The learning rate of bursts, from what their epochs show: :class:`Pace`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_WIDE = 8.0  # between the rates of the first search
_TRIALS = 14
_HARMLESS = 1.01  # a trial that ends below that many times its start did no harm
_STEEP = 1.5  # times what is lost at the smaller rate: more at the larger one says little of the best between
_SHADE = 0.8  # the rate that is best for a few steps is too large for many
_NOISE = 1.5  # what the noise of an epoch is led to
_UP, _DOWN = 1.5, 2.0  # the most by which an epoch changes the rate


@dataclass
class Pace:
    """The next rate.

    Attributes:
        rate: of the next epoch.
    """

    rate: float

    def search(self, start: float, judged: Callable[[float], float]) -> int:
        """Look for a rate to begin with: a factor of eight apart until the best is between two others.

        It is refined to where the parabola through the three, over the logarithm of the rate, is lowest.

        Args:
            start: how high the loss is before.
            judged: how high it is after a trial at a rate.

        Returns:
            how many were tried.
        """
        levels = {self.rate: judged(self.rate)}
        best = self.rate
        while len(levels) < _TRIALS:
            best = min(levels, key=lambda rate: (levels[rate], rate))
            if levels[best] >= start:  # too large, or so small that the noise of the judges is all there is
                harmless = levels[max(levels)] <= start * _HARMLESS
                further = max(levels) * _WIDE if harmless else min(levels) / _WIDE
            elif best == max(levels):
                further = best * _WIDE
            elif best == min(levels):
                further = best / _WIDE
            else:
                break
            levels[further] = judged(further)
        below = max((rate for rate in levels if rate < best), default=best)
        above = min((rate for rate in levels if rate > best), default=best)
        left, right = (max(min(levels[rate], start) - levels[best], 0.0) for rate in (below, above))
        right = min(right, _STEEP * left)
        shift = (left - right) / (2 * (left + right)) if left > 0 else 0.0
        self.rate = _SHADE * best * _WIDE**shift
        return len(levels)

    def adapt(self, noise: float) -> None:
        """Go on from an epoch.

        Args:
            noise: how many times higher the loss is at the last weights than at the mean of the weights of its
                last steps, or than the lowest before where there is no mean.
        """
        self.rate *= min(_UP, max(1 / _DOWN, _NOISE / noise if noise > 0 else math.inf))

    def fail(self, first: float) -> None:
        """Go on from an epoch or a burst that ended too high, and began with this rate."""
        self.rate = min(self.rate, first / _DOWN)


__all__ = ["Pace"]
