r"""The residual of a step of a model in single precision, measured in double.

Solvers judge themselves by passes in the precision of the model, before the step is rounded to it. Where a
soft-max is saturated, or the model is ill-conditioned, both hide most of the residual. So the gradient of the
model is evaluated once more from its definition,

.. math:: \nabla m(v) = \nabla F(u) + J^\top\nabla^2h\,Jv + \nabla^2r\,v + \kappa v

(for Newton's model with the curvature of the chain along the slope of the loss as well), with all passes in double
precision, at v as it is returned: Jv comes with the forward pass, by forward differentiation where operations have
it, and one pull-back follows. That is what the step says.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from surefoot.chain.autodiff import Autodiff
from surefoot.chain.batched import Batched
from surefoot.oracles.problem import Problem, Step, curved_along, slope_at

_NEAR = 1e-4  # relative distance of two slopes up to which one norm stands for the other


def measured(problem: Problem, step: Step, tolerance: float, newton: bool = False) -> Step:
    """The step with its residual and the decrease of its model in double precision.

    Args:
        problem: the objective around a point; of several processes, all of them ask.
        step: the minimiser of its Gauss-Newton or Newton model.
        tolerance: up to which residual it is solved.
        newton: whether the model is Newton's.
    """
    single = any(value.dtype != torch.float64 for value in (problem.output, *problem.parameters.values()))
    if not single or not any(bool(part.any()) for part in step.direction.values()):
        return step
    v = {path: part.double() for path, part in step.direction.items()}
    oracle = problem.chain.autodiff(problem.point, problem.processes, double=True, along=v)

    def judged() -> Step:
        ahead = getattr(oracle, "pushed", None)
        change = oracle.pushforward(v) if ahead is None else ahead
        slope = slope_at(problem.objective, oracle.value)
        bent = slope + curved_along(problem.objective, oracle.value, change)
        left = oracle.bent(v, slope, bent) if newton else oracle.pullback(bent)
        scale = _scale(problem, oracle, slope)
        size, gained, bend = 0.0, float(torch.dot(slope.reshape(-1), change.reshape(-1))), 0.0
        for path, part in v.items():
            weight = problem.weight(path)
            rest = torch.add(left[path], part, alpha=step.kappa + weight)
            if weight:
                u = problem.parameters[path].double()
                rest.add_(u, alpha=weight)
                gained += weight * float((u * part).sum())
            size += float(torch.linalg.vector_norm(rest)) ** 2
            bend += float(torch.dot(rest.reshape(-1), part.reshape(-1)))
        residual = size**0.5 / scale if scale else 0.0
        solved = residual <= tolerance
        return replace(
            step,
            residual=residual,
            solved=solved,
            model_decrease=max(-0.5 * (gained + bend), 0.0),
            status=_status(step, solved, residual, tolerance),
        )

    return problem.led(judged, oracle)


def _scale(problem: Problem, oracle: Autodiff | Batched, slope: Tensor) -> float:
    """The norm of the gradient: that in single precision, unless the slope of the loss shows that it is wrong."""
    away = float(torch.linalg.vector_norm(slope - problem.slope))
    found = problem.gradient
    if not away <= _NEAR * float(torch.linalg.vector_norm(slope)):
        pulled = oracle.pullback(slope)
        found = {p: g + problem.weight(p) * problem.parameters[p].double() for p, g in pulled.items()}
    return sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in found.values()) ** 0.5


def _status(step: Step, solved: bool, residual: float, tolerance: float) -> str:
    """What the solver says, where that is so; else what was measured."""
    if solved == step.solved:
        return step.status if solved else f"{step.status}; in double precision it is {residual:.2g}"
    if solved:
        return f"solved: in double precision the residual is {residual:.2g}; {step.status}"
    return (
        f"not solved to the tolerance {tolerance:.2g}: in double precision the residual of the step is "
        f"{residual:.2g}; use double precision, or a larger kappa or tolerance; {step.status}"
    )
