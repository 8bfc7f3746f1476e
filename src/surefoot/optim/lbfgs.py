"""L-BFGS with a scale for each parameter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.optim.directions import Gradient
from surefoot.optim.problem import Point

_FEW, _MANY, _ROOM = 20, 100, 2**21  # pairs that are stored: as many as fit into so many bytes, within bounds
_CACHE = 2**20  # bytes of pairs in double precision that are read at no cost
_MEMORY = 0.7  # how much of the squares that scales are made of stays at each step
_ALL = 1e-6  # the part that the mean over all parameters has in each scale
_FARTHER = 3.0  # than the last step, if that was short: no first trial


class LimitedMemory(Gradient):
    r"""L-BFGS: the inverse Hessian from the last moves s and changes y of the gradient.

    The two loops (Nocedal, Updating quasi-Newton matrices with limited storage, Mathematics of Computation 35,
    1980) start from any positive matrix :math:`H_0`. With S and Y the pairs, oldest first, R the upper triangle of
    :math:`S^\top Y` and D its diagonal, the first loop is :math:`R\alpha = S^\top g` and the second
    :math:`R^\top\delta = D\alpha - Y^\top H_0(g - Y\alpha)`, for the direction :math:`-H_0(g - Y\alpha) - S\delta`
    (Byrd, Nocedal and Schnabel, Representations of quasi-Newton matrices, Mathematical Programming 63, 1994). So
    moves and changes are read twice per step, in single precision where they are many, divided by their norms.
    With :math:`s = \sigma\hat s` and :math:`y = \upsilon\hat y` the loops are those of :math:`\hat S` and
    :math:`\hat Y`, for :math:`\hat\alpha = \upsilon\alpha` and :math:`\hat\delta = \sigma\delta`, but for
    :math:`D\alpha`, which is :math:`\langle s, y\rangle/\upsilon^2` of each times :math:`\hat\alpha`. A pair is
    stored if :math:`\langle s, y\rangle > 10^{-12}\|s\|\|y\|`, so that the matrix stays positive.

    The inverse of R is updated, with rows and columns in any order. Without the oldest pair it is what remains of
    it without that row and column; a new column c with the diagonal entry d adds the column :math:`-R^{-1}c/d`
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

    Args:
        pairs: how many are stored; by default 20 to 100, as many as fit into two megabytes.
    """

    needs_curvature = True

    def __init__(self, pairs: int | None = None) -> None:
        super().__init__()
        self._wanted = pairs
        self._clear()

    def _clear(self) -> None:
        self._seen = 0  # pairs: the next one goes where the oldest is
        self._rows: Tensor | None = None  # moves, then changes, divided by their norms
        self._inverse = np.zeros((0, 0))  # of R
        self._steps = np.zeros(0)  # ⟨s, y⟩/‖y‖² of each pair
        self._at: tuple[Tensor, np.ndarray] | None = None  # a gradient, and the products of the moves with it
        self._squares: Tensor | None = None  # of moves and changes, with less weight the older they are
        self._weights = [0.0, 0.0]  # their unit: that of the last pair
        self._scales: Tensor | None = None  # the diagonal of H₀

    def propose(self, point: Point) -> tuple[Tensor, float]:
        if self._scales is None:
            return super().propose(point)
        count = min(self._seen, len(self._steps))
        inverse = self._inverse[:count, :count]
        alpha = inverse @ self._products(0, point.gradient, count)
        start = self._without(1, alpha, point.gradient).mul_(self._scales)
        delta = (self._steps[:count] * alpha - self._products(1, start, count)) @ inverse
        direction = self._without(0, delta, start.neg_())
        longest = math.inf if self._length is None else _FARTHER * self._length
        return direction, min(1.0, longest / (float(torch.linalg.vector_norm(direction)) or 1.0))

    def _products(self, which: int, vector: Tensor, count: int) -> np.ndarray:
        """The products of moves, or of changes, with a vector."""
        if which == 0 and self._at is not None and (self._at[0] is vector or torch.equal(self._at[0], vector)):
            return self._at[1][:count]
        assert self._rows is not None
        size = float(torch.linalg.vector_norm(vector)) or 1.0
        products: np.ndarray = (self._rows[which, :count] @ (vector / size).to(self._rows)).double().cpu().numpy()
        return products * size

    def _without(self, which: int, weights: np.ndarray, vector: Tensor) -> Tensor:
        """A vector less moves, or changes, with these weights; that in double precision."""
        assert self._rows is not None
        largest = max(weights.max(), -weights.min()) or 1.0
        scaled = torch.from_numpy(weights / largest).to(self._rows)
        return torch.sub(vector, scaled @ self._rows[which, : len(weights)], alpha=largest)

    def learn(self, before: Point, after: Point, step: float) -> None:
        pair = torch.stack((after.vector - before.vector, after.gradient - before.gradient))
        (square, inner), (_, bent) = (pair @ pair.T).tolist()
        move, change = math.sqrt(square), math.sqrt(bent)
        self._length = math.inf if self._scales is not None and step >= 1 else move or self._length
        if not inner > 1e-12 * move * change:
            return
        if self._rows is None:
            size = pair.shape[1]
            pairs = self._wanted or min(max(_ROOM // (8 * size), _FEW), _MANY)
            kind = torch.float64 if 16 * pairs * size <= _CACHE else torch.float32
            self._rows = torch.zeros(2, pairs, size, dtype=kind, device=pair.device)
            self._inverse, self._steps = np.zeros((pairs, pairs)), np.zeros(pairs)
        pairs, inverse = len(self._steps), self._inverse
        count, slot, diagonal = min(self._seen, pairs), self._seen % pairs, inner / (move * change)
        old = self._products(0, before.gradient, count)
        units = pair / pair.new_tensor([[move], [change]])
        self._rows[:, slot] = units.to(self._rows)
        self._seen += 1
        self._at = None
        new = self._products(0, after.gradient, min(self._seen, pairs))
        self._at = after.gradient, new
        inverse[slot], inverse[:, slot] = 0.0, 0.0
        others = slice(count)  # and the pair that this one replaces, whose row and column are zero now
        inverse[others, slot] = inverse[others, others] @ (old - new[others]) / (change * diagonal)
        inverse[slot, slot], self._steps[slot] = 1 / diagonal, inner / bent
        self._rescale(units, [square / inner, bent / inner], after.problem.sizes)

    def _rescale(self, units: Tensor, weights: list[float], sizes: list[int]) -> None:
        """H₀ with one more pair: vectors of norm one, and squares of their norms over their product."""
        squares = units * units
        if self._squares is not None:
            factors = [_MEMORY * old / new for old, new in zip(self._weights, weights, strict=True)]
            squares += self._squares * squares.new_tensor(factors)[:, None]
        self._squares, self._weights = squares, weights
        both = squares + _ALL * squares.mean(1, keepdim=True)
        for part, square in zip(both.split(sizes, dim=1), squares.split(sizes, dim=1), strict=True):
            part += square.mean(1, keepdim=True)
        scales = (both[0] / both[1]).sqrt_()
        self._scales = scales / (float((scales * units[1]) @ units[1]) * weights[1])

    def forget(self) -> None:
        super().forget()
        self._clear()

    def state(self) -> dict[str, Any]:
        at = None if self._at is None else [self._at[0], torch.from_numpy(self._at[1].copy())]
        own = {"seen": self._seen, "rows": self._rows, "at": at, "squares": self._squares}
        own |= {"inverse": torch.from_numpy(self._inverse.copy()), "steps": torch.from_numpy(self._steps.copy())}
        return {**super().state(), **own, "weights": self._weights, "scales": self._scales}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._seen, self._rows, self._squares = state["seen"], state["rows"], state["squares"]
        self._inverse, self._steps = state["inverse"].numpy().copy(), state["steps"].numpy().copy()
        self._at = None if state["at"] is None else (state["at"][0], state["at"][1].numpy())
        self._weights, self._scales = list(state["weights"]), state["scales"]
