r"""Proved suprema of :math:`|f^{(k)}|` over an interval, by branch and bound.

Every cell of a partition of the interval has an enclosure (:mod:`surefoot.scalar.enclosure`); the largest
upper end bounds the supremum. The cell it belongs to is split until it exceeds the largest value found at some
point by a relative 5e-8 at most, or until a fixed number of cells has been looked at: then the bound is valid
but less sharp.

>>> from surefoot.scalar.function import ScalarFunction
>>> gelu = ScalarFunction.named("gelu")
>>> round(supremum(gelu, 1), 5), round(supremum(gelu, 2), 5)
(1.1289, 0.79788)
>>> supremum(ScalarFunction.named("relu"), 2), supremum(ScalarFunction.named("relu"), 2, 0.5, 2.0)
(inf, 0.0)
"""

from __future__ import annotations

import heapq
import json
import math
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise

from flint import arb

from surefoot.scalar.enclosure import Cell, doubles_at, downwards, kinks, upwards
from surefoot.scalar.function import ScalarFunction

TOLERANCE = 5e-8
MAXIMUM_CELLS = 4000
FARTHEST = 1e18  # half lines that begin beyond it are not split;
FARTHEST_UNBOUNDED = 1e6  # sooner, if there seems to be no bound
HIGHEST_ORDER = 5


@lru_cache(maxsize=65536)
def supremum(function: ScalarFunction, order: int, low: float = -math.inf, high: float = math.inf) -> float:
    """An upper bound of the supremum of |f^(order)| over [low, high], ``inf`` if there is none.

    For order >= 1 this is the Lipschitz constant of f^(order - 1): jumps of f^(order - 1) in the interval, its
    ends included, make it infinite; jumps of f^(order) do not. Points where f is not defined or not
    differentiable, such as 0 for log and sqrt, make it infinite, too.
    """
    everywhere = (low, high) == (-math.inf, math.inf) and order in range(HIGHEST_ORDER + 1)
    if everywhere and function in _shipped():
        return _shipped()[function][order]
    return _peak(function, order, float(low), float(high), (1, -1))


@cache
def _shipped() -> dict[ScalarFunction, list[float]]:
    """The suprema over the real line, of all orders, of the activations of torch.nn with their default parameters.

    They were computed in advance by this module; a test computes them again.
    """
    rows = json.loads(files("surefoot.scalar").joinpath("constants.json").read_text())
    return {ScalarFunction.named(row["name"], **row["parameters"]): row["suprema"] for row in rows}


@lru_cache(maxsize=65536)
def value_range(function: ScalarFunction, low: float = -math.inf, high: float = math.inf) -> tuple[float, float]:
    """Numbers (a, b) with a <= f(x) <= b for every x in [low, high]; infinite if f is not bounded there."""
    low, high = float(low), float(high)
    return 0.0 - _peak(function, 0, low, high, (-1,)), _peak(function, 0, low, high, (1,))


def _peak(function: ScalarFunction, order: int, low: float, high: float, signs: tuple[int, ...]) -> float:
    """An upper bound of the supremum of s f^(order)(x) over s in ``signs`` and x in [low, high]."""
    if order not in range(HIGHEST_ORDER + 1) or not low <= high or low == math.inf or high == -math.inf:
        raise ValueError(
            f"expected an order from 0 to {HIGHEST_ORDER} and an interval low <= high, "
            f"got order {order} and [{low}, {high}]"
        )
    slack = 1e-12 if len(signs) == 1 else 0.0  # a signed supremum may be zero
    # suprema approached at infinity: look there first
    probes = [side * 2.0**n for n in range(4, 64, 4) for side in (1, -1) if math.isinf(low if side < 0 else high)]
    values = (Cell(function, probe, probe).value(order) for probe in probes if low <= probe <= high)
    attained = max((_least(value, signs) for value in values), default=-math.inf)
    settled = -math.inf
    heap: list[tuple[float, float, int, Cell]] = []
    waiting = _partition(function, low, high)
    parent, looked_at = math.inf, 0
    while True:
        for ends in waiting:
            cell = Cell(function, *ends)
            looked_at += 1
            attained = max(attained, _least(cell.value(order), signs))
            top = min(parent, _most(cell.range(order), signs))
            width = cell.high - cell.low
            # equal bounds: the widest cell first; infinite ones: the narrowest, to find out soon if it is true
            heapq.heappush(heap, (-top, -width if top < math.inf else width, looked_at, cell))
        top = -heap[0][0] if heap else settled
        if top <= settled or top <= attained + TOLERANCE * abs(attained) + slack or looked_at > MAXIMUM_CELLS:
            return max(top, settled)
        cell = heapq.heappop(heap)[-1]
        if not cell.value(order)[0].is_finite():
            return math.inf
        extremes, waiting, parent = cell.range_by_ends(order), [], top
        for extreme in extremes:
            attained = max(attained, _least(extreme, signs))
            settled = max(settled, min(top, _most(extreme, signs)))
        if not extremes:
            waiting = cell.split(FARTHEST if top < math.inf else FARTHEST_UNBOUNDED)
            settled = settled if waiting else max(settled, top)


def _most(ends: tuple[arb, arb], signs: tuple[int, ...]) -> float:
    """At least s y for every y between the ends."""
    return max(upwards(ends[1] if sign > 0 else -ends[0]) for sign in signs)


def _least(ends: tuple[arb, arb], signs: tuple[int, ...]) -> float:
    """At most the largest s y, whichever y between the ends it is."""
    return max(downwards(ends[0] if sign > 0 else -ends[1]) for sign in signs)


def _partition(function: ScalarFunction, low: float, high: float) -> list[tuple[float, float]]:
    """Cells that cover [low, high], such that known kinks are ends of cells, and each of these kinks.

    A kink that is not a double is between two neighbouring doubles, so inside a cell that does count it.
    """
    cuts = [-8.0, 8.0]
    points = []
    for near in map(doubles_at, kinks(function)):
        cuts += near
        points += [(near[0], near[0])] if len(near) == 1 and low <= near[0] <= high else []
    ends = [low, *sorted({cut for cut in cuts if low < cut < high}), high]
    return [*pairwise(ends), *points]
