"""Where to go from a point: directions that a proof then judges.

Each is a class with :meth:`propose`, a direction and the step size to try first, and :meth:`learn`, told what step
was taken. ``needs_curvature`` says whether a step that is much too short would spoil it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from surefoot.optim.forcing import Forcing, relaxed
from surefoot.optim.point import Point
from surefoot.optim.vectors import Tensors
from surefoot.oracles.geodesic import accelerated
from surefoot.oracles.primal import LOOSE
from surefoot.oracles.problem import Problem, check_tolerance
from surefoot.oracles.steps import gauss_newton_solver

_FEW, _MANY, _ROOM = 40, 100, 2**24  # pairs kept by L-BFGS: many if they fit into so many bytes, else few
_CACHE = 2**20  # bytes of pairs in double precision that are read at no cost
_FIRST = 0.1  # length of the very first step along a gradient, relative to the weights


class Direction(Protocol):
    """A source of directions."""

    needs_curvature: bool

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """A direction and the step size to try first."""

    def learn(self, before: Point, after: Point, step: float) -> None:
        """This step was taken."""

    def forget(self) -> None:
        """Start anew: another function, or other weights."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, lists of them."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back."""


class Owner(Protocol):
    """Whoever has parameters."""

    @property
    def trainable(self) -> Mapping[str, Tensor]:
        """Those that vary, by name."""


class Gradient:
    """Against the gradient; the first step is as long as the last one was good for."""

    needs_curvature = False

    def __init__(self) -> None:
        self._length: float | None = None  # of the last step

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """Minus the gradient; twice as far as the last step."""
        return -point.gradient, self.first(point, point.gradient)

    def first(self, point: Point, direction: Tensor) -> float:
        """The step size of the first trial along a direction that has no scale of its own."""
        length = _FIRST * (float(point.vector.norm()) or 1.0) if self._length is None else 2 * self._length
        return length / (float(direction.norm()) or 1.0)

    def learn(self, before: Point, after: Point, step: float) -> None:
        """Remember how long it was."""
        self._length = float((after.vector - before.vector).norm()) or self._length

    def forget(self) -> None:
        """Nothing but the length."""
        self._length = None

    def state(self) -> dict[str, Any]:
        """The length."""
        return {"length": self._length}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._length = state["length"]


class Proximal(Gradient):
    """Proximal gradient steps: the first trial has the size that a parabola through the last two gradients asks
    for (J. Barzilai and J. M. Borwein, IMA J. Numer. Anal. 8, 1988). Kept is that size.
    """

    def first(self, point: Point, direction: Tensor) -> float:
        """The size to try first."""
        return super().first(point, direction) if self._length is None else self._length

    def learn(self, before: Point, after: Point, step: float) -> None:
        """How the gradient changed; twice the last size where it did not grow along the step."""
        move = after.vector - before.vector
        bent = float(move @ (after.gradient - before.gradient))
        self._length = min(float(move @ move) / bent, 1e3 * step) if bent > 0 else 2 * step


class Conjugate(Gradient):
    """Polak and Ribière's conjugate direction, and the gradient where that does not descend."""

    needs_curvature = True

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Tensor, Tensor] | None = None  # gradient and direction

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """Minus the gradient, plus a part of the direction before."""
        gradient = point.gradient
        direction = -gradient
        if self._last is not None:
            direction = polak_ribiere(gradient, *self._last)
            if not float(gradient @ direction) < 0:
                direction = -gradient
        self._last = gradient, direction
        return direction, self.first(point, direction)

    def forget(self) -> None:
        """Also the direction before."""
        super().forget()
        self._last = None

    def state(self) -> dict[str, Any]:
        """Also what the next direction is made of."""
        return {**super().state(), "last": None if self._last is None else list(self._last)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        super().load(state)
        self._last = None if state["last"] is None else (state["last"][0], state["last"][1])


def polak_ribiere(gradient: Tensor, before: Tensor, last: Tensor) -> Tensor:
    """Minus the gradient, plus the part of the last direction that Polak and Ribière's formula gives."""
    weight = max(0.0, float(gradient @ (gradient - before)) / (float(before @ before) or 1.0))
    return weight * last - gradient


_ALTERNATING = "moves and changes in turn, scaled"  # how rows are saved


class LimitedMemory(Gradient):
    r"""L-BFGS: the inverse Hessian from the last moves s and changes y of the gradient.

    The two loops (Nocedal, Updating quasi-Newton matrices with limited storage, Mathematics of Computation 35,
    1980) only need inner products of moves, changes and the gradient. So they run on a small table of those (Chen,
    Wang and Zhou, Large-scale L-BFGS using MapReduce, NIPS 2014), and the moves and changes are read twice per
    step: for their products with the new gradient, and for the direction. The products with the new move and the
    new change follow from these, as the move is along the direction. With S and Y the pairs, oldest first, R the
    upper triangle of :math:`S^\top Y` and D its diagonal, the first loop is :math:`R\alpha = S^\top g` and the
    second :math:`R^\top\delta = D\alpha - \gamma Y^\top(g - Y\alpha)`, for the direction
    :math:`-\gamma(g - Y\alpha) - S\delta`. A pair is kept if
    :math:`\langle s, y\rangle > 10^{-12}\|s\|\|y\|`, which keeps the matrix positive. Reading the rows is what
    takes time, so that many of them are kept in single precision, divided by their norms. The table stays in
    double precision.
    """

    needs_curvature = True

    def __init__(self, pairs: int | None = None) -> None:
        super().__init__()
        self._wanted = pairs
        self._clear()

    def _clear(self) -> None:
        self._order: deque[int] = deque()  # slots in use, oldest first
        self._rows: Tensor | None = None  # moves and changes in turn, divided by their norms
        self._norms = np.zeros(0)  # of moves and changes
        self._table = np.zeros((0, 0))  # products of moves and changes
        self._at: tuple[Tensor, np.ndarray] | None = None  # a gradient, and the products of the rows with it
        self._along: tuple[Tensor, np.ndarray] | None = None  # a direction, and the products of the rows with it

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """Minus the inverse Hessian times the gradient; the step 1, or a short one at the very first."""
        gradient = point.gradient
        if not self._order or self._rows is None:
            return super().propose(point)
        products = self._with_rows(gradient)
        weights, scale = self._loops(products)
        used = len(products)
        scaled = torch.from_numpy(weights * self._norms[:used])
        largest = float(scaled.abs().amax()) or 1.0
        part = ((scaled / largest).to(self._used) @ self._used).to(gradient)
        direction = part.mul_(-largest).sub_(gradient, alpha=scale)
        self._along = direction, -(self._table[:used, :used] @ weights) - scale * products
        return direction, 1.0

    @property
    def _used(self) -> Tensor:
        """The rows that hold pairs."""
        assert self._rows is not None
        return self._rows[: 2 * len(self._order)]

    def _with_rows(self, gradient: Tensor) -> np.ndarray:
        """The products of the rows with a gradient."""
        if self._at is None or not (self._at[0] is gradient or torch.equal(self._at[0], gradient)):
            self._at = gradient, self._products(gradient)
        return self._at[1]

    def _products(self, vector: Tensor) -> np.ndarray:
        """The products of moves and changes with a vector."""
        size = float(torch.linalg.vector_norm(vector)) or 1.0
        found = self._used @ (vector / size).to(self._used)
        return found.double().cpu().numpy() * (size * self._norms[: len(found)])

    def _loops(self, products: np.ndarray) -> tuple[np.ndarray, float]:
        """What the two loops give, as weights of the rows and of the gradient."""
        used = len(products)
        moves: Any = slice(0, used, 2)
        changes: Any = slice(1, used, 2)
        if self._order[0]:  # the oldest is not the first
            moves = np.array(self._order)
            changes = moves + 1
        table = self._table[:used, :used]
        upper = torch.from_numpy(table[moves][:, changes])
        diagonal = upper.diagonal().numpy()
        newest = self._order[-1] + 1
        scale = diagonal[-1] / table[newest, newest]
        alpha = _solved(upper, products[moves], upper=True)
        rest = products[changes] - table[changes][:, changes] @ alpha
        weights = np.zeros(used)
        weights[changes] = -scale * alpha
        weights[moves] = _solved(upper.T, diagonal * alpha - scale * rest, upper=False)
        return weights, float(scale)

    def learn(self, before: Point, after: Point, step: float) -> None:
        """Keep the move and the change of the gradient."""
        move, change = after.vector - before.vector, after.gradient - before.gradient
        inner, squares = float(move @ change), (float(move @ move), float(change @ change))
        self._length = squares[0] ** 0.5 or self._length
        if not inner > 1e-12 * (squares[0] * squares[1]) ** 0.5:
            return
        if self._rows is None:
            pairs = self._wanted or min(max(_ROOM // (8 * len(move)), _FEW), _MANY)
            kind = torch.float64 if 16 * pairs * len(move) <= _CACHE else torch.float32
            self._rows = torch.zeros(2 * pairs, len(move), dtype=kind, device=move.device)
            self._table, self._norms = np.zeros((2 * pairs, 2 * pairs)), np.zeros(2 * pairs)
        old = self._with_rows(before.gradient)
        moved = self._moved(move, step)
        new = self._with_rows(after.gradient).copy()
        used = len(new)
        slot = used if used < len(self._rows) else self._order.popleft()
        self._order.append(slot)
        for row, part, square in zip((slot, slot + 1), (move, change), squares, strict=True):
            self._norms[row] = square**0.5
            self._rows[row] = part / square**0.5
        self._table[slot, :used] = self._table[:used, slot] = moved
        self._table[slot + 1, :used] = self._table[:used, slot + 1] = new - old
        self._table[slot, slot], self._table[slot + 1, slot + 1] = squares
        self._table[slot, slot + 1] = self._table[slot + 1, slot] = inner
        new.resize(2 * len(self._order), refcheck=False)
        new[slot], new[slot + 1] = float(move @ after.gradient), float(change @ after.gradient)
        self._at = after.gradient, new

    def _moved(self, move: Tensor, step: float) -> np.ndarray:
        """The products of the rows with a move: known where it is the last direction times a step, up to the
        rounding of weights in double precision.
        """
        if self._along is not None:
            wanted = self._along[0] * step
            if bool((move - wanted).norm() <= 1e-10 * wanted.norm()):
                return self._along[1] * step
        return self._products(move)

    def forget(self) -> None:
        """All pairs."""
        super().forget()
        self._clear()

    def state(self) -> dict[str, Any]:
        """Also the pairs."""
        at = None if self._at is None else [self._at[0], torch.from_numpy(self._at[1].copy())]
        used = 2 * len(self._order)
        table, norms = (torch.from_numpy(part.copy()) for part in (self._table[:used, :used], self._norms[:used]))
        own: dict[str, Any] = {"order": list(self._order), "rows": self._rows, "norms": norms, "table": table}
        own["rows_are"] = _ALTERNATING
        return {**super().state(), **own, "at": at}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take them back; of a state with another order of rows, nothing: the memory fills up anew."""
        super().load(state)
        self._clear()
        if state.get("rows_are") != _ALTERNATING:
            return
        self._order, self._rows = deque(state["order"]), state["rows"]
        if self._rows is not None:
            used = 2 * len(self._order)
            self._table = np.zeros((len(self._rows), len(self._rows)))
            self._table[:used, :used], self._norms = state["table"].numpy(), np.zeros(len(self._rows))
            self._norms[:used] = state["norms"].numpy()
        self._at = None if state["at"] is None else (state["at"][0], state["at"][1].numpy().copy())


def _solved(triangle: Tensor, right: np.ndarray, *, upper: bool) -> np.ndarray:
    """The solution of a triangular system; the other half of the matrix is not read."""
    return torch.linalg.solve_triangular(triangle, torch.from_numpy(right)[:, None], upper=upper)[:, 0].numpy()


class Proposed(Gradient):
    """The step of another optimizer: it proposes, and its state goes on only if the step is taken.

    Args:
        optimizer: of the same parameters.
        owner: knows the parameters that vary at present, by name; others have no gradient in the optimizer's eyes.
    """

    needs_curvature = False

    def __init__(self, optimizer: torch.optim.Optimizer, owner: Owner) -> None:
        super().__init__()
        self.optimizer, self.owner = optimizer, owner
        self._before: dict[str, Any] | None = None
        self._scale = 1.0  # of its steps, which grows with success

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """Where it would go, and how many of its steps to try."""
        self._before = copy.deepcopy(self.optimizer.state_dict())
        slopes, parameters = point.function.layout.unpack(point.gradient), self.owner.trainable
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for name, parameter in parameters.items():
            parameter.grad = slopes[name].to(parameter.dtype)
        try:
            self.optimizer.step()
            moved = point.function.layout.pack(parameters) - point.vector
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(point.weights[name])
        return moved, self._scale

    def learn(self, before: Point, after: Point, step: float) -> None:
        """Its state is that after the step; it may go further next time."""
        super().learn(before, after, step)
        self._scale = 2 * step if step >= self._scale else step
        self._before = None

    def decline(self) -> None:
        """The step was not taken: its state is what it was."""
        if self._before is not None:
            self.optimizer.load_state_dict(self._before)
            self._before = None

    def forget(self) -> None:
        """Its own state stays: it belongs to whoever made it."""
        super().forget()
        self._scale = 1.0

    def state(self) -> dict[str, Any]:
        """Also its own."""
        return {**super().state(), "scale": self._scale, "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        super().load(state)
        self._scale = state["scale"]
        self.optimizer.load_state_dict(state["optimizer"])


class Linearised(Gradient):
    r"""The Gauss-Newton direction, with the damping of Levenberg and Marquardt.

    The damping is multiplied by :math:`\max(\frac13, 1 - (2\varrho - 1)^3)`, ϱ the ratio of the decrease of the
    objective, as it was proved, to that of the model (Nielsen's rule); a step that had to be shortened is one of
    ϱ = 0, so that the damping is doubled.

    Args:
        problem: gives the linearised problem at the present weights.
    """

    needs_curvature = False

    def __init__(self, problem: Callable[[], Problem]) -> None:
        super().__init__()
        self.problem, self._kappa, self._predicted = problem, 1.0, 0.0
        self._forcing = Forcing()

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """The minimiser of the model, as exactly as it pays, with the step 1 first."""
        self._forcing.at(point.function.data.name, float(point.gradient.norm()))
        problem = self.problem()
        tolerance = self._forcing.tolerance(check_tolerance(None, problem.output.dtype))
        solver = gauss_newton_solver(problem, "auto", min(tolerance, LOOSE))
        step = solver.solve(self._kappa, tolerance, self._forcing.most)
        step = step if solver.correct is None else accelerated(problem, step, solver.correct)
        square = float(sum(part.double().square().sum() for part in step.direction.values()))
        self._predicted = step.model_decrease + 0.5 * step.kappa * square
        self._iterations = step.iterations
        packed = point.function.layout.pack(step.direction)
        return packed if step.bend is None else packed + point.function.layout.pack(step.bend), 1.0

    def learn(self, before: Point, after: Point, step: float) -> None:
        """The damping of the next step."""
        super().learn(before, after, step)
        ratio = (before.value - after.value) / self._predicted if step >= 1 and self._predicted > 0 else 0.0
        self._forcing.learn(self._iterations, ratio)
        self._kappa = min(max(relaxed(self._kappa, ratio), 1e-12), 1e12)

    def forget(self) -> None:
        """More damping next time."""
        super().forget()
        self._kappa = min(4 * self._kappa, 1e12)

    def state(self) -> dict[str, Any]:
        """Also the damping."""
        return {**super().state(), "kappa": self._kappa, "forcing": self._forcing.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        super().load(state)
        self._kappa = state["kappa"]
        self._forcing.load(state["forcing"])


class Chosen(Gradient):
    """A function of the caller: from the weights and the gradient, by name, to a direction."""

    needs_curvature = False

    def __init__(self, function: Callable[[Tensors, Tensors], Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.function = function

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """What it returns, with the step 1 first."""
        layout = point.function.layout
        slopes = {name: part.clone() for name, part in layout.unpack(point.gradient).items()}
        found = self.function(dict(point.weights), slopes)
        wrong = [name for name, shape in layout.shapes if name not in found or found[name].shape != shape]
        if wrong:
            raise ValueError(f"the direction has no entry of the right shape for '{wrong[0]}'")
        return layout.pack(found), 1.0
