"""Where to go from a point: directions that a proof then judges."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.optim.problem import Point

_FIRST = 0.1  # length of the very first step along a gradient, relative to the weights


class Gradient:
    """Against the gradient; the first trial is twice as long as the last step. Other directions are subclasses.

    Args:
        trials: step sizes to try.
    """

    needs_curvature = False  # whether a step that is much too short would spoil it

    def __init__(self, trials: int = 24) -> None:
        self.trials = trials
        self._length: float | None = None  # of the last step

    def propose(self, point: Point) -> tuple[Tensor, float]:
        """A direction and the step size to try first."""
        length = _FIRST * (float(point.vector.norm()) or 1.0) if self._length is None else 2 * self._length
        return -point.gradient, length / (point.gradient_norm or 1.0)

    def learn(self, before: Point, after: Point, step: float) -> None:
        """This step was taken."""
        self._length = float((after.vector - before.vector).norm()) or self._length

    def reject(self) -> None:
        """No step along the proposal was taken."""
        self.forget()

    def forget(self) -> None:
        """Start anew: the function is another one, or the weights are."""
        self._length = None

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, lists of them."""
        return {"length": self._length}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`state`."""
        self._length = state["length"]


class FromOptimizer(Gradient):
    """The step of a ``torch.optim`` optimizer: its state goes on only if the step is taken."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(trials=8)
        self.optimizer = optimizer
        self._before: dict[str, Any] | None = None
        self._scale = 1.0  # of its steps, which grows with success

    def propose(self, point: Point) -> tuple[Tensor, float]:
        self._before = copy.deepcopy(self.optimizer.state_dict())
        problem, slopes = point.problem, point.problem.unpack(point.gradient)
        self.optimizer.zero_grad()  # parameters that do not vary at present have no gradient
        for name, parameter in problem.weights.items():
            parameter.grad = slopes[name].to(parameter.dtype)
        try:
            self.optimizer.step()
            moved = problem.pack(problem.weights) - point.vector
        finally:
            problem.write(point)
        return moved, self._scale

    def learn(self, before: Point, after: Point, step: float) -> None:
        self._scale = 2 * step if step >= self._scale else step
        self._before = None

    def reject(self) -> None:
        if self._before is not None:
            self.optimizer.load_state_dict(self._before)
            self._before = None

    def forget(self) -> None:  # its own state stays: it belongs to whoever made it
        self._scale = 1.0

    def state(self) -> dict[str, Any]:
        return {"scale": self._scale, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._scale = state["scale"]
        self.optimizer.load_state_dict(state["optimizer"])


class FromFunction(Gradient):
    """A function of the caller: from the weights and the gradient, by name, to a direction."""

    def __init__(self, function: Callable[[dict[str, Tensor], dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
        super().__init__(trials=8)
        self.function = function

    def propose(self, point: Point) -> tuple[Tensor, float]:
        slopes = {name: part.clone() for name, part in point.problem.unpack(point.gradient).items()}
        direction = self.function(dict(point.weights), slopes)
        for name, value in point.weights.items():
            if name not in direction or direction[name].shape != value.shape:
                raise ValueError(f"the direction has no entry of the right shape for '{name}'")
        return point.problem.pack(direction), 1.0


def from_outside(given: Any, weights: Mapping[str, nn.Parameter]) -> Gradient:
    """The direction of a ``torch.optim`` class or instance, or of a function.

    Raises:
        ValueError: if it is none of them, or an optimizer lacks a parameter.
    """
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        make: Any = given
        given = make(weights.values())
    if isinstance(given, torch.optim.Optimizer):
        members = {id(value) for group in given.param_groups for value in group["params"]}
        for name, value in weights.items():
            if id(value) not in members:
                raise ValueError(f"{type(given).__name__} does not hold '{name}': give it model.parameters()")
        return FromOptimizer(given)
    if callable(given) and not isinstance(given, str | type):
        return FromFunction(given)
    raise ValueError(
        "direction is 'lbfgs', 'gradient', 'gauss_newton', 'newton', a torch.optim class or instance, or a "
        f"function of weights and gradient, got {given!r}"
    )
