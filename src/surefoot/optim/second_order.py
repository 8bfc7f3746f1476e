"""Gauss-Newton and Newton steps as optimizers."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.gradient import ProvedGradient
from surefoot.certificate import Certificate
from surefoot.guarantees import require_smooth
from surefoot.objectives import Objective
from surefoot.optim.damped import SecondOrder, Solver
from surefoot.optim.stored import Tensors, square_of
from surefoot.oracles.dual_gram import DualGram
from surefoot.oracles.dynamic import solve_dynamic
from surefoot.oracles.newton_conjugate import solve_conjugate
from surefoot.oracles.problem import Problem, Step, check_tolerance
from surefoot.oracles.steps import METHODS, Method, solve_gauss_newton


class GaussNewton(SecondOrder):
    r"""Gauss-Newton steps: the loss is replaced by its quadratic, the network by its linear model.

    The certified κ is :attr:`surefoot.Certificate.damping`.

    Args:
        model: the network.
        objective: a convex loss without targets.
        method: ``"dual_gram"``, ``"dual"`` or ``"dynamic"``; see :func:`surefoot.oracles.gauss_newton`.
        tolerance: of the inner solver.
        accumulate: the precision of its vectors.
        options: ``damping``, ``line_search``, ``kappa``, ``regularizer``, ``params``, ``lower``, ``until``,
            ``progress``; see
            :class:`SecondOrder`.

    >>> import surefoot as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    >>> x = torch.randn(16, 2).double()
    >>> optimizer = GaussNewton(model, sf.CrossEntropy())
    >>> losses = [optimizer.step(x, (x[:, 0] > 0).long()) for _ in range(8)]
    >>> all(after < before for before, after in zip(losses, losses[1:])), losses[-1] < 0.01
    (True, True)
    """

    theorem = "gauss_newton"

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        method: Method = "dual_gram",
        tolerance: float | None = None,
        accumulate: torch.dtype | None = torch.float64,
        **options: Any,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
        super().__init__(model, objective, **options)
        self.method, self.tolerance, self.accumulate = method, tolerance, accumulate
        self.forget()

    def forget(self) -> None:
        """Drop where the next dual solve starts."""
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

    def curvature(self, proved: ProvedGradient, move: Tensors, certificate: Certificate) -> float:
        """That of the Gauss-Newton model with this κ, which majorises the objective; L‖v‖² where that is less."""
        square = square_of(move)
        return min(proved.bent(move) + self.kappa * square, float(certificate.smoothness) * square)

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
        method: ``"dynamic"`` or ``"cg"``; see :func:`surefoot.oracles.newton`.
        options: ``damping``, ``line_search``, ``kappa``, ``regularizer``, ``params``, ``lower``, ``until``,
            ``progress``; see
            :class:`SecondOrder`.
    """

    theorem = "newton"

    def __init__(
        self, model: nn.Module, objective: Objective, *, method: Literal["dynamic", "cg"] = "cg", **options: Any
    ) -> None:
        if method not in ("dynamic", "cg"):
            raise ValueError(f"method is 'dynamic' or 'cg', got {method!r}")
        super().__init__(model, objective, **options)
        self.method = method

    def solver(self, problem: Problem, data: str) -> Solver:
        """κ is doubled until the model is bounded below."""
        if self.method == "dynamic":
            return lambda kappa: solve_dynamic(problem, kappa, "newton", double=True)
        return lambda kappa: solve_conjugate(problem, kappa, True, None)

    def certified_kappa(self, certificate: Certificate) -> float:
        """Twice the smoothness, rounded up."""
        require_smooth(certificate)
        return math.nextafter(2 * float(certificate.smoothness), math.inf)

    def curvature(self, proved: ProvedGradient, move: Tensors, certificate: Certificate) -> float:
        """L‖v‖², by Taylor's formula."""
        return float(certificate.smoothness) * square_of(move)


__all__ = ["GaussNewton", "Newton"]
