r"""Geodesic acceleration of Gauss-Newton steps.

A step v linearises the chain. Along the path :math:`u(t) = u + tv + \frac{t^2}2a` its output is

.. math:: \psi(u(t)) = \psi(u) + tJv + \tfrac{t^2}2\big(Ja + D^2\psi(u)[v, v]\big) + O(t^3),

and the acceleration a is chosen such that the quadratic term is small in the metric of the loss: it minimises
:math:`\frac12\|R^\top(Ja + c)\|^2 + \frac12a^\top Ma` with :math:`c = D^2\psi(u)[v, v]`. The matrix is that of the
step, :math:`J^\top RR^\top J + M`, so where its factor is at hand, a costs a pull-back and a pair of triangular
systems. Of c only :math:`R^\top c` matters. The second derivative is the quotient of differences

.. math:: c = \frac2h\Big(\frac{\psi(u + hv) - \psi(u)}h - Jv\Big) + O(h),

one evaluation. Where narrow valleys are bent, as those of physics-informed networks, the damping falls faster
(Transtrum and Sethna, Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares minimization,
arXiv:1201.5885, 2012). Nothing is proved about the accelerated point: whoever goes there looks at the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.oracles.problem import Problem, Step

Correct = Callable[[Tensor], dict[str, Tensor]]  # from (ψ(u + hv) − ψ(u))/h to ha/2

_PART = 0.1  # h
_MOST = 0.75  # times the length of v, from which an acceleration says that the step is too long to be bent


def accelerated(problem: Problem, step: Step, correct: Correct) -> Step:
    """The step with half its acceleration as its ``bend``; without one where that is not short beside the step.

    Args:
        problem: the objective around a point.
        step: the minimiser of its Gauss-Newton model, solved.
        correct: solves for the acceleration with the damping of the step.
    """
    if not step.solved or step.model_decrease <= 0:
        return step
    moved = {path: torch.add(u, step.direction[path], alpha=_PART) for path, u in problem.parameters.items()}
    with torch.no_grad():
        after = problem.chain.value({**problem.point, **moved})
    found = {path: part / _PART for path, part in correct((after - problem.output) / _PART).items()}
    if not 2 * _norm(found) <= _MOST * _norm(step.direction):  # also where it is not a number
        return step
    return replace(step, bend=found)


def _norm(parts: Mapping[str, Tensor]) -> float:
    return float(sum(part.double().square().sum() for part in parts.values())) ** 0.5
