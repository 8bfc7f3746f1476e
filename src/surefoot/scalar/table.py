r"""Suprema of :math:`|f^{(k)}|` over as many intervals as a tensor has entries.

Once per function, the line is cut into some thousand cells, known kinks being ends of cells, and every cell is
enclosed by ball arithmetic (:mod:`surefoot.scalar.grid`). Then, for an interval [low, high] that begins in cell
i and ends in cell j,

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

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from surefoot.scalar.bounds import HIGHEST_ORDER
from surefoot.scalar.function import ScalarFunction
from surefoot.scalar.grid import HALF, PER_OCTAVE, Grid

_FAR = 1e100  # beyond every cell but the half lines; its square is finite

FOLDS = {"absolute": torch.abs, "most": torch.positive, "least": torch.neg}


def sup_on(function: ScalarFunction, order: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Upper bounds of the suprema of |f^(order)| over the intervals [low_i, high_i], in double precision.

    The meaning is that of :func:`surefoot.scalar.bounds.supremum`; the ends may be infinite.

    Raises:
        ValueError: if the order is not one of 0 to 5, or an interval is empty.
    """
    return _largest(function, [order], low, high, "absolute")[0]


def sups_on(
    function: ScalarFunction, orders: Sequence[int], low: torch.Tensor, high: torch.Tensor
) -> list[torch.Tensor]:
    """The same for several orders at once: the cells that the ends lie in are looked for once."""
    return _largest(function, orders, low, high, "absolute")


def range_on(
    function: ScalarFunction, low: torch.Tensor, high: torch.Tensor, order: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bounds of f^(order), by default of f itself, over the intervals [low_i, high_i].

    Raises:
        ValueError: if the order is not one of 0 to 5, or an interval is empty.
    """
    least, most = (_largest(function, [order], low, high, fold)[0] for fold in ("least", "most"))
    return -least, most


@torch.no_grad()
def _largest(
    function: ScalarFunction, orders: Sequence[int], low: torch.Tensor, high: torch.Tensor, fold: str
) -> list[torch.Tensor]:
    for order in orders:
        if order not in range(HIGHEST_ORDER + 1):
            raise ValueError(f"expected an order from 0 to {HIGHEST_ORDER}, got {order}")
    low, high = torch.broadcast_tensors(low.double(), high.double())
    if not bool((low <= high).all()):
        raise ValueError("expected intervals with low <= high in every entry, and no NaN")
    ends = low.reshape(-1), high.reshape(-1)
    tables = [_table(function, order, fold, low.device) for order in orders]
    place = tables[0].place(*ends)  # the same for all: it depends on the grid alone
    return [table(*ends, place).reshape(low.shape) for table in tables]


@lru_cache(maxsize=1024)
def _table(function: ScalarFunction, order: int, fold: str, device: torch.device) -> Table:
    return Table(_grid(function), order, fold, device)


@lru_cache(maxsize=128)
def _grid(function: ScalarFunction) -> Grid:
    return Grid(function)


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
