"""Norms of derivatives, of a whole and of the parts of all samples, and bounds of bilinear forms made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from surefoot.magnitude import Magnitude, minimum

_ZERO = Magnitude.zero()


@dataclass(frozen=True)
class Part:
    """A norm, and the norms of the parts of all samples, where these are told apart."""

    whole: Magnitude
    samples: Magnitude | None = None

    def __add__(self, other: Part) -> Part:
        return Part(self.whole + other.whole, _both(self, other, lambda a, b: a + b))

    def least(self, other: Part) -> Part:
        """The smaller of two bounds of the same."""
        samples = _both(self, other, minimum)
        whole = minimum(self.whole, other.whole)
        return Part(whole if samples is None else minimum(whole, samples.norm()), samples)

    def times(self, factor: Magnitude | float) -> Part:
        """With every norm multiplied."""
        return Part(self.whole * factor, None if self.samples is None else self.samples * factor)

    def each(self, count: int) -> Magnitude:
        """The size for every sample: at most that of the whole."""
        full = Magnitude(np.full(count, self.whole.log2))
        return full if self.samples is None else minimum(self.samples, full)


def _both(a: Part, b: Part, combine: Callable[..., Magnitude]) -> Magnitude | None:
    if a.samples is None and b.samples is None:
        return None
    count = len(a.samples if a.samples is not None else b.samples)  # type: ignore[arg-type]
    return combine(a.each(count), b.each(count))


NOTHING = Part(_ZERO)


@dataclass(frozen=True)
class Moving:
    """Bounds of a matrix of derivatives."""

    centre: Part  # at the centre
    change: Part  # how far it moves over the ball
    domain: Part  # over the ball
    stride: Part = NOTHING  # how long its way is, at most, when the variables go straight through the outer shell
    path: Part = NOTHING  # the same from the centre to the edge


@dataclass
class Bilinear:
    """A bilinear form: between variables v of norm t and w, a sum of ``inner`` |v||w| and of |v_s||w| for some."""

    inner: Magnitude = _ZERO
    by_variable: dict[str, Magnitude] = field(default_factory=dict)
    along: dict[str, Magnitude] = field(default_factory=dict)

    def add(self, amount: Magnitude, variable: str | None = None) -> None:
        """Between all variables, or between one and all."""
        if variable is None:
            self.inner = self.inner + amount
        else:
            self.by_variable[variable] = self.by_variable.get(variable, _ZERO) + amount

    def add_along(self, amount: Magnitude, variable: str) -> None:
        """Between all variables, times the part of this one in a third vector of norm one."""
        self.along[variable] = self.along.get(variable, _ZERO) + amount

    @property
    def norm(self) -> Magnitude:
        """With |v| = |w| = 1: each variable occurs with v and with w."""
        total = self.inner
        for amounts, factor in ((self.by_variable, 2.0), (self.along, 1.0)):
            sizes = (
                Magnitude(np.array([float(a.log2) for a in amounts.values()])) if amounts else Magnitude.zero((1,))
            )
            total = total + sizes.norm() * factor
        return total
