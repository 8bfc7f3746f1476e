"""L-BFGS with a scale for each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.optim.directions import Gradient
from surefoot.optim.point import Point
from surefoot.optim.vectors import Layout

_FEW, _MANY, _ROOM = 20, 100, 2**21  # pairs that are kept: as many as fit into so many bytes, within bounds
_CACHE = 2**20  # bytes of pairs in double precision that are read at no cost
_MEMORY = 0.7  # how much of the squares that scales are made of stays at each step
_ALL = 1e-6  # the part that the mean over all parameters has in each scale
_FARTHER = 3.0  # than the last step, if that was short: no first trial
_MOVES, _CHANGES = 0, 1
_ROWS_ARE = "moves, then changes, of norm one, with the inverse of their products"  # how they are saved


class LimitedMemory(Gradient):
    r"""L-BFGS: the inverse Hessian from the last moves s and changes y of the gradient.

    The two loops (Nocedal, Updating quasi-Newton matrices with limited storage, Mathematics of Computation 35,
    1980) start from any positive matrix :math:`H_0`. With S and Y the pairs, oldest first, R the upper triangle of
    :math:`S^\top Y` and D its diagonal, the first loop is :math:`R\alpha = S^\top g` and the second
    :math:`R^\top\delta = D\alpha - Y^\top H_0(g - Y\alpha)`, for the direction :math:`-H_0(g - Y\alpha) - S\delta`
    (Byrd, Nocedal and Schnabel, Representations of quasi-Newton matrices, Mathematical Programming 63, 1994). So
    moves and changes are read twice per step. A pair is kept if
    :math:`\langle s, y\rangle > 10^{-12}\|s\|\|y\|`, which keeps the matrix positive. Reading the rows is what
    takes time, so that many of them are kept in single precision, divided by their norms. With
    :math:`s = \sigma\hat s` and :math:`y = \upsilon\hat y` the loops are those of :math:`\hat S` and
    :math:`\hat Y`, for :math:`\hat\alpha = \upsilon\alpha` and :math:`\hat\delta = \sigma\delta`, but for
    :math:`D\alpha`, which is :math:`\langle s, y\rangle/\upsilon^2` of each times :math:`\hat\alpha`.

    Kept is the inverse of R, where rows and columns stand in any order. Without the oldest pair it is what remains
    of it without that row and column; a new column c with the diagonal entry d adds the column :math:`-R^{-1}c/d`
    and, on the diagonal, :math:`1/d`.

    *Scales.* Usually :math:`H_0` is a multiple of the identity, which suits no network: how far a bias, an
    embedding and a matrix behind a normalisation can move for the same change of the gradient differs by orders of
    magnitude. Here it is diagonal. Let :math:`\bar s_i` and :math:`\bar y_i` be the means of squares of the last
    moves and changes of parameter i, each pair divided by :math:`\langle s, y\rangle`, so that no unit matters,
    and :math:`\bar s_T`, :math:`\bar y_T` their means over the tensor it belongs to. Then
    :math:`H_0 = \gamma\operatorname{diag}\sqrt{(\bar s_i + \bar s_T)/(\bar y_i + \bar y_T)}` with
    :math:`\gamma = \langle s, y\rangle/\langle y, H_0y\rangle` of the last pair. (Diagonal matrices from pairs are
    those of Gilbert and Lemaréchal, Some numerical experiments with variable-storage quasi-Newton algorithms,
    Mathematical Programming 45, 1989; the mean over tensors keeps single entries from standing out by chance.)

    *Lengths.* The first trial is the step 1, but after a shorter step no farther than three times its length. With
    few pairs, or behind kinks, the matrix knows little of where the step 1 leads; trials so far out mostly fail,
    and the interpolation between them and the start is a guess.
    """

    needs_curvature = True

    def __init__(self, pairs: int | None = None) -> None:
        super().__init__()
        self._wanted = pairs
        self._clear()

    def _clear(self) -> None:
        self._layout = Layout(())  # of vectors, at the last step
        self._seen = 0  # pairs: the next one goes where the oldest is
        self._rows: Tensor | None = None  # moves and changes, divided by their norms
        self._inverse = np.zeros((0, 0))  # of the upper triangle of their products
        self._steps = np.zeros(0)  # ⟨s, y⟩/‖y‖² of each pair
        self._at: tuple[Tensor, np.ndarray] | None = None  # a gradient, and the products of the moves with it
        self.__dict__.pop("_averaging", None)
        self._squares: np.ndarray | None = None  # of moves and changes, with less weight the older they are
        self._weights = np.zeros(2)  # their unit: that of the last pair
        self._scales: Tensor | None = None  # the diagonal that the loops start from

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """Minus the inverse Hessian times the gradient; the step 1, or a shorter one: see the class."""
        gradient, self._layout = point.gradient, point.function.layout
        if self._scales is None:
            return super().propose(point)
        inverse, steps = self._inverse[: self._kept, : self._kept], self._steps[: self._kept]
        alpha = inverse @ self._with_moves(point)
        start = self._without(_CHANGES, alpha, gradient).mul_(self._scales)
        rest = steps * alpha - self._products(_CHANGES, start, self._layout.norm(start))
        direction = self._without(_MOVES, rest @ inverse, start.neg_())
        longest = math.inf if self._length is None else _FARTHER * self._length
        return direction, min(1.0, longest / (self._layout.norm(direction) or 1.0))

    @property
    def _kept(self) -> int:
        """How many pairs there are: the first rows."""
        return min(self._seen, len(self._steps))

    def _with_moves(self, point: Point) -> np.ndarray:
        """The products of the moves with the gradient at a point."""
        gradient = point.gradient
        same = self._at is not None and self._at[0] is gradient
        if not same:
            same = self._at is not None and torch.equal(self._at[0], gradient)
        if self._at is None or not same:
            self._at = gradient, self._products(_MOVES, gradient, point.gradient_norm)
        return self._at[1]

    def _products(self, which: int, vector: Tensor, norm: float) -> np.ndarray:
        """The products of moves, or of changes, with a vector of this norm."""
        assert self._rows is not None
        size = norm or 1.0
        found = (self._rows[which, : self._kept] @ (vector / size).to(self._rows)).double().cpu().numpy()
        return found * size

    def _without(self, which: int, weights: np.ndarray, vector: Tensor) -> Tensor:
        """A vector less moves, or changes, with these weights; that in double precision."""
        assert self._rows is not None
        largest = max(weights.max(), -weights.min()) or 1.0
        scaled = torch.from_numpy(weights / largest).to(self._rows)
        return torch.sub(vector, scaled @ self._rows[which, : self._kept], alpha=largest)

    def learn(self, before: Point, after: Point, step: float) -> None:
        """Keep the move and the change of the gradient."""
        pair = torch.stack((after.vector - before.vector, after.gradient - before.gradient))
        layout = self._layout = after.function.layout
        (square, inner), (_, bent) = layout.products(pair).tolist()
        move, change = math.sqrt(square), math.sqrt(bent)
        self._length = math.inf if self._scales is not None and step >= 1 else move or self._length
        if not inner > 1e-12 * move * change:
            return
        if self._rows is None:
            count = len(after.vector)
            pairs = self._wanted or min(max(_ROOM // (8 * count), _FEW), _MANY)
            kind = torch.float64 if 16 * pairs * count <= _CACHE else torch.float32
            self._rows = torch.zeros(2, pairs, len(after.vector), dtype=kind, device=after.vector.device)
            self._inverse, self._steps = np.zeros((pairs, pairs)), np.zeros(pairs)
        units = pair.cpu().numpy()
        units /= np.array([[move], [change]])
        old, slot, diagonal = self._with_moves(before), self._seen % len(self._steps), inner / (move * change)
        self._rows[:, slot] = torch.from_numpy(units).to(self._rows.device)
        self._seen += 1
        new, inverse = self._products(_MOVES, after.gradient, after.gradient_norm), self._inverse
        inverse[slot], inverse[:, slot] = 0.0, 0.0
        others = slice(len(old))  # and the pair that this one replaces, whose row and column are zero now
        inverse[others, slot] = inverse[others, others] @ (old - new[others]) / (change * diagonal)
        inverse[slot, slot], self._steps[slot] = 1 / diagonal, inner / bent
        self._at = after.gradient, new
        self._rescale(units, np.array((square, bent)) / inner)

    def _rescale(self, units: np.ndarray, weights: np.ndarray) -> None:
        """The diagonal with one more pair: vectors of norm one, and squares of their norms over their product."""
        squares = units * units  # new, as the old ones may be wanted back
        if self._squares is not None:
            squares += self._squares * (_MEMORY * self._weights / weights)[:, None]
        self._squares, self._weights = squares, weights
        scales, changes = both = np.repeat(self._means(squares), self._averaging[0], axis=1)
        both += squares
        np.sqrt(np.divide(scales, changes, out=scales), out=scales)
        along = np.multiply(scales, units[_CHANGES], out=changes) @ units[_CHANGES]
        scales /= along * weights[_CHANGES]
        assert self._rows is not None
        self._scales = torch.from_numpy(scales).to(self._rows.device)

    def _means(self, squares: np.ndarray) -> np.ndarray:
        """Over each tensor, and a part of that over all."""
        lengths, averages = self._averaging
        here, starts = lengths > 0, lengths.cumsum() - lengths
        sums = np.zeros((2, len(here)))
        if here.any():
            sums[:, here] = np.add.reduceat(squares, starts[here], axis=1)
        means: np.ndarray = sums @ averages
        return means

    @cached_property
    def _averaging(self) -> tuple[np.ndarray, np.ndarray]:
        """How many entries each tensor has, and the weights of their sums in means."""
        lengths = np.array([shape.numel() for _, shape in self._layout.shapes], dtype=int)
        return lengths, np.diag(1 / np.maximum(lengths, 1)) + _ALL / lengths.sum()

    def forget(self) -> None:
        """All pairs."""
        super().forget()
        self._clear()

    def state(self) -> dict[str, Any]:
        """Also the pairs."""
        at = None if self._at is None else [self._at[0], torch.from_numpy(self._at[1])]
        squares = None if self._squares is None else torch.from_numpy(self._squares)
        own: dict[str, Any] = {"rows_are": _ROWS_ARE, "rows": self._rows, "seen": self._seen, "at": at}
        own |= {"inverse": torch.from_numpy(self._inverse.copy()), "steps": torch.from_numpy(self._steps.copy())}
        own |= {"squares": squares, "weights": self._weights.tolist(), "scales": self._scales}
        return {**super().state(), **own}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take them back; of a state that is kept otherwise, nothing: the memory fills up anew."""
        super().load(state)
        self._clear()
        if state.get("rows_are") != _ROWS_ARE or state["rows"] is None:
            return
        self._rows, self._seen = state["rows"], state["seen"]
        self._inverse, self._steps = state["inverse"].numpy().copy(), state["steps"].numpy().copy()
        self._squares, self._weights = state["squares"].numpy(), np.array(state["weights"])
        self._scales = state["scales"]
        self._at = None if state["at"] is None else (state["at"][0], state["at"][1].numpy()[: self._kept])
