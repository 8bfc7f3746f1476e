"""The learning rate of bursts, from what their epochs show: :class:`Pace`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_WIDE = 8.0  # between the rates of the first search
_TRIALS = 14
_HARMLESS = 1.01  # a trial that ends below that many times its start did no harm
_EARLY = 0.05  # the part of the loss by which a trial is to lower it, if that grows with the rate
_STEEP = 1.5  # times what is lost at the smaller rate: more at the larger one says little of the best between
_WARY = 4.0  # how far below the largest harmless rate to begin where trials hardly lower the loss
_SHADE = 0.8  # the rate that is best for a few steps is too large for many
_NOISE, _COOL = 2.5, 1.2  # what the noise of an epoch is led to, and near the end
_UP, _AGAIN, _DOWN = 1.5, 1.3, 2.0  # the most by which an epoch changes it: up, up after a failure, down
_STRAIGHT, _WARY_UP, _WARY_AGAIN = 0.2, 1.2, 1.15  # with more bend it grows more slowly, and so after a failure
_BENT, _BENT_UP = 0.35, 1.1  # with that much bend it grows by 1.1 at most
_HALF_BENT, _TOO_BENT = 0.5, 0.6  # with that much it stays, and with that much it falls
_LESS = 0.8  # the least fall, with too much bend, or where the loss is higher than the lowest by as much
_GAIN, _PATIENCE = 1.1, 3  # so many epochs with less gain, the last on a bent way: too large
_LATE = 0.85  # what the rate falls by, at least, near the end, unless the way is straight
_SLOW, _FAST = 1.002, 4.5  # an epoch with less gain and noise was far too slow: the rate is multiplied by that
_FALL, _MOST = 1.25, 4.0  # what a rate is divided by after a failure, squared with each one that follows, the most
_BELOW, _EASED = 1.2, 1.1  # how far below a rate that failed the rate stays, and how fast that is forgotten


@dataclass
class Pace:
    """The next rate.

    Attributes:
        rate: of the next epoch.
        ceiling: what it does not exceed, since one near it ended too high; it rises with each epoch.
        idle: for how many epochs there has been hardly any gain.
        good: that of the last epoch that ended lowest, or what it was lowered to since then.
        fall: what it is divided by after the next failure.
    """

    rate: float
    ceiling: float = math.inf
    idle: int = 0
    good: float = 0.0
    fall: float = _FALL

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
            if levels[best] >= start:  # too large, or so small that the noise of the judges is all there is
                if min(levels.values()) <= start * _HARMLESS < levels[max(levels)]:
                    break
                far = levels[max(levels)] <= start * _HARMLESS
                further = max(levels) * _WIDE if far else min(levels) / _WIDE
            elif above is None:
                further = best * min(max(_WIDE, _EARLY * start / (start - levels[best])), _WIDE**3)
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
        rate = (_SHADE * best * _WIDE**shift) ** sure * (max(harmless, best) / _WARY) ** (1 - sure)
        self.rate = float(f"{rate:.3g}")  # the same however losses are rounded
        return len(levels)

    def adapt(self, noise: float, gain: float, bend: float = 0.0, *, late: bool = False) -> None:
        """Go on from an epoch.

        A rate without noise wastes time, one whose noise dominates gets nowhere: the rate is multiplied by
        2.5/noise, within 1/2 and 1.5. It grows faster on a straight way, hardly on a bent one, and falls with too
        much bend: rates that are too large at the beginning do damage that is not made good. After three epochs
        with hardly any gain, on a bent way, it is halved.

        Args:
            noise: how many times higher the loss is at the last weights than at the mean of its last weights.
            gain: how many times higher the lowest loss of epochs before was.
            bend: how much of the decrease that gradients promise was lost to curvature.
            late: whether training is about to end.
        """
        self.idle = 0 if gain > _GAIN else self.idle + 1
        if gain > 1:
            self.good, self.fall = self.rate, _FALL
        if self.idle >= _PATIENCE and bend > _BENT and not late:
            self.fall = _DOWN
            self.fail(self.rate)
            self.fall = _FALL
            return
        least, most = 1 / _DOWN, _UP if self.ceiling == math.inf else _AGAIN
        if max(noise, gain) < _SLOW <= _SLOW * gain and bend < _STRAIGHT / 10:
            least = most = _FAST
        if bend > _STRAIGHT:
            most = min(most, _WARY_UP if self.ceiling == math.inf else _WARY_AGAIN)
        elif gain > _GAIN:
            self.ceiling *= _AGAIN
        if bend > _BENT:
            most = min(most, _BENT_UP if gain > _BENT_UP and bend <= _HALF_BENT else 1.0)
        if bend > _TOO_BENT or gain < _LESS:
            most = min(most, _LESS)
        if late:
            most = min(most, _AGAIN if bend < _STRAIGHT else _LATE)
        factor = (_COOL if late else _NOISE) / noise if noise > 0 else math.inf
        self.rate = min(self.rate * min(most, max(least, factor)), self.ceiling)
        self.ceiling *= _EASED

    def fail(self, first: float) -> None:
        """Go on from an epoch or a burst that ended too high, and began with this rate.

        One spike is no reason to go on much more slowly, several in a row are. Rates that fell while the loss was
        high say little of what is best where it was low.
        """
        self.rate = self.good = max(min(self.rate, first / self.fall), self.good / self.fall)
        self.ceiling, self.idle = max(first, self.rate * self.fall) / _BELOW, 0
        self.fall = min(self.fall**2, _MOST)
