r"""The Gauss-Newton oracle (eq. gn_step), by any of its solvers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from surefoot.chain import Chain
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.problem import OracleError, Problem, check_kappa
from surefoot.oracles.space import ParameterSpace
from surefoot.oracles.step import Step

Method = Literal["dual", "dual_gram", "dynamic"]
METHODS = ("dual", "dual_gram", "dynamic")

_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def gauss_newton(
    chain: Chain,
    objective: Objective,
    kappa: float = 0.1,
    method: Method = "dual",
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
    tolerance: float | None = None,
    accumulate: torch.dtype | None = torch.float64,
    warm_start: Tensor | None = None,
) -> Step:
    r"""The minimiser of the Gauss-Newton model.

    .. math:: \langle\nabla h, Jv\rangle + \tfrac12(Jv)^\top\nabla^2h\,Jv + \langle\nabla r, v\rangle
        + \tfrac12v^\top\nabla^2r\,v + \tfrac\kappa2\|v\|^2,

    with h and r at the present point and J the derivative of the chain there.

    Args:
        chain: the network and its batch.
        objective: a convex loss bound to its targets.
        kappa: the weight of the proximal term.
        method: ``"dual"``: conjugate gradients within 2d + 1 calls of the automatic-differentiation oracle, d the
            size of the output (:mod:`surefoot.oracles.dual`); ``"dual_gram"``: the same system from its Gram
            matrix, assembled layer by layer (:mod:`surefoot.oracles.dual_gram`); ``"dynamic"``: dynamic
            programming over the chain.
        params: the point, by path; the model's present parameters by default.
        regularizer: added to the loss.
        tolerance: of the gradient of the model at the result, relative to that at 0; by default 1e-6 in single and
            1e-12 in double precision.
        accumulate: the precision of the vectors of the dual solvers; that of the parameters if ``None``.
        warm_start: for the dual solvers a guess of Jv, such as the ``output_change`` of an earlier step.

    Raises:
        OracleError: if something is not finite, not convex, in half precision, or does not fit.

    >>> import surefoot as sf
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])
    >>> step = gauss_newton(sf.Chain(torch.nn.Linear(1, 1), x), sf.Square(y), kappa=1e-3)
    >>> step.solved, step.calls <= 5
    (True, True)
    """
    kappa = check_kappa(kappa)
    if method not in METHODS:
        raise OracleError(f"method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
    problem = Problem(chain, objective, params, regularizer)
    return solve(problem, kappa, method, tolerance, accumulate, warm_start)


def solve(
    problem: Problem,
    kappa: float,
    method: Method = "dual",
    tolerance: float | None = None,
    accumulate: torch.dtype | None = torch.float64,
    warm_start: Tensor | None = None,
) -> Step:
    """The same for a problem that is set up."""
    tolerance = check_tolerance(tolerance, problem.output.dtype)
    if method == "dynamic":
        from surefoot.oracles.dynamic import solve_dynamic
        from surefoot.oracles.factor import require_convex

        require_convex(problem.objective)
        ParameterSpace(problem)  # refuses a model in which nothing varies
        return solve_dynamic(problem, kappa, model="gauss_newton")
    if method == "dual_gram":
        from surefoot.oracles.dual_gram import DualGram

        return DualGram(problem, accumulate).solve(kappa, tolerance, warm_start)
    from surefoot.oracles.dual import solve_dual

    return solve_dual(problem, kappa, tolerance, accumulate, warm_start)


def check_tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    """The tolerance, or the default for the type.

    Raises:
        OracleError: if it is not between 0 and 1.
    """
    if tolerance is None:
        return _TOLERANCE.get(dtype, 1e-6)
    if not 0 < tolerance < 1:
        raise OracleError(f"the tolerance is a number between 0 and 1, got {tolerance!r}")
    return float(tolerance)


__all__ = ["METHODS", "Method", "check_tolerance", "gauss_newton", "solve"]
