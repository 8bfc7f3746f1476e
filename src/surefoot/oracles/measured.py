r"""The residual of a step of a model in single precision, measured in double.

Solvers judge themselves by passes in the precision of the model, before the step is rounded to it. Where a
soft-max is saturated, or the model is ill-conditioned, both hide most of the residual. So
:math:`\nabla m(v) = \nabla F(u) + J^\top\nabla^2h\,Jv + \nabla^2r\,v + \kappa v` (for Newton's model with the
curvature of the chain along the slope of the loss) is evaluated once more, in double precision, at v as it is
returned: Jv comes with the forward pass where operations have forward derivatives, and two pull-backs follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from surefoot.chain.autodiff import Autodiff
from surefoot.graph.nodes import in_double
from surefoot.linear_solve import Flat
from surefoot.oracles.problem import Problem, Step, curved_along, slope_at


def is_measured(problem: Problem) -> bool:
    """Whether it is in single precision, so that its steps are measured."""
    return any(value.dtype != torch.float64 for value in (problem.output, *problem.parameters.values()))


def measured(problem: Problem, step: Step, tolerance: float, newton: bool = False) -> Step:
    """The step with its residual and the decrease of its model in double precision.

    Args:
        problem: the objective around a point; of several processes, all of them ask.
        step: the minimiser of its Gauss-Newton or Newton model.
        tolerance: up to which residual it is solved.
        newton: whether the model is Newton's.
    """
    if not is_measured(problem) or not any(bool(part.any()) for part in step.direction.values()):
        return step
    v = {path: part.double() for path, part in step.direction.items()}
    chain, wide = problem.chain, {path: in_double(value) for path, value in problem.point.items()}
    oracle: Any = chain.autodiff(wide, problem.processes) if problem.in_pieces else None
    oracle = oracle or Autodiff(chain.graph, chain.inputs, wide, along=v)
    if isinstance(problem.autodiff, Autodiff) and problem.autodiff.is_traced:
        oracle.trace()

    dot = Flat().dot

    def judged() -> Step:
        ahead = getattr(oracle, "pushed", None)
        change = oracle.pushforward(v) if ahead is None else ahead
        slope = slope_at(problem.objective, oracle.value)
        bent = slope + curved_along(problem.objective, oracle.value, change)
        left = oracle.bent(v, slope, bent) if newton else oracle.pullback(bent)
        gradient, size, scale, product = oracle.pullback(slope), 0.0, 0.0, 0.0
        for path, part in v.items():
            weight = problem.weight(path)
            first, rest = gradient.pop(path), torch.add(left.pop(path), part, alpha=step.kappa + weight)
            if weight:
                first, rest = (torch.add(found, wide[path], alpha=weight) for found in (first, rest))
            size, scale = size + dot(rest, rest), scale + dot(first, first)
            product += dot(first, part) + dot(rest, part)
        residual = (size / scale) ** 0.5 if scale else 0.0
        solved, status = residual <= tolerance, step.status
        if not (solved and step.solved):
            verdict = "solved" if solved else f"not solved to the tolerance {tolerance:.2g}"
            how = status.removeprefix("solved ")
            status = f"{verdict}: measured in double precision the residual is {residual:.2g}; {how}"
        found = replace(step, residual=residual, solved=solved, status=status)
        decrease, change = max(-0.5 * product, 0.0), change.to(problem.output.dtype)
        return replace(found, model_decrease=decrease, output_change=change)

    return problem.led(judged, oracle)
