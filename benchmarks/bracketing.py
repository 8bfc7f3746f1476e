"""The largest number up to which something holds: for scripts of any environment, so that nothing is imported."""

from __future__ import annotations

from collections.abc import Callable


def longest(holds: Callable[[float], bool], guess: float) -> float:
    """To a thousandth from below, from a guess; 0 if it holds nowhere near."""
    low = guess
    while not holds(low):
        low /= 4
        if low < 1e-60 * guess:
            return 0.0
    high = 4 * low
    while holds(high):
        low, high = high, 4 * high
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
