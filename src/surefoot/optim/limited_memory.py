"""L-BFGS with a scale for each parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.optim.directions import Gradient
from surefoot.optim.point import Point
from surefoot.optim.vectors import Layout
from surefoot.torch_private import norms_together, raised_together

_FEW, _MANY, _ROOM = 20, 100, 2**21  # pairs that are kept: as many as fit into so many bytes, within bounds
_CACHE = 2**20  # bytes of pairs in double precision that are read at no cost
_MEMORY = 0.7  # how much of the squares that scales are made of stays at each step
_ALL = 1e-6  # the part that the mean over all parameters has in each scale
_MOVES, _CHANGES = 0, 1
_ROWS_ARE = "moves, then changes, of norm one"  # how rows are saved


class LimitedMemory(Gradient):
    r"""L-BFGS: the inverse Hessian from the last moves s and changes y of the gradient.

    The two loops (Nocedal, Updating quasi-Newton matrices with limited storage, Mathematics of Computation 35,
    1980) start from any positive matrix :math:`H_0`. With S and Y the pairs, oldest first, R the upper triangle of
    :math:`S^\top Y` and D its diagonal, the first loop is :math:`R\alpha = S^\top g` and the second
    :math:`R^\top\delta = D\alpha - Y^\top H_0(g - Y\alpha)`, for the direction :math:`-H_0(g - Y\alpha) - S\delta`
    (Byrd, Nocedal and Schnabel, Representations of quasi-Newton matrices, Mathematical Programming 63, 1994). So
    moves and changes are read twice per step. A pair is kept if
    :math:`\langle s, y\rangle > 10^{-12}\|s\|\|y\|`, which keeps the matrix positive. Reading the rows is what
    takes time, so that many of them are kept in single precision, divided by their norms.

    *Scales.* Usually :math:`H_0` is a multiple of the identity, which suits no network: how far a bias, an
    embedding and a matrix behind a normalisation can move for the same change of the gradient differs by orders of
    magnitude. Here it is diagonal. Let :math:`\bar s_i` and :math:`\bar y_i` be the means of squares of the last
    moves and changes of parameter i, each pair divided by :math:`\langle s, y\rangle`, so that no unit matters,
    and :math:`\bar s_T`, :math:`\bar y_T` their means over the tensor it belongs to. Then
    :math:`H_0 = \gamma\operatorname{diag}\sqrt{(\bar s_i + \bar s_T)/(\bar y_i + \bar y_T)}` with
    :math:`\gamma = \langle s, y\rangle/\langle y, H_0y\rangle` of the last pair. (Diagonal matrices from pairs are
    those of Gilbert and Lemaréchal, Some numerical experiments with variable-storage quasi-Newton algorithms,
    Mathematical Programming 45, 1989; the mean over tensors keeps single entries from standing out by chance.)
    """

    needs_curvature = True

    def __init__(self, pairs: int | None = None) -> None:
        super().__init__()
        self._wanted = pairs
        self._clear()

    def _clear(self) -> None:
        self._layout = Layout(())  # of vectors, at the last step
        self._order: deque[int] = deque()  # slots in use, oldest first
        self._rows: Tensor | None = None  # moves and changes, divided by their norms
        self._norms = np.zeros((2, 0))
        self._table = np.zeros((0, 0))  # products of moves with changes
        self._at: tuple[Tensor, np.ndarray] | None = None  # a gradient, and the products of the moves with it
        self._lengths: list[int] = []  # how many parameters each tensor has
        self._squares: Tensor | None = None  # of moves and changes, with less weight the older they are
        self._weights = np.zeros(2)  # their unit: that of the last pair
        self._scales: Tensor | None = None  # the diagonal that the loops start from

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """Minus the inverse Hessian times the gradient; the step 1, or a short one at the very first."""
        gradient, self._layout = point.gradient, point.function.layout
        if not self._order or self._scales is None:
            return super().propose(point)
        order = np.array(self._order)
        upper = torch.from_numpy(self._table[order][:, order])
        alpha = _solved(upper, self._with_moves(gradient)[order], upper=True)
        start = self._combined(_CHANGES, order, alpha).neg_().add_(gradient).mul_(self._scales)
        rest = upper.diagonal().numpy() * alpha - self._products(_CHANGES, start)[order]
        delta = _solved(upper.T, rest, upper=False)
        return self._combined(_MOVES, order, delta).add_(start).neg_(), 1.0

    def _used(self, which: int) -> Tensor:
        """The rows that hold moves, or changes."""
        assert self._rows is not None
        return self._rows[which, : len(self._order)]

    def _with_moves(self, gradient: Tensor) -> np.ndarray:
        """The products of the moves with a gradient."""
        same = self._at is not None and self._at[0] is gradient
        if not same:
            same = self._layout.everywhere(self._at is not None and torch.equal(self._at[0], gradient))
        if self._at is None or not same:
            self._at = gradient, self._products(_MOVES, gradient)
        return self._at[1]

    def _products(self, which: int, vector: Tensor) -> np.ndarray:
        """The products of moves, or of changes, with a vector."""
        size, rows = self._layout.norm(vector) or 1.0, self._used(which)
        found = (rows @ (self._layout.once(vector) / size).to(rows)).double().cpu().numpy()
        return self._layout.summed(found) * (size * self._norms[which, : len(rows)])

    def _combined(self, which: int, order: np.ndarray, weights: np.ndarray) -> Tensor:
        """Moves, or changes, with these weights in order of age, added up in double precision at the end."""
        rows, parts = self._used(which), np.empty(len(order))
        parts[order] = weights * self._norms[which, order]
        largest = float(np.abs(parts).max()) or 1.0
        return (torch.from_numpy(parts / largest).to(rows) @ rows).double().mul_(largest)

    def learn(self, before: Point, after: Point, step: float) -> None:
        """Keep the move and the change of the gradient."""
        pair = after.vector - before.vector, after.gradient - before.gradient
        layout = self._layout = after.function.layout
        inner = layout.dot(pair[_MOVES], pair[_CHANGES])
        sizes = [layout.norm(vector) for vector in pair]
        self._length = sizes[_MOVES] or self._length
        if not inner > 1e-12 * sizes[_MOVES] * sizes[_CHANGES]:
            return
        if self._rows is None:
            count = sum(layout.lengths)
            pairs = self._wanted or min(max(_ROOM // (8 * count), _FEW), _MANY)
            kind = torch.float64 if 16 * pairs * count <= _CACHE else torch.float32
            self._rows = torch.zeros(2, pairs, len(after.vector), dtype=kind, device=after.vector.device)
            self._table, self._norms = np.zeros((pairs, pairs)), np.zeros((2, pairs))
            self._lengths = [shape.numel() for _, shape in layout.shapes]
        old, new = self._with_moves(before.gradient), self._with_moves(after.gradient)
        used = len(self._order)
        slot = used if used < len(self._norms[0]) else self._order.popleft()
        self._order.append(slot)
        self._table[:used, slot], self._table[slot, slot] = new - old, inner
        products = np.zeros(len(self._order))
        products[:used] = new
        products[slot] = layout.dot(pair[_MOVES], after.gradient)
        self._at = after.gradient, products
        for row, vector, size in zip(self._rows[:, slot], pair, sizes, strict=True):
            row.copy_(vector.div_(size))
        self._norms[:, slot] = sizes
        self._rescale(pair, np.square(sizes) / inner)

    def _rescale(self, units: tuple[Tensor, Tensor], weights: np.ndarray) -> None:
        """The diagonal with one more pair: vectors of norm one, and squares of their norms over their product."""
        rows = torch.zeros_like(units[0]).expand(2, -1) if self._squares is None else self._squares
        kept = torch.from_numpy(_MEMORY * self._weights / weights).to(rows.device)
        squares = rows * kept[:, None]  # a new tensor, as the old one may be wanted back
        for row, unit in zip(squares, units, strict=True):
            row.addcmul_(unit, unit)
        self._squares, self._weights, shifted = squares, weights, squares.clone()
        parts = [part for row in shifted for part in row.split(self._lengths)]
        counted = [part for row in squares for part in self._layout.once(row).split(self._lengths)]
        sums = self._layout.summed(torch.stack(norms_together(counted, 1)).cpu().numpy()).reshape(2, -1)
        lengths = self._layout.lengths
        means = sums / np.maximum(lengths, 1) + _ALL * sums.sum(axis=1, keepdims=True) / sum(lengths)
        raised_together(parts, means.reshape(-1).tolist())
        scales = shifted[_MOVES].div_(shifted[_CHANGES]).sqrt_()
        along = self._layout.dot(scales * units[_CHANGES], units[_CHANGES])
        self._scales = scales.div_(along * weights[_CHANGES])

    def forget(self) -> None:
        """All pairs."""
        super().forget()
        self._clear()

    def state(self) -> dict[str, Any]:
        """Also the pairs."""
        at = None if self._at is None else [self._at[0], torch.from_numpy(self._at[1].copy())]
        used = len(self._order)
        table, norms = self._table[:used, :used].copy(), self._norms[:, :used].copy()
        own: dict[str, Any] = {"order": list(self._order), "rows": self._rows, "rows_are": _ROWS_ARE, "at": at}
        own |= {"norms": torch.from_numpy(norms), "table": torch.from_numpy(table), "lengths": self._lengths}
        own |= {"squares": self._squares, "weights": self._weights.tolist(), "scales": self._scales}
        return {**super().state(), **own}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take them back; of a state with another order of rows, nothing: the memory fills up anew."""
        super().load(state)
        self._clear()
        if state.get("rows_are") != _ROWS_ARE or state["rows"] is None:
            return
        self._order, self._rows = deque(state["order"]), state["rows"]
        self._lengths, self._squares, self._scales = state["lengths"], state["squares"], state["scales"]
        self._weights = np.array(state["weights"])
        used, pairs = len(self._order), self._rows.shape[1]
        self._table, self._norms = np.zeros((pairs, pairs)), np.zeros((2, pairs))
        self._table[:used, :used], self._norms[:, :used] = state["table"].numpy(), state["norms"].numpy()
        self._at = None if state["at"] is None else (state["at"][0], state["at"][1].numpy().copy())


def _solved(triangle: Tensor, right: np.ndarray, *, upper: bool) -> np.ndarray:
    """The solution of a triangular system; the other half of the matrix is not read."""
    return torch.linalg.solve_triangular(triangle, torch.from_numpy(right)[:, None], upper=upper)[:, 0].numpy()
