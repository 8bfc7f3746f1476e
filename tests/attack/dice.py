"""Random choices from a seed."""

from __future__ import annotations

import random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """What a network is drawn with. Equal seeds make equal choices."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def whole(self, low: int, high: int) -> int:
        """A whole number between the two, both included."""
        return self._random.randint(low, high)

    def one_of(self, *choices: T) -> T:
        """One of the choices."""
        return self._random.choice(choices)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability

    def divisor(self, number: int) -> int:
        """A divisor of a number."""
        return self.one_of(*(k for k in range(1, number + 1) if number % k == 0))

    def between(self, low: float, high: float) -> float:
        """A real number between the two."""
        return self._random.uniform(low, high)
