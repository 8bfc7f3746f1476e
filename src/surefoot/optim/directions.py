"""Where to go from a point: directions that a proof then judges.

Each is a class with :meth:`propose`, a direction and the step size to try first, and :meth:`learn`, told what step
was taken. ``needs_curvature`` says whether a step that is much too short would spoil it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.optim.forcing import Forcing, relaxed
from surefoot.optim.point import Point
from surefoot.optim.vectors import Tensors
from surefoot.oracles.gauss_newton import LOOSE
from surefoot.oracles.problem import Problem, check_tolerance
from surefoot.oracles.steps import accelerated, gauss_newton_solver

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
        layout = point.function.layout
        length = _FIRST * (layout.norm(point.vector) or 1.0) if self._length is None else 2 * self._length
        return length / (layout.norm(direction) or 1.0)

    def learn(self, before: Point, after: Point, step: float) -> None:
        """Remember how long it was."""
        self._length = after.function.layout.norm(after.vector - before.vector) or self._length

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
        dot = after.function.layout.dot
        bent = dot(move, after.gradient - before.gradient)
        self._length = min(dot(move, move) / bent, 1e3 * step) if bent > 0 else 2 * step


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
            dot = point.function.layout.dot
            direction = polak_ribiere(dot, gradient, *self._last)
            if not dot(gradient, direction) < 0:
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


def polak_ribiere(
    dot: Callable[[Tensor, Tensor], float], gradient: Tensor, before: Tensor, last: Tensor
) -> Tensor:
    """Minus the gradient, plus the part of the last direction that Polak and Ribière's formula gives."""
    weight = max(0.0, dot(gradient, gradient - before) / (dot(before, before) or 1.0))
    return weight * last - gradient


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
