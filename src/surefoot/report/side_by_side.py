"""Several certificates side by side: ratios to the first finite one, and bars on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.certificate import Certificate
from surefoot.certificate.numbers import log10, power_of_ten, quotient, readable, upper
from surefoot.magnitude import Magnitude
from surefoot.report.growth import Axis

_BEFORE_INFINITY = 88.0  # how far finite bars go, in per cent, where one is infinite


@dataclass(frozen=True)
class Bar:
    """One model: its value, the ratio to the first finite one, and how far its bar goes in per cent."""

    model: str
    value: str
    ratio: str
    width: float
    infinite: bool


@dataclass(frozen=True)
class Quantity:
    """One constant of all models; its bars go from ``low`` to ``high``."""

    symbol: str
    name: str
    bars: list[Bar]
    low: str
    high: str


def comparison(certificates: Sequence[tuple[str, Certificate]]) -> list[Quantity]:
    """The constants of two certificates or more."""
    if len(certificates) < 2:
        return []
    names, constants = zip(*certificates, strict=True)
    return [
        _quantity("m", "bound", names, [c.bound for c in constants]),
        _quantity("ℓ", "Lipschitz constant", names, [c.lipschitz for c in constants]),
        _quantity("L", "smoothness", names, [c.smoothness for c in constants]),
    ]


def ratio(value: Magnitude, reference: Magnitude) -> str:
    """How many times the reference, to three digits; empty where that is no number."""
    times = quotient(value, reference)
    return f"×{readable(times)}" if times else ""


def _quantity(symbol: str, name: str, models: Sequence[str], values: Sequence[Magnitude]) -> Quantity:
    axis = Axis.of(values)
    low = axis.low - 1  # the smallest value has a bar too
    first = next((k for k, value in enumerate(values) if value.is_finite and not value.is_zero), 0)
    bars = [
        Bar(
            model=model,
            value=upper(value),
            ratio="" if k == first else ratio(value, values[first]),
            width=_width(log10(value), low, axis.high, _BEFORE_INFINITY if axis.has_infinity else 100.0),
            infinite=not value.is_finite,
        )
        for k, (model, value) in enumerate(zip(models, values, strict=True))
    ]
    return Quantity(symbol, name, bars, power_of_ten(int(low)), power_of_ten(int(axis.high)))


def _width(log: float, low: float, high: float, room: float) -> float:
    if math.isinf(log):
        return 100.0 if log > 0 else 0.0
    return round(room * (log - low) / (high - low), 2)


__all__ = ["Bar", "Quantity", "comparison", "ratio"]
