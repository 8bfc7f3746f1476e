r"""Newton's method with a line search on the norm of the gradient, for all rows at once.

For :math:`p = -H^{-1}g` the squared norm of the gradient has slope :math:`2\langle g, Hp\rangle = -2\|g\|^2` along
p, so a short enough step lowers it, by strong convexity its sublevel sets are bounded, and it has no stationary
point but the minimiser: halving from the full step converges from everywhere, at last quadratically. Differences
of gradients do not cancel as those of values do near a minimum.

Steps that do not shrink while the gradient does lead to infinity, as for the exponential function: near a
minimiser each is a small part of the one before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.implicit.conjugate import inverse_product
from surefoot.implicit.outcome import Outcome, at_infinity, not_converged, not_convex, refuse_nan
from surefoot.implicit.problem import Problem, Tensors

_HALVINGS = 40
_SLOPE = 1e-4


def newton(problem: Problem, tensors: Tensors, start: Tensor) -> Outcome:
    """Minimise from a start, one row per minimiser.

    Raises:
        ImplicitError: if a Hessian is not positive definite, something is not finite, or there is no convergence.
    """
    settings, beta = problem.settings, start.clone()
    gradient = problem.gradient(beta, tensors)
    refuse_nan(gradient, 0)
    norms = gradient.norm(dim=1)
    goal = settings.tolerance_for(beta.dtype) * norms.clamp(min=1.0)
    steps: list[Tensor] = []
    length, ratio = torch.zeros_like(norms), torch.zeros_like(norms)
    for iteration in range(settings.iterations):
        rows = (norms > goal).nonzero()[:, 0]
        if not len(rows):
            break
        own = problem.take(tensors, rows)
        direction = -_solved(problem, own, beta[rows], gradient[rows], iteration, float(norms.max()))
        step, moved, slopes = _search(problem, own, beta[rows], direction, norms[rows])
        beta[rows], gradient[rows] = moved, slopes
        norms[rows] = slopes.norm(dim=1)
        steps.append(torch.zeros_like(norms).index_copy(0, rows, step))
        made = step * direction.norm(dim=1)
        ratio[rows] = torch.where(length[rows] > 0, made / length[rows], 0.0)
        length[rows] = made
        if not bool(step.any()):  # the gradient is as small as its round-off lets it be
            break
    worst = int((norms / goal).argmax())
    if bool(norms[worst] > goal[worst] * _stalled(beta.dtype, goal)):
        raise not_converged(
            "Newton's method", len(steps), float(norms[worst]), float(goal[worst]), float(beta.norm(dim=1).max())
        )
    away = (ratio > 0.5) & (length > 1e-3 * (1 + beta.norm(dim=1)))
    if bool(away.any()):
        row = int(away.nonzero()[0])
        raise at_infinity(float(length[row]), row, len(steps), float(norms[row]))
    path = torch.stack(steps, dim=1) if steps else beta.new_zeros(len(beta), 0)
    return Outcome(beta, norms, len(steps), path, torch.zeros_like(path))


def _stalled(dtype: torch.dtype, goal: Tensor) -> float:
    """How far above its goal a gradient may stay that no step lowers: a thousand units of round-off."""
    return max(1.0, 1e3 * torch.finfo(dtype).eps / max(float(goal.min()), 1e-300))


def _search(
    problem: Problem, tensors: Tensors, beta: Tensor, direction: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Step sizes, where they lead and the gradients there; a step is zero where none lowers the gradient."""
    step = torch.ones_like(norms)
    moved = beta + direction
    slopes = problem.gradient(moved, tensors)
    for _ in range(_HALVINGS):
        found = slopes.norm(dim=1)
        longer = ~(found <= (1 - _SLOPE * step) * norms)  # also where it is NaN
        rows = longer.nonzero()[:, 0]
        if not len(rows):
            return step, moved, slopes
        step[rows] *= 0.5
        moved[rows] = beta[rows] + step[rows, None] * direction[rows]
        slopes[rows] = problem.gradient(moved[rows], problem.take(tensors, rows))
    step[rows], moved[rows] = 0.0, beta[rows]
    slopes[rows] = problem.gradient(beta[rows], problem.take(tensors, rows))
    return step, moved, slopes


def _solved(
    problem: Problem, tensors: Tensors, beta: Tensor, gradient: Tensor, iteration: int, residual: float
) -> Tensor:
    if problem.settings.linear == "cg":
        return inverse_product(problem, beta, tensors, gradient)
    factor = factorised(problem.hessian(beta, tensors), iteration, residual)
    return torch.cholesky_solve(gradient[..., None], factor)[..., 0]


def factorised(hessian: Tensor, iteration: int, residual: float) -> Tensor:
    """The Cholesky factors of Hessians.

    Raises:
        ImplicitError: if one is not positive definite.
    """
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if bool(failed.any()):
        row = int(failed.nonzero()[0])
        matrix = hessian[row]
        if bool(torch.isfinite(matrix).all()):
            raise not_convex(float(torch.linalg.eigvalsh(matrix)[0]), row, iteration, residual)
        refuse_nan(hessian.flatten(1), iteration, residual)
    return factor
