"""A scalar function enclosed on a grid of cells that covers the real line: the data behind a table.

Around 0 there are cells of equal width, further out 8 per octave, at last two half lines.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from flint import arb

from surefoot.scalar.cell import FACTORIAL, Cell, downwards, ends_of, upwards
from surefoot.scalar.enclosure import doubles_at, kinks
from surefoot.scalar.function import ScalarFunction
from surefoot.scalar.tails import LENGTH

HALF = 512  # cells of equal width on either side of 0
PER_OCTAVE = 8  # cells in [2^n, 2^(n+1)] beyond them
FARTHEST = 60  # the half lines begin at 2^60
_UNIT = 2.0**-53
_TINY = 1e-300


class Grid:
    """The enclosures of one function on all cells.

    The line is divided into buckets, in order: the half line to the left, ``outer`` cells of shrinking width,
    2 ``HALF`` cells of width ``step``, a power of two, that end at 2 ** ``exponent``, and the same mirrored. A
    bucket with kinks inside is several cells, of which ``first`` is the index of the first; ``extra`` is the
    largest number of the others, and ``right`` are the right ends of the cells.
    """

    def __init__(self, function: ScalarFunction) -> None:
        self.step = _step(function)
        self.exponent = math.frexp(HALF * self.step)[1] - 1
        self.outer = (FARTHEST - self.exponent) * PER_OCTAVE
        growing = [
            2.0 ** (self.exponent + n // PER_OCTAVE) * (1 + n % PER_OCTAVE / PER_OCTAVE)
            for n in range(self.outer + 1)
        ]
        equal = [n * self.step for n in range(1 - HALF, HALF)]
        buckets = [-math.inf, *(-edge for edge in reversed(growing)), *equal, *growing, math.inf]
        marks = [doubles_at(kink) for kink in kinks(function)]
        self.kinks = [Cell(function, near[0], near[0]) for near in marks if len(near) == 1]
        edges = sorted({*buckets, *(mark for near in marks for mark in near if abs(mark) < growing[-1])})
        self.first = np.searchsorted(edges, buckets[:-1])
        self.extra = int(np.diff([*self.first, len(edges) - 1]).max()) - 1
        self.right = np.array(edges[1:])
        self._enclose([Cell(function, *ends) for ends in pairwise(edges)])

    def _enclose(self, cells: list[Cell]) -> None:
        """Tabulate midpoints, half widths and smoothness, values at the midpoints and ranges over the cells.

        The values are rounded to the nearest doubles, the ranges outwards.
        """
        self.smoothness = np.array([cell.smoothness for cell in cells])
        self.centre = np.array([0.0 if cell.is_tail else cell.middle for cell in cells])
        self.half = np.array([math.inf if cell.is_tail else cell.radius for cell in cells])
        numbers = np.array([_numbers(cell) for cell in cells]).reshape(len(cells), 4, LENGTH)
        value, radius, self.low, self.high = np.ascontiguousarray(numbers.transpose(1, 2, 0))
        error = radius + 2 * _UNIT * np.abs(value)
        self.known = np.isfinite(value) & np.isfinite(error) & np.isfinite(self.half)
        self.value, self.error = np.where(self.known, value, 0.0), np.where(self.known, error, np.inf)
        for order in reversed(range(LENGTH)):
            self._sharpen(order)

    def _sharpen(self, order: int) -> None:
        """Replace the range of a derivative by that of Taylor's formula around the midpoint where that is less."""
        unknown = self.smoothness < order
        self.low[order, unknown], self.high[order, unknown] = -np.inf, np.inf
        slope, bend, error = self._taylor(order)
        with np.errstate(invalid="ignore", over="ignore"):
            reach = (np.abs(slope) * self.half + bend * self.half**2) * (1 + 16 * _UNIT) + error
            low, high = self.value[order] - reach, self.value[order] + reach
        self.low[order] = np.fmax(self.low[order], low)
        self.high[order] = np.fmin(self.high[order], high)

    def _taylor(self, order: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slope, half of the largest bend and error of Taylor's formula; the error is infinite where it fails.

        The slope itself is left out at the last order but one, and the formula fails at the last one.
        """
        nothing = np.zeros(len(self.half))
        if order + 1 >= LENGTH:
            return nothing, nothing, nothing + np.inf
        exact = order + 2 < LENGTH
        slope = self.value[order + 1] if exact else nothing
        size = np.maximum(-self.low[order + 1 + exact], self.high[order + 1 + exact])
        bend = size / 2 if exact else nothing
        with np.errstate(invalid="ignore", over="ignore"):
            rest = nothing if exact else size * self.half
            whole = np.abs(self.value[order]) + np.abs(slope) * self.half + bend * self.half**2 + rest
            error = self.error[order] + exact * self.error[order + 1] * self.half + rest + 32 * _UNIT * whole
        usable = (self.smoothness >= order + 1 + exact) & self.known[order] & np.isfinite(error)
        error = np.where(whole == 0, error, error + _TINY)
        return np.where(usable, slope, 0.0), np.where(usable, bend, 0.0), np.where(usable, error, np.inf)

    def columns(self, order: int, fold: str) -> list[np.ndarray]:
        """Per cell: midpoint, half width, value, slope, half the largest bend, error, bound on the cell."""
        half = np.minimum(self.half, np.finfo(np.float64).max)
        bound = _fold(self.low[order], self.high[order], fold)
        return [self.centre, half, self.value[order], *self._taylor(order), bound]

    def kink_bounds(self, order: int, fold: str) -> list[tuple[float, float]]:
        """The exactly known kinks and the bounds there."""
        bounds = []
        for cell in self.kinks:
            low, high = cell.range(order)
            bounds.append((cell.low, float(_fold(downwards(low), upwards(high), fold))))
        return bounds


def _fold(low: np.ndarray | float, high: np.ndarray | float, fold: str) -> np.ndarray:
    """The largest of what the fold makes of the numbers between low and high."""
    return {"absolute": np.maximum(-low, high), "most": np.asarray(high), "least": np.asarray(-low)}[fold]


def _numbers(cell: Cell) -> list[float]:
    """Middle and radius of the values at the midpoint, lower and upper ends over the cell, for each order."""
    centre = [cell.centre[order] * FACTORIAL[order] for order in range(LENGTH)]
    if cell.is_tail:
        ends = [cell.wide[order].times(FACTORIAL[order]).limits() for order in range(LENGTH)]
    else:
        ends = [ends_of(cell.wide[order] * FACTORIAL[order]) for order in range(LENGTH)]
    return [
        *(float(ball) if ball.is_finite() else math.nan for ball in centre),
        *(_radius(ball) for ball in centre),
        *(min(downwards(low), -_TINY) if low < 0 else downwards(low) for low, _ in ends),
        *(max(upwards(high), _TINY) if high > 0 else upwards(high) for _, high in ends),
    ]


def _radius(ball: arb) -> float:
    """The radius; at least a tiny number if the ball is not exactly zero, since doubles underflow."""
    return 0.0 if ball == 0 else max(float(ball.rad()), _TINY) if ball.is_finite() else math.nan


def _step(function: ScalarFunction) -> float:
    """The width of the cells around 0: 1/32, or less if the function varies on a smaller scale.

    The scale is that on which the second derivative changes: the quotient of its size and that of the third
    one, at some points, to a power of two. It affects how sharp the bounds are, not that they are bounds.
    """
    sizes = [0.0, 0.0]
    for exponent in range(-20, 5):
        for point in (2.0**exponent, -(2.0**exponent)):
            centre = Cell(function, point, point).centre
            for index, order in enumerate((2, 3)):
                size = abs(float(centre[order])) * FACTORIAL[order]
                sizes[index] = max(sizes[index], size if math.isfinite(size) else 0.0)
    scale = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
    return 2.0 ** (max(-20, min(0, round(math.log2(scale)))) - 5)
