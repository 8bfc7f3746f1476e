r"""The gradient oracle (eq. grad_step): the linear model of the objective plus a proximal term."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from surefoot.chain import Chain
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.problem import Problem, check_kappa
from surefoot.oracles.space import ParameterSpace
from surefoot.oracles.step import Step


def gradient(
    chain: Chain,
    objective: Objective,
    kappa: float = 1.0,
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
) -> Step:
    r"""The minimiser of :math:`\langle\nabla F(u), v\rangle + \frac\kappa2\|v\|^2`.

    The minimiser is :math:`v = -\nabla F(u)/\kappa`, a gradient step of size 1/κ, and the model falls by
    :math:`\frac1{2\kappa}\|\nabla F(u)\|^2`.

    Args:
        chain: the network and its batch.
        objective: a loss bound to its targets.
        kappa: the inverse of the step size.
        params: the point, by path; the model's present parameters by default.
        regularizer: added to the loss.

    Raises:
        OracleError: if something is not finite, is in half precision, or does not fit.

    >>> import torch, surefoot as sf
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> chain = sf.Chain(model, x)
    >>> step = gradient(chain, sf.Square([[0.0]]), kappa=2.0, params={"weight": torch.tensor([[1.0, 0.0]])})
    >>> step.direction["weight"], step.model_decrease
    (tensor([[-4.5000, -6.0000]]), 56.25)
    """
    kappa = check_kappa(kappa)
    problem = Problem(chain, objective, params, regularizer)
    vector = ParameterSpace(problem).gradient()
    direction = {path: -slope / kappa for path, slope in problem.gradient.items()}
    square = float(vector.double().square().sum())
    return Step(direction, kappa, 0.5 * square / kappa, "solved in closed form", calls=problem.autodiff.calls)


__all__ = ["gradient"]
