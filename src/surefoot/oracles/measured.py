r"""The residual of a step of a model in single precision, measured in double.

Solvers judge themselves by passes in the precision of the model, before the step is rounded to it. Where a
soft-max is saturated, or the model is ill-conditioned, both hide most of the residual. So
:math:`\nabla m(v) = \nabla F(u) + J^\top\nabla^2h\,Jv + \nabla^2r\,v + \kappa v` (for Newton's model with the
curvature of the chain along the slope of the loss) is evaluated once more, in double precision, at v as it is
returned: Jv comes with the forward pass where operations have forward derivatives, and a pull-back follows.
Another one, for the norm of :math:`\nabla F(u)`, is made where that of the solver may be round-off, or the step is
not solved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.chain.autodiff import Autodiff
from surefoot.graph.nodes import in_double
from surefoot.linear_solve import inner, norm
from surefoot.oracles.problem import Problem, Step, curved_along

_AGREE = 1e-5  # of two values of ⟨∇F(u), v⟩, relative to the lengths


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
    if not is_measured(problem) or not problem.norm(step.direction):
        return step
    v = {path: part.double() for path, part in step.direction.items()}
    chain, wide = problem.chain, {path: in_double(value) for path, value in problem.point.items()}
    oracle: Any = problem.oracle(double=True) if problem.in_pieces else None
    oracle = oracle or Autodiff(chain.graph, chain.inputs, wide, along=v)
    if isinstance(problem.autodiff, Autodiff) and problem.autodiff.is_traced:
        oracle.trace()

    def judged() -> Step:
        ahead = getattr(oracle, "pushed", None)
        change = oracle.pushforward(v) if ahead is None else ahead
        slope, curved = curved_along(problem.objective, oracle.value, change)
        bent = slope + curved
        left = oracle.bent(v, slope, bent) if newton else oracle.pullback(bent)
        parts = []
        for path, part in v.items():
            weight, ridge = problem.weight(path), 0.0
            rest = torch.add(left.pop(path), part, alpha=step.kappa + weight)
            if weight:
                rest, ridge = rest.add_(wide[path], alpha=weight), weight * inner(wide[path], part)
            parts.append((inner(rest, rest), inner(rest, part), ridge))
        size, along, ridge = map(sum, zip(*parts, strict=True))
        inside = inner(slope, change) + ridge
        scale = _as_solved(problem, step.direction, inside)
        if scale is None or size**0.5 > tolerance * scale:
            first = oracle.pullback(slope)
            whole = (torch.add(first.pop(path), wide[path], alpha=problem.weight(path)) for path in v)
            scale = sum(inner(part, part) for part in whole) ** 0.5
        residual = size**0.5 / scale if scale else 0.0
        residual = math.inf if math.isnan(residual) else residual  # squares are beyond the range of doubles
        solved, status = residual <= tolerance, step.status
        if not (solved and step.solved):
            verdict = "solved" if solved else f"not solved to the tolerance {tolerance:.2g}"
            how = status.removeprefix("solved ")
            status = f"{verdict}: measured in double precision the residual is {residual:.2g}; {how}"
        found = replace(step, direction={}, residual=residual, solved=solved, status=status)
        decrease, change = max(-0.5 * (inside + along), 0.0), change.to(problem.output.dtype)
        return replace(found, model_decrease=decrease, output_change=change)

    return replace(problem.led(judged, oracle), direction=step.direction)


def _as_solved(problem: Problem, v: Mapping[str, Tensor], inside: float) -> float | None:
    """The norm of ∇F(u) as the solver has it, where that is not round-off to a good part.

    v is the solver's gradient times an inverse, which amplifies the round-off that is in it, and ⟨∇F(u), v⟩ tells:
    as ⟨∇h, Jv⟩ it is known in double precision, and given here.
    """
    if "whole_gradient" not in vars(problem):  # which would be a call
        return None
    sums = []
    for path, part in v.items():
        slope = problem.gradient[path]
        size, length = norm(slope), norm(part)
        sums.append((size * size, length * length, inner(slope, part.to(slope))))
    square, length, product = map(sum, zip(*sums, strict=True))
    return square**0.5 if abs(inside - product) <= _AGREE * (square * length) ** 0.5 < math.inf else None
