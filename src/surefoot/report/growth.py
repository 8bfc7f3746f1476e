"""Where the curves of m, ℓ and L go: geometry on a logarithmic axis, for numbers of any size.

Zero and infinity have no place on such an axis, so each has a lane, below and above it. The horizontal unit is one
operation, so that the drawing can be stretched to any width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from surefoot.certificate.numbers import log10, power_of_ten, readable
from surefoot.certificate.rows import Row
from surefoot.magnitude import Magnitude

HEIGHT = 320
_MARGIN, _LANE = 14.0, 30.0
_MOST_TICKS, _MOST_BANDS, _MOST_DOTS = 7, 12, 90
_LETTER, _NARROW, _WIDE = 7.0, 250.0, 800.0  # widths in pixels: a letter, the plot on a phone and on a desktop


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis: decimal logarithms from ``low`` to ``high``, with lanes for zero and infinity."""

    low: float
    high: float
    has_zero: bool
    has_infinity: bool

    @classmethod
    def of(cls, values: Sequence[Magnitude]) -> Axis:
        """The axis that holds all these values."""
        logs = [log10(value) for value in values]
        finite = [x for x in logs if math.isfinite(x)] or [0.0]
        low, high = math.floor(min(finite)), math.ceil(max(finite))
        return cls(low, max(high, low + 1), -math.inf in logs, math.inf in logs)

    @property
    def ends(self) -> tuple[float, float]:
        """The heights of ``high`` and ``low``."""
        return (
            _MARGIN + (_LANE if self.has_infinity else 0.0),
            HEIGHT - _MARGIN - (_LANE if self.has_zero else 0.0),
        )

    def height(self, value: float) -> float:
        """The distance of a logarithm from the top."""
        if math.isinf(value):
            return _MARGIN if value > 0 else HEIGHT - _MARGIN
        top, bottom = self.ends
        return round(top + (bottom - top) * (self.high - value) / (self.high - self.low), 2)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Heights and labels of the lines of the grid."""
        span = self.high - self.low
        step = _round_number(max(span / _MOST_TICKS, 1.0))
        first = math.ceil(self.low / step)
        exponents = [(first + k) * step for k in range(int(span / step) + 1) if (first + k) * step <= self.high]
        marks = [(self.height(x), _power(x)) for x in exponents]
        lanes = [(_MARGIN, "∞")] * self.has_infinity + [(HEIGHT - _MARGIN, "0")] * self.has_zero
        return lanes + marks


def _round_number(least: float) -> float:
    """The first of 1, 2, 5 and 10 times a power of ten that is not less than a number."""
    decade = 10.0 ** math.floor(math.log10(least))
    return next(decade * k for k in (1, 2, 5, 10) if decade * k >= least)


def _power(exponent: float) -> str:
    return power_of_ten(int(exponent)) if abs(exponent) < 1e6 else f"10^({readable(f'{exponent:.0e}')})"


@dataclass(frozen=True)
class Curve:
    """One quantity: the lines through its values, and dots if there is room for them."""

    symbol: str
    name: str
    line: str
    dots: str


@dataclass(frozen=True)
class Band:
    """The operations of one part of the model."""

    name: str
    start: float
    width: float
    fits: bool  # whether there is room for the name on a desktop
    fits_narrow: bool  # whether there is room for the name on a phone
    odd: bool


@dataclass(frozen=True)
class Curves:
    """The drawing: values at places between 0 and ``width``."""

    places: list[float]
    width: float
    axis: Axis
    curves: tuple[Curve, ...]
    bands: tuple[Band, ...]
    height: int = HEIGHT

    @property
    def count(self) -> int:
        """The number of values of each curve."""
        return len(self.places)


Quantity = tuple[str, str, Sequence[Magnitude | None]]


def curves(rows: Sequence[Row]) -> Curves | None:
    """The curves of a table, operation by operation; ``None`` for fewer than two operations."""
    quantities: list[Quantity] = [
        ("m", "bound", [row.bound for row in rows]),
        ("ℓ", "Lipschitz", [row.lipschitz for row in rows]),
        ("L", "smoothness", [row.smoothness for row in rows]),
    ]
    places = [k + 0.5 for k in range(len(rows))]
    return drawn(quantities, places, len(rows), _bands(rows)) if len(rows) > 1 else None


def drawn(
    quantities: Sequence[Quantity], places: list[float], width: float, bands: tuple[Band, ...] = ()
) -> Curves:
    """Curves of any quantities; a value of ``None`` is a gap."""
    axis = Axis.of([value for _, _, values in quantities for value in values if value is not None])
    lines = tuple(_curve(symbol, name, values, places, axis) for symbol, name, values in quantities)
    return Curves(places, width, axis, lines, bands)


def _curve(
    symbol: str, name: str, values: Sequence[Magnitude | None], places: Sequence[float], axis: Axis
) -> Curve:
    """The curve of one quantity; neighbouring values are joined if both are on the axis or both in one lane."""
    logs = [math.nan if value is None else log10(value) for value in values]
    line, dots = [], []
    for lane, members in groupby(
        zip(places, logs, strict=True), key=lambda place: 0.0 if math.isfinite(place[1]) else repr(place[1])
    ):
        if lane == "nan":
            continue
        run = [(x, axis.height(log)) for x, log in members]
        line.append("M" + "L".join(f"{x:g} {y:g}" for x, y in run))
        if len(values) <= _MOST_DOTS or len(run) == 1:
            dots += [f"M{x:g} {y:g}h0" for x, y in run]
    return Curve(symbol, name, "".join(line), "".join(dots))


def ticks(width: float) -> tuple[Band, ...]:
    """Round numbers along an axis from 0 to ``width``, as bands without width."""
    step = _round_number(width / 4)
    marks = [k * step for k in range(int(width / step) + 1)]
    return tuple(Band(f"{x:g}", 100 * x / width, 0.0, True, True, False) for x in marks)


def _bands(rows: Sequence[Row]) -> tuple[Band, ...]:
    """The parts of the model, as fine as twelve bands allow."""
    paths = [tuple(row.module.split(".")) for row in rows]
    runs = _runs(paths, 1)
    for depth in range(2, max(map(len, paths)) + 1):
        finer = _runs(paths, depth)
        if len(finer) > _MOST_BANDS:
            break
        runs = finer
    bands, start = [], 0
    for k, (path, length) in enumerate(runs):
        name = ".".join(path)
        part, needed = length / len(rows), (len(name) + 1) * _LETTER
        fits = part * _WIDE > needed, part * _NARROW > needed
        bands.append(Band(name, 100 * start / len(rows), 100 * part, *fits, k % 2 == 1))
        start += length
    return tuple(bands)


def _runs(paths: Sequence[tuple[str, ...]], depth: int) -> list[tuple[tuple[str, ...], int]]:
    return [(path, len(list(members))) for path, members in groupby(path[:depth] for path in paths)]
