"""Gauss-Newton and Newton steps as optimizers."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import nn

from surefoot.certificate import Certificate
from surefoot.guarantees import GuaranteeError, composite_iterations, gap_of, require_room, require_smooth
from surefoot.objectives import Objective
from surefoot.optim.damped import Proved, SecondOrder, Solver
from surefoot.optim.evaluation import explained
from surefoot.optim.stored import Tensors, square_of
from surefoot.oracles.dynamic import solve_dynamic
from surefoot.oracles.gauss_newton import LOOSE
from surefoot.oracles.newton import solve_conjugate
from surefoot.oracles.problem import Problem, Step, check_tolerance
from surefoot.oracles.steps import (
    METHODS,
    NEWTON_METHODS,
    Method,
    accelerated,
    gauss_newton_solver,
    newton_method,
)


class GaussNewton(SecondOrder):
    r"""Gauss-Newton steps: the loss is replaced by its quadratic, the network by its linear model.

    The certified κ is :attr:`surefoot.Certificate.damping`.

    Args:
        model: the network.
        objective: a convex loss without targets.
        method: ``"auto"`` or the name of one; see :func:`surefoot.oracles.gauss_newton`.
        tolerance: of the inner solver. By default, ``"auto"`` with a damping that is adapted solves inexactly, by
            the forcing sequence of :mod:`surefoot.optim.forcing`; everything else solves exactly.
        acceleration: whether steps are bent by their geodesic acceleration
            (:func:`surefoot.oracles.steps.accelerated`), for methods with a Gram matrix; by default where
            ``"auto"`` with a damping that is adapted chose such a method.
        options: ``damping``, ``line_search``, ``kappa``, ``regularizer``, ``params``, ``lower``, ``until``,
            ``progress``; see :class:`SecondOrder`.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    >>> x = torch.randn(16, 2).double()
    >>> optimizer = sf.GaussNewton(model, sf.CrossEntropy())
    >>> losses = [optimizer.step(x, (x[:, 0] > 0).long()) for _ in range(8)]
    >>> all(after < before for before, after in zip(losses, losses[1:])), losses[-1] < 0.01
    (True, True)
    """

    theorem = "gauss_newton"

    @explained
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        method: Method = "auto",
        tolerance: float | None = None,
        acceleration: bool | None = None,
        **options: Any,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
        if acceleration and method not in ("auto", "primal_gram", "dual_gram"):
            raise ValueError(f"an acceleration needs method='primal_gram' or 'dual_gram', got {method!r}")
        super().__init__(model, objective, **options)
        if acceleration and self.damping == "certified":
            raise ValueError("a certified step is not bent: its decrease is proved as it is")
        self.accelerates = method == "auto" and self.adapts if acceleration is None else acceleration
        self.method, self.tolerance = method, tolerance

    def solver(self, problem: Problem, data: str) -> Solver:
        """What does not depend on κ is computed once."""
        exact = check_tolerance(self.tolerance, problem.output.dtype)
        tolerance, most = self.forced(exact) if self.tolerance is None and self.method == "auto" else (exact, None)
        fine = min(tolerance, LOOSE)  # methods are compared at an accuracy that is that of the step
        solver = gauss_newton_solver(problem, self.method, fine)
        if solver.choice is not None:
            tolerance = tolerance if solver.choice.method == "primal" else fine
        problem.trace()  # once per graph

        def solved(kappa: float) -> Step:
            step = solver.solve(kappa, tolerance, most)
            if self.accelerates and solver.correct is not None:
                return accelerated(problem, step, solver.correct)
            return step

        return solved

    def certified_kappa(self, certificate: Certificate) -> float:
        """See :func:`surefoot.guarantees.damping`."""
        return certificate.damping

    def iterations(self, eps: float, certificate: Certificate, gap: float | None = None) -> int:
        r"""After how many steps with a fixed damping :math:`\kappa` one was no longer than
        :math:`\varepsilon/\kappa`, before the first is taken; see
        :func:`surefoot.guarantees.composite_iterations`.

        Args:
            eps: the accuracy.
            certificate: of the objective on a ball around the present weights.
            gap: :math:`F(u_0) - F_{\mathrm{low}}`, by default what the bound of the certificate says.

        Raises:
            GuaranteeError: if the damping is not fixed or too small, or the ball may be left before.
        """
        fixed, needed = self.damping not in ("adapted", "certified"), self.certified_kappa(certificate)
        if not fixed or self.kappa < needed:
            raise GuaranteeError(
                f"a number of steps is proved for a fixed damping of at least {needed:.6g}, that of the "
                f"certificate, and this is {self.damping!r}: use GaussNewton(…, damping=certificate.damping)"
            )
        if gap is None and self.ridge is not None:
            raise GuaranteeError("the certificate is that of the objective without its regulariser: give the gap")
        most = gap_of(certificate) if gap is None else gap
        require_room(certificate, most, eps)
        return composite_iterations(self.kappa, most, eps)

    def curvature(self, proved: Proved, move: Tensors, certificate: Certificate) -> float:
        """That of the Gauss-Newton model with this κ, which majorises the objective; L‖v‖² where that is less."""
        square = square_of(move)
        return min(proved.bent(move) + self.kappa * square, float(certificate.smoothness) * square)


class Newton(SecondOrder):
    r"""Newton steps: the objective is replaced by its quadratic model.

    The oracle doubles κ until the model is bounded below. The certified κ is 2L with the smoothness L on the ball:
    :math:`F(u + v) - F(u) - \langle\nabla F, v\rangle \le \frac L2\|v\|^2 \le
    \frac12v^\top(\nabla^2F + 2LI)v`, because no eigenvalue of :math:`\nabla^2F` is below −L.

    Args:
        model: the network.
        objective: a loss without targets.
        method: ``"auto"``, ``"dynamic"`` or ``"cg"``; see :func:`surefoot.oracles.newton`. Conjugate gradients
            solve inexactly where the damping is adapted, by the forcing sequence of
            :mod:`surefoot.optim.forcing`.
        options: ``damping``, ``line_search``, ``kappa``, ``regularizer``, ``params``, ``lower``, ``until``,
            ``progress``; see :class:`SecondOrder`.

    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), torch.eye(2)
    >>> optimizer = sf.Newton(model, sf.CrossEntropy(), regularizer=sf.Ridge(0.01))
    >>> losses = [optimizer.step(x, torch.tensor([0, 1])) for _ in range(5)]
    >>> losses[-1] < losses[0]
    True
    """

    theorem = "newton"

    @explained
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        method: Literal["auto", "dynamic", "cg"] = "auto",
        **options: Any,
    ) -> None:
        if method not in NEWTON_METHODS:
            raise ValueError(f"method is one of {', '.join(map(repr, NEWTON_METHODS))}, got {method!r}")
        super().__init__(model, objective, **options)
        self.method = method

    def solver(self, problem: Problem, data: str) -> Solver:
        """κ is doubled until the model is bounded below."""
        exact = check_tolerance(None, problem.output.dtype, 1e-5, 1e-10)
        tolerance, most = self.forced(exact)
        if newton_method(problem, self.method, tolerance, most)[0] == "dynamic":
            return lambda kappa: solve_dynamic(problem, kappa, "newton", double=True)
        return lambda kappa: solve_conjugate(problem, kappa, True, tolerance, most, checked=False)

    def certified_kappa(self, certificate: Certificate) -> float:
        """Twice the smoothness, rounded up."""
        require_smooth(certificate)
        return math.nextafter(2 * float(certificate.smoothness), math.inf)

    def curvature(self, proved: Proved, move: Tensors, certificate: Certificate) -> float:
        """L‖v‖², by Taylor's formula."""
        return float(certificate.smoothness) * square_of(move)
