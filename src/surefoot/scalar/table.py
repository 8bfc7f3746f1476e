r"""Suprema of :math:`|f^{(k)}|` over as many intervals as a tensor has entries.

Once per function, the line is cut into some thousand cells, known kinks being ends of cells: around 0 they are of
equal width, further out there are 8 per octave, at last two half lines. Every cell is enclosed by ball arithmetic.
Then, for an interval [low, high] that begins in cell i and ends in cell j,

* the cells strictly between i and j are covered by the largest of their bounds, read off a sparse table;
* the part :math:`c + [a, b]` of the cell i (and j) with midpoint c is covered by Taylor's formula,

  .. math:: |f^{(k)}(c + d)| \le |f^{(k)}(c) + f^{(k+1)}(c)\,d| + \tfrac12 d^2 \sup_{\rm cell} |f^{(k+2)}|,

  whose first term, convex in d, is largest at a or b, or by the bound of the whole cell, if that is smaller;
* a kink in [low, high] adds the larger one-sided derivative there, or infinity if a lower one jumps.

The arithmetic on tensors is in double precision. With :math:`u = 2^{-53}`, h the half width of the cell and M
the supremum above, its round-off is at most
:math:`32u(|f^{(k)}(c)| + h|f^{(k+1)}(c)| + \tfrac12 h^2 M)`; this is added, as is the error of the tabulated
values.

Sharpness: within a fraction of a percent of the largest value where cells are narrow, which is where
activations bend; far out the width of the cells grows with the distance. A kink of which only the cell is
known (of a ReLU of a nonlinear function, say) counts for every interval that meets this cell.

>>> from surefoot.scalar.function import ScalarFunction
>>> relu = ScalarFunction.named("relu")
>>> sup_on(relu, 1, torch.tensor([-2.0, -1.0, 0.5]), torch.tensor([-1.0, 1.0, 0.5])).tolist()
[0.0, 1.0, 1.0]
>>> sup_on(relu, 2, torch.tensor([-2.0, -1.0, 0.5]), torch.tensor([-1.0, 1.0, 0.5])).tolist()
[0.0, inf, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from flint import arb

from surefoot.scalar.bounds import HIGHEST_ORDER
from surefoot.scalar.enclosure import FACTORIAL, Cell, doubles_at, downwards, ends_of, kinks, upwards
from surefoot.scalar.function import ScalarFunction
from surefoot.scalar.tails import LENGTH

HALF = 512  # cells of equal width on either side of 0
PER_OCTAVE = 8  # cells in [2^n, 2^(n+1)] beyond them
FARTHEST = 60  # the half lines begin at 2^60
_UNIT = 2.0**-53
_FAR = 1e100  # beyond every cell but the half lines; its square is finite
CELLS = Path(__file__).with_name("cells.npz")  # written by docs/cells.py
SHIPPED = (
    "tanh", "sigmoid", "relu", "gelu", "silu", "softplus", "mish", "elu", "selu", "celu", "hardswish",
    "hardsigmoid", "log_sigmoid", "tanhshrink", "leaky_relu", "rrelu", "relu6", "hardtanh", "softshrink",
    "hardshrink",
)  # fmt: skip
FOLDS = {"absolute": torch.abs, "most": torch.positive, "least": torch.neg}
_TINY = 1e-300


class Grid:
    """The enclosures of one function on all cells.

    The line is divided into buckets, in order: the half line to the left, ``outer`` cells of shrinking width,
    2 ``HALF`` cells of width ``step``, a power of two, that end at 2 ** ``exponent``, and the same mirrored. A
    bucket with kinks inside is several cells, of which ``first`` is the index of the first; ``extra`` is the
    largest number of the others, and ``right`` are the right ends of the cells.
    """

    def __init__(self, function: ScalarFunction, stored: tuple[float, np.ndarray] | None = None) -> None:
        self.step = _step(function) if stored is None else stored[0]
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
        self.rows = _rows(function, edges) if stored is None else stored[1]
        self._enclose()

    def _enclose(self) -> None:
        """Tabulate midpoints, half widths and smoothness, values at the midpoints and ranges over the cells.

        The values are rounded to the nearest doubles, the ranges outwards.
        """
        self.smoothness, self.centre, self.half = np.ascontiguousarray(self.rows[:, :3].T)
        numbers = self.rows[:, 3:].reshape(len(self.rows), 4, LENGTH)
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


def _rows(function: ScalarFunction, edges: Sequence[float]) -> np.ndarray:
    """For every cell its smoothness, midpoint and half width, and the numbers of the function there."""
    cells = [Cell(function, *ends) for ends in pairwise(edges)]
    places = [(0.0, math.inf) if cell.is_tail else (cell.middle, cell.radius) for cell in cells]
    return np.array(
        [[float(cell.smoothness), *place, *_numbers(cell)] for cell, place in zip(cells, places, strict=True)]
    )


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


def sup_on(function: ScalarFunction, order: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Upper bounds of the suprema of |f^(order)| over the intervals [low_i, high_i], in double precision.

    The meaning is that of :func:`surefoot.scalar.bounds.supremum`; the ends may be infinite.
    """
    return _largest(function, [(order, "absolute")], low, high)[0]


def sups_on(
    function: ScalarFunction, orders: Sequence[int], low: torch.Tensor, high: torch.Tensor
) -> list[torch.Tensor]:
    """:func:`sup_on` for several orders at once: the cells that the ends lie in are looked for once."""
    return _largest(function, [(order, "absolute") for order in orders], low, high)


def range_on(
    function: ScalarFunction, low: torch.Tensor, high: torch.Tensor, order: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bounds of f^(order), by default of f itself, over the intervals [low_i, high_i]."""
    least, most = _largest(function, [(order, "least"), (order, "most")], low, high)
    return -least, most


@torch.no_grad()
def _largest(
    function: ScalarFunction, wanted: Sequence[tuple[int, str]], low: torch.Tensor, high: torch.Tensor
) -> list[torch.Tensor]:
    for order, _ in wanted:
        if order not in range(HIGHEST_ORDER + 1):
            raise ValueError(f"expected an order from 0 to {HIGHEST_ORDER}, got {order}")
    low, high = torch.broadcast_tensors(low.double(), high.double())
    if not bool((low <= high).all()):
        raise ValueError("expected intervals with low <= high in every entry, and no NaN")
    ends = low.reshape(-1), high.reshape(-1)
    tables = [_table(function, order, fold, low.device) for order, fold in wanted]
    place = tables[0].place(*ends)  # the same for all: it depends on the grid alone
    return [table(*ends, place).reshape(low.shape) for table in tables]


@lru_cache(maxsize=1024)
def _table(function: ScalarFunction, order: int, fold: str, device: torch.device) -> Table:
    return Table(_grid(function), order, fold, device)


@lru_cache(maxsize=128)
def _grid(function: ScalarFunction) -> Grid:
    return Grid(function, _stored(function))


@cache
def shipped() -> dict[ScalarFunction, str]:
    """The functions of torch.nn whose cells come with the package, with their names in the file."""
    plain = {ScalarFunction.named(name): name for name in SHIPPED}
    return {**plain, ScalarFunction.named("gelu", approximate="tanh"): "gelu_tanh"}


def _stored(function: ScalarFunction) -> tuple[float, np.ndarray] | None:
    """The width of the cells around 0 and the rows of a function that comes with the package."""
    name = shipped().get(function)
    if name is None:
        return None
    with np.load(CELLS) as file:
        return float(file[f"{name}.step"]), file[name]


class Place(NamedTuple):
    """The ends of intervals, the cells they lie in, and two runs of cells that cover those between."""

    near: torch.Tensor
    far: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    inner: tuple[torch.Tensor, torch.Tensor]


class Table:
    """The tensors that the queries of one function, order and fold read, on one device.

    The fold, of :data:`FOLDS`, is what is to be maximised: |f^(order)|, f^(order) or -f^(order).
    """

    def __init__(self, grid: Grid, order: int, fold: str, device: torch.device) -> None:
        self.grid, self.fold, self.kinks = grid, FOLDS[fold], grid.kink_bounds(order, fold)
        self.columns = [torch.from_numpy(column).to(device) for column in grid.columns(order, fold)]
        self.first = torch.from_numpy(grid.first).to(device, torch.int32)
        self.right = torch.from_numpy(grid.right).to(device)
        # level n: the largest bound of 2^n consecutive cells; the last level is for no cells at all
        levels = [self.columns[-1]]
        count = len(levels[0])
        while 2 ** len(levels) <= count:
            half, longer = 2 ** (len(levels) - 1), levels[-1].clone()
            longer[:-half] = torch.maximum(levels[-1][:-half], levels[-1][half:])
            levels.append(longer)
        self.sparse = torch.cat([*levels, torch.full((count + 1,), -torch.inf).to(levels[0])])
        level = torch.frexp(torch.arange(count + 1).double()).exponent - 1  # floor(log2(length))
        self.span = (1 << level.clamp(min=0)).int().to(device)
        self.block = (torch.where(level < 0, len(levels), level) * count).int().to(device)

    def place(self, low: torch.Tensor, high: torch.Tensor) -> Place:
        """Where vectors of ends lie; the clamps leave every end in its cell."""
        near, far = low.clamp(-_FAR, _FAR), high.clamp(-_FAR, _FAR)
        begin, end = self.locate(near), self.locate(far)
        between = (end - begin - 1).clamp_(min=0)
        block, span = self.block.index_select(0, between), self.span.index_select(0, between)
        return Place(near, far, begin, end, (block + begin + 1, block + end - span))

    def __call__(self, low: torch.Tensor, high: torch.Tensor, place: Place) -> torch.Tensor:
        """The bounds for vectors of ends."""
        near, far, begin, end, inner = place
        largest = torch.maximum(self.part(begin, near, far), self.part(end, near, far))
        for index in inner:
            largest = torch.maximum(largest, self.sparse.index_select(0, index))
        for point, bound in self.kinks:
            inside = (low <= point) & (high >= point)
            largest = torch.where(inside, largest.clamp(min=bound), largest)
        return largest

    def locate(self, x: torch.Tensor) -> torch.Tensor:
        """The index of a closed cell that contains x; products with powers of two and frexp are exact."""
        grid = self.grid
        index = (x * (1 / grid.step)).floor_().clamp_(-HALF, HALF - 1).int() + (HALF + grid.outer + 1)
        size = x.abs()
        if x.numel() and float(size.max()) >= HALF * grid.step:
            mantissa, exponent = torch.frexp(size)
            octave = (exponent - (grid.exponent + 1)) * PER_OCTAVE
            steps = (octave + ((mantissa * 2 - 1) * PER_OCTAVE).int()).clamp_(max=grid.outer)
            outside = torch.where(x > 0, 2 * HALF + grid.outer + 1 + steps, grid.outer - steps)
            index = torch.where(size >= HALF * grid.step, outside, index)
        if grid.extra:
            index = self.first.index_select(0, index)
        for _ in range(grid.extra):
            index = index + (x > self.right.index_select(0, index))
        return index

    def part(self, index: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """The bound of the part of [low, high] that is in the cell of that index."""
        centre, half, value, slope, bend, error, top = (c.index_select(0, index) for c in self.columns)
        a, b = torch.maximum(low - centre, -half), torch.minimum(high - centre, half)
        left, right = torch.addcmul(value, slope, a), torch.addcmul(value, slope, b)
        linear = torch.maximum(self.fold(left), self.fold(right)).add_(error)
        taylor = linear.addcmul_(bend, torch.maximum(a.square_(), b.square_()))
        return torch.minimum(taylor, top)
