"""Gauss-Newton and Newton steps as optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.certificate import Certificate
from surefoot.guarantees import require_smooth
from surefoot.objectives import Objective, Ridge
from surefoot.optim.base import Parameters
from surefoot.optim.damped import Damping, SecondOrder, Solver
from surefoot.optim.record import StepRecord
from surefoot.oracles.dual_gram import DualGram
from surefoot.oracles.problem import Problem, Step, check_tolerance
from surefoot.oracles.steps import METHODS, Method, solve_gauss_newton


class GaussNewton(SecondOrder):
    r"""Gauss-Newton steps: the loss is replaced by its quadratic, the network by its linear model.

    The certified κ is :attr:`surefoot.Certificate.damping`.

    Args:
        model: the network.
        objective: a convex loss without targets.
        damping: ``"adapted"``, ``"certified"`` or a number; see :class:`SecondOrder`.
        method: ``"dual_gram"``, ``"dual"`` or ``"dynamic"``; see :func:`surefoot.oracles.gauss_newton`.
        line_search: ``"armijo"`` or ``None``.
        kappa: the first κ where it is adapted.
        tolerance: of the inner solver.
        accumulate: the precision of its vectors.
        regularizer: a :class:`surefoot.objectives.Ridge`, added to the loss.
        params: the parameters that are optimised, or parameter groups; all that are trainable by default. The
            others do not move.
        lower: a number that the objective never falls below; see :class:`GuaranteedOptimizer`.
        progress: called with the record of each step.

    >>> import surefoot as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    >>> x = torch.randn(16, 2).double()
    >>> optimizer = GaussNewton(model, sf.CrossEntropy())
    >>> losses = [optimizer.step(x, (x[:, 0] > 0).long()) for _ in range(8)]
    >>> all(after < before for before, after in zip(losses, losses[1:])), losses[-1] < 0.01
    (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        damping: Damping = "adapted",
        method: Method = "dual_gram",
        line_search: Literal["armijo"] | None = None,
        kappa: float = 1.0,
        tolerance: float | None = None,
        accumulate: torch.dtype | None = torch.float64,
        regularizer: Ridge | None = None,
        params: Parameters | None = None,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
        super().__init__(
            model,
            objective,
            damping=damping,
            line_search=line_search,
            kappa=kappa,
            regularizer=regularizer,
            params=params,
            lower=lower,
            progress=progress,
        )
        self.method, self.tolerance, self.accumulate = method, tolerance, accumulate
        self._change: Tensor | None = None  # of the output, predicted at the last solve; and of which data
        self._data = ""

    def solver(self, problem: Problem, data: str) -> Solver:
        """The dual solvers keep the Gram matrix from one κ to the next, or start where the last solve ended."""
        if self.method == "dual_gram":
            system = DualGram(problem, self.accumulate)
            tolerance = check_tolerance(self.tolerance, problem.output.dtype)
            return lambda kappa: system.solve(kappa, tolerance)

        def found(kappa: float) -> Step:
            known = self._change if data == self._data and self.method == "dual" else None
            if known is not None and known.shape != problem.output.shape:
                known = None
            step = solve_gauss_newton(problem, kappa, self.method, self.tolerance, self.accumulate, known)
            self._change, self._data = step.output_change, data
            return step

        return found

    def certified_kappa(self, certificate: Certificate) -> float:
        """See :func:`surefoot.guarantees.damping`."""
        return certificate.damping

    def extra_state(self) -> dict[str, Any]:
        """Also where the next dual solve starts."""
        return {**super().extra_state(), "change": self._change, "data": self._data}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take it back."""
        super().load_extra_state(state)
        self._change, self._data = state["change"], state["data"]


class Newton(SecondOrder):
    r"""Newton steps: the objective is replaced by its quadratic model.

    The oracle doubles κ until the model is bounded below. The certified κ is 2L with the smoothness L on the ball:
    :math:`F(u + v) - F(u) - \langle\nabla F, v\rangle \le \frac L2\|v\|^2 \le
    \frac12v^\top(\nabla^2F + 2LI)v`, because no eigenvalue of :math:`\nabla^2F` is below −L.

    Args:
        model: the network.
        objective: a loss without targets.
        damping: ``"adapted"``, ``"certified"`` or a number; see :class:`SecondOrder`.
        method: ``"dynamic"`` or ``"cg"``; see :func:`surefoot.oracles.newton`.
        line_search: ``"armijo"`` or ``None``.
        kappa: the first κ where it is adapted.
        regularizer: a :class:`surefoot.objectives.Ridge`, added to the loss.
        params: the parameters that are optimised, or parameter groups; all that are trainable by default. The
            others do not move.
        lower: a number that the objective never falls below; see :class:`GuaranteedOptimizer`.
        progress: called with the record of each step.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        damping: Damping = "adapted",
        method: Literal["dynamic", "cg"] = "cg",
        line_search: Literal["armijo"] | None = None,
        kappa: float = 1.0,
        regularizer: Ridge | None = None,
        params: Parameters | None = None,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
    ) -> None:
        if method not in ("dynamic", "cg"):
            raise ValueError(f"method is 'dynamic' or 'cg', got {method!r}")
        super().__init__(
            model,
            objective,
            damping=damping,
            line_search=line_search,
            kappa=kappa,
            regularizer=regularizer,
            params=params,
            lower=lower,
            progress=progress,
        )
        self.method = method

    def solver(self, problem: Problem, data: str) -> Solver:
        """κ is doubled until the model is bounded below."""
        if self.method == "dynamic":
            from surefoot.oracles.dynamic import solve_dynamic

            return lambda kappa: solve_dynamic(problem, kappa, "newton", double=True)
        from surefoot.oracles.newton_conjugate import solve_conjugate

        return lambda kappa: solve_conjugate(problem, kappa, True, None)

    def certified_kappa(self, certificate: Certificate) -> float:
        """Twice the smoothness, rounded up."""
        require_smooth(certificate)
        return math.nextafter(2 * float(certificate.smoothness), math.inf)


__all__ = ["GaussNewton", "Newton"]
