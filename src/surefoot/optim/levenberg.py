"""Gauss-Newton and Newton steps as directions, damped by Levenberg's and Marquardt's rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from surefoot.chain import Chain
from surefoot.objectives import Ridge
from surefoot.optim.directions import Gradient
from surefoot.optim.problem import Point, Problem
from surefoot.oracles import Step, gauss_newton, newton
from surefoot.program.checks import is_loader

_LEAST, _MOST = 1e-12, 1e12  # of an adapted damping
_LOOSEST, _PART = 0.1, 0.5  # tolerance of a solve, and its part of the last decrease of the gradient


class LevenbergMarquardt(Gradient):
    r"""The minimiser of the Gauss-Newton or Newton model with the damping κ, and the step 1 first.

    *Damping.* After a step κ is multiplied by :math:`\max(\frac13, 1 - (2\varrho - 1)^3)`, ϱ the ratio of the
    decrease to that of the model (Nielsen's rule); a step that had to be shortened is one of ϱ = 0, so that κ is
    doubled.

    *Tolerance.* A step is solved until the gradient of the model is at most :math:`\eta_k\|\nabla F(u_k)\|`. Far
    from a minimum a tenth is enough. Near one, η follows the decrease of the gradient that was achieved last,

    .. math:: \eta_k = \min\Big(\frac1{10}, \frac12\frac{\|\nabla F(u_k)\|}{\|\nabla F(u_{k-1})\|}\Big),

    which keeps the convergence superlinear (proof in the documentation: Inexact steps).

    *Acceleration.* Gauss-Newton steps are bent by their geodesic acceleration where a factor is at hand.

    Args:
        model: which one.
        damping: the first κ.
        adapt: whether κ is adapted.
        solver: of the oracle; by default the one that is predicted to cost least.
    """

    def __init__(
        self,
        model: Literal["gauss_newton", "newton"] = "gauss_newton",
        damping: float = 1.0,
        adapt: bool = True,
        solver: str = "auto",
    ) -> None:
        super().__init__()
        if not 0 < damping < math.inf:
            raise ValueError(f"the damping is a positive number, got {damping!r}")
        self.model, self.damping, self.adapt, self.solver = model, float(damping), adapt, solver
        self._predicted = 0.0
        self._last: float | None = None  # the norm of the gradient at the last step
        self._chain: tuple[Problem, Chain] | None = None

    def propose(self, point: Point) -> tuple[Tensor, float]:
        problem, size = point.problem, point.gradient_norm
        ratio = size / self._last if self._last else 1.0
        tolerance, self._last = min(_LOOSEST, _PART * ratio) if self.adapt else None, size
        if problem.processes is not None:
            problem.processes.ask((self.damping, tolerance))
        step = self.solve(problem, self.damping, tolerance)
        direction = problem.pack(step.direction)
        self._predicted = step.model_decrease + 0.5 * step.kappa * float(direction @ direction)
        return (direction if step.bend is None else direction + problem.pack(step.bend)), 1.0

    def solve(self, problem: Problem, damping: float, tolerance: float | None) -> Step:
        """The step at the weights of the model; where several processes have the data, all of them call this."""
        if self._chain is None or self._chain[0] is not problem:
            data = problem.x
            if problem.processes is not None and not is_loader(data):
                data = [(data, problem.y)] if len(problem.y) else []
            self._chain = problem, Chain(problem.model, data)
        single = problem.stream is None
        options: dict[str, Any] = {"regularizer": problem.regularizer, "method": self.solver}
        if tolerance is not None:
            finest = 1e-6 if not problem.is_double else 1e-12
            options["tolerance"] = max(tolerance, finest)
        if problem.processes is not None:
            options["group"] = problem.processes.group
        loss = problem.loss.bound_to(problem.y) if single else problem.loss
        with _constant(problem):
            if self.model == "newton":
                return newton(self._chain[1], loss, damping, **options)
            return gauss_newton(self._chain[1], loss, damping, bend=self.adapt and single, **options)

    def learn(self, before: Point, after: Point, step: float) -> None:
        if self.adapt and self._predicted > 0:
            ratio = (before.value - after.value) / self._predicted if step >= 1 else 0.0
            factor = max(1 / 3, 1 - (2 * min(max(ratio, 0.0), 1.0) - 1) ** 3)
            self.damping = min(max(self.damping * factor, _LEAST), _MOST)

    def reject(self) -> None:
        if self.adapt:
            self.damping = min(4 * self.damping, _MOST)

    def forget(self) -> None:
        self._last, self._chain = None, None

    def state(self) -> dict[str, Any]:
        return {"damping": self.damping, "last": self._last}

    def load(self, state: dict[str, Any]) -> None:
        self.damping, self._last = state["damping"], state["last"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chain": None}  # which belongs to this model, and not to that of a copy


def check_ridge(regularizer: Any) -> None:
    """Second-order models take a ridge.

    Raises:
        TypeError: if it is another regulariser.
    """
    if not isinstance(regularizer, Ridge | None):
        raise TypeError(f"second-order models take a surefoot.Ridge as regulariser, got {regularizer!r}")


@contextmanager
def _constant(problem: Problem) -> Iterator[None]:
    """Parameters that are not optimised ask for no gradient meanwhile."""
    others: list[nn.Parameter] = [
        value for name, value in problem.model.named_parameters()
        if value.requires_grad and name not in problem.weights
    ]  # fmt: skip
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
