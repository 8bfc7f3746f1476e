r"""The residual of a step of a model in single precision, measured in double.

Solvers judge themselves by passes in the precision of the model, before the step is rounded to it. Where a soft-max
is saturated, or the model is ill-conditioned, both hide most of the residual. So the gradient of the model is
evaluated once more from its definition,

.. math:: \nabla m(v) = \nabla F(u) + J^\top\nabla^2h\,Jv + \nabla^2r\,v + \kappa v

(for Newton's model with the curvature of the chain along the slope of the loss as well), with all passes in double
precision, at v as it is returned: three passes, besides the forward one. That is what the step says.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from surefoot.oracles.problem import Problem, Step


def measured(problem: Problem, step: Step, tolerance: float, newton: bool = False) -> Step:
    """The step with its residual and the decrease of its model in double precision.

    Args:
        problem: the objective around a point; of several processes, all of them ask.
        step: the minimiser of its Gauss-Newton or Newton model.
        tolerance: up to which residual it is solved.
        newton: whether the model is Newton's.
    """
    single = any(value.dtype != torch.float64 for value in (problem.output, *problem.parameters.values()))
    if not single or step.unbounded_at is not None:
        return step
    wide = problem.widened()

    def judged() -> Step:
        v, gradient = {path: part.double() for path, part in step.direction.items()}, wide.gradient
        curved = wide.curve(wide.autodiff.pushforward(v))
        along = wide.autodiff.bent(v, wide.slope, curved) if newton else wide.autodiff.pullback(curved)
        scale = decrease = size = 0.0
        for path, part in v.items():
            slope = gradient[path] + along[path] + (step.kappa + wide.weight(path)) * part
            scale += float(gradient[path].square().sum())
            size += float(slope.square().sum())
            decrease -= 0.5 * float(((gradient[path] + slope) * part).sum())
        residual = (size / scale) ** 0.5 if scale else 0.0
        solved = residual <= tolerance
        return replace(
            step,
            residual=residual,
            solved=solved,
            model_decrease=max(decrease, 0.0),
            status=_status(step, solved, residual, tolerance),
        )

    return wide.led(judged)


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


__all__ = ["measured"]
