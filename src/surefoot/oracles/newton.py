r"""Newton steps: :math:`\min_v \frac12v^\top\nabla^2F(u)v + \nabla F(u)^\top v + \frac\kappa2\|v\|^2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from surefoot.chain import Chain
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.conjugate import solve_conjugate
from surefoot.oracles.dynamic import solve_dynamic
from surefoot.oracles.problem import OracleError, Problem
from surefoot.oracles.step import Step


def newton(
    chain: Chain,
    objective: Objective,
    kappa: float,
    method: Literal["dynamic", "cg"] = "dynamic",
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
    double: bool = True,
    tolerance: float | None = None,
) -> Step:
    r"""The regularised Newton oracle (eq. newton_step): the minimiser of the quadratic model of F at u.

    The model with :math:`\frac\kappa2\|v\|^2` has one minimiser if :math:`\nabla^2F(u) + \kappa I` is positive
    definite; every :math:`\kappa` above the smoothness of F will do.

    Args:
        chain: the network and its batch.
        objective: a loss bound to its targets.
        kappa: the weight of the proximal term, positive.
        method: "dynamic", exact and linear in the depth (Algorithm "Newton oracle"); or "cg", conjugate gradients
            on Hessian-vector products, which needs no matrices.
        params: the point, by path; the model's present parameters by default.
        regularizer: added to the objective.
        double: whether kappa is doubled until the model is bounded below; if not, the step is zero and not solved.
        tolerance: of "cg", on the relative residual; by default near what the precision allows.

    Raises:
        OracleError: if something does not fit or is not finite.

    >>> import torch
    >>> from torch import nn
    >>> from surefoot.objectives import Square
    >>> model = nn.Linear(1, 1, bias=False)
    >>> chain = Chain(model, torch.tensor([[2.0]]))
    >>> step = newton(chain, Square(torch.tensor([[6.0]])), kappa=1e-6)
    >>> round(float(model.weight.detach() + step.direction["weight"]), 4)
    3.0
    >>> print(step.status)
    the minimiser of the Newton model with κ = 1e-06, by dynamic programming
    """
    problem = Problem(chain, objective, params, regularizer)
    if method == "dynamic":
        return solve_dynamic(problem, kappa, "newton", double)
    if method == "cg":
        return solve_conjugate(problem, kappa, double, tolerance)
    raise OracleError(f"the method of a Newton step is 'dynamic' or 'cg', got {method!r}")
