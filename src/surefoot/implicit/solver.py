r"""Newton's method for inner problems, for all rows at once.

The line search is on the norm of the gradient. For :math:`p = -H^{-1}g` the squared norm of the gradient has slope
:math:`2\langle g, Hp\rangle = -2\|g\|^2` along p, so a short enough step lowers it, by strong convexity its
sublevel sets are bounded, and it has no stationary point but the minimiser: halving from the full step converges
from everywhere, at last quadratically. Differences of gradients do not cancel as those of values do near a
minimum. Steps that do not shrink while the gradient does lead to infinity, as for the exponential function: near a
minimiser each is a small part of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.implicit.constants import ImplicitError
from surefoot.implicit.problem import Problem, Tensors

_CONVEX = (
    "ζ must be strongly convex in β and bounded below: add a ridge (mu / 2 * beta.square().sum()), check its "
    "sign, or scale the data."
)
_HALVINGS = 40
_SLOPE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """Minimisers, one per row."""

    beta: Tensor  # the minimisers
    residual: Tensor  # the norm of the gradient at each
    iterations: int


def solved(problem: Problem, tensors: Tensors, start: Tensor | None = None) -> Outcome:
    """The minimisers, not differentiable."""
    shape, dtype, device = (problem.count(tensors), problem.size), problem.dtype(tensors), tensors[0].device
    beta = torch.zeros(shape, dtype=dtype, device=device)
    if start is not None:
        beta += start.detach().to(device, dtype).reshape(shape)
    gradient = problem.gradient(beta, tensors)
    _refuse_nan(gradient, 0)
    norms = gradient.norm(dim=1)
    tolerance = problem.tolerance or (1e-12 if beta.dtype == torch.float64 else 1e-4)
    goal = tolerance * norms.clamp(min=1.0)
    length, ratio, iterations = torch.zeros_like(norms), torch.zeros_like(norms), 0
    while iterations < problem.max_iterations and bool((norms > goal).any()):
        rows = (norms > goal).nonzero()[:, 0]
        unsolved = _take(problem, tensors, rows)
        hessian = problem.hessian(beta[rows], unsolved)
        factor = factorised(hessian, iterations, float(norms.max()))
        direction = -torch.cholesky_solve(gradient[rows][..., None], factor)[..., 0]
        step, beta[rows], gradient[rows] = _search(problem, unsolved, beta[rows], direction, norms[rows])
        norms[rows] = gradient[rows].norm(dim=1)
        iterations += 1
        moved_by = step * direction.norm(dim=1)
        ratio[rows] = torch.where(length[rows] > 0, moved_by / length[rows], 0.0)
        length[rows] = moved_by
        if not bool(step.any()):  # the gradient is as small as its round-off lets it be
            break
    # a gradient that no step lowers may stay a thousand units of round-off above its goal
    stalled = max(1.0, 1e3 * torch.finfo(beta.dtype).eps / max(float(goal.min()), 1e-300))
    if bool((norms > goal * stalled).any()):
        worst = int((norms / goal).argmax())
        raise ImplicitError(
            f"Newton's method did not reach the tolerance {float(goal[worst]):.3g} in {iterations} iterations, "
            f"with minimisers of norm up to {float(beta.norm(dim=1).max()):.3g}",
            f"Raise max_iterations or the tolerance; if the norms grow, the problem is unbounded: {_CONVEX}",
            residual=float(norms[worst]),
        )
    away = (ratio > 0.5) & (length > 1e-3 * (1 + beta.norm(dim=1)))
    if problem.constants is None and bool(away.any()):  # where μ is declared, the gradient says it all
        row = int(away.nonzero()[0])
        raise ImplicitError(
            f"after {iterations} iterations the gradient is small, and steps are still {float(length[row]):.3g} "
            f"long (row {row}): the infimum lies at infinity, so the inner problem is not strongly convex",
            _CONVEX,
            residual=float(norms[row]),
        )
    return Outcome(beta, norms, iterations)


def factorised(hessian: Tensor, iteration: int, residual: float) -> Tensor:
    """The Cholesky factors of Hessians; refuses one that is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if bool(failed.any()):
        row = int(failed.nonzero()[0])
        _refuse_nan(hessian[row].reshape(1, -1), iteration, residual)
        smallest = float(torch.linalg.eigvalsh(hessian[row])[0])
        raise ImplicitError(
            f"the inner problem is not strongly convex: its Hessian has eigenvalue {smallest:.3g} at iteration "
            f"{iteration} (row {row})",
            _CONVEX,
            residual=residual,
        )
    return factor


def _refuse_nan(derivative: Tensor, iteration: int, residual: float | None = None) -> None:
    rows = ~torch.isfinite(derivative).all(dim=1)
    if bool(rows.any()):
        raise ImplicitError(
            f"the gradient of ζ is not finite at iteration {iteration} (row {int(rows.nonzero()[0])})",
            "Check the input, the parameters and the range on which ζ is defined; NaN has no minimiser.",
            residual=residual,
        )


def _take(problem: Problem, tensors: Tensors, rows: Tensor) -> Tensors:
    return tuple(tensor[rows] if k < problem.samples else tensor for k, tensor in enumerate(tensors))


def _search(
    problem: Problem, tensors: Tensors, beta: Tensor, direction: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Step sizes, where they lead and the gradients there; a step is zero where none lowers the gradient."""
    step = torch.ones_like(norms)
    moved = beta + direction
    slopes = problem.gradient(moved, tensors)
    for halving in range(_HALVINGS + 1):
        rows = (~(slopes.norm(dim=1) <= (1 - _SLOPE * step) * norms)).nonzero()[:, 0]  # also where it is NaN
        if not len(rows):
            break
        step[rows] *= 0.5 if halving < _HALVINGS else 0.0
        scale = step[rows, None]
        moved[rows] = torch.where(scale > 0, beta[rows] + scale * direction[rows], beta[rows])
        slopes[rows] = problem.gradient(moved[rows], _take(problem, tensors, rows))
    return step, moved, slopes
