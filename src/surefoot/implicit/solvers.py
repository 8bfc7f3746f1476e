r"""Solvers of inner problems, for all rows at once: Newton's method and the accelerated gradient method.

*Newton's method* has a line search on the norm of the gradient. For :math:`p = -H^{-1}g` the squared norm of the
gradient has slope :math:`2\langle g, Hp\rangle = -2\|g\|^2` along p, so a short enough step lowers it, by strong
convexity its sublevel sets are bounded, and it has no stationary point but the minimiser: halving from the full
step converges from everywhere, at last quadratically. Differences of gradients do not cancel as those of values do
near a minimum. Steps that do not shrink while the gradient does lead to infinity, as for the exponential function:
near a minimiser each is a small part of the one before.

*Nesterov's accelerated gradient method* needs no step size. From a point y the step is :math:`\beta^+ = y -
g(y)/L`. It is accepted when :math:`\langle g(\beta^+) - g(y), \beta^+ - y\rangle \le \frac L2\|\beta^+ - y\|^2`,
else L is doubled. By convexity :math:`\zeta(\beta^+) \le \zeta(y) + \langle g(\beta^+), \beta^+ - y\rangle`, so
this implies the bound :math:`\zeta(\beta^+) \le \zeta(y) + \langle g(y), \beta^+ - y\rangle + \frac L2\|\beta^+ -
y\|^2` that the method rests on (Nesterov 1983), without differences of values. It holds once L is twice the true
constant. Where :math:`\langle g(y), \beta^+ - \beta\rangle > 0` the momentum is reset (O'Donoghue and Candès
2015), which makes the rate that of strong convexity without :math:`\mu` being known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.implicit.constants import ImplicitError
from surefoot.implicit.problem import Problem, Tensors
from surefoot.linear_solve import Rows, conjugate_gradients

_CONVEX = (
    "ζ must be strongly convex in β and bounded below: add a ridge (mu / 2 * beta.square().sum()), check its "
    "sign, or scale the data."
)
_HALVINGS = 40
_SLOPE = 1e-4
_DOUBLINGS = 60
_FORGET = 0.98  # factor of the curvature after each accelerated step, so that a steep region is forgotten


@dataclass(frozen=True)
class Outcome:
    """Minimisers, one per row, and the path to them."""

    beta: Tensor  # the minimisers
    residual: Tensor  # the norm of the gradient at each
    iterations: int  # the number of iterations
    steps: Tensor  # the step sizes, rows × iterations; zero where a row was finished
    momenta: Tensor  # the momenta, rows × iterations; zeros for Newton's method


def solved(problem: Problem, tensors: Tensors, start: Tensor | None = None) -> Outcome:
    """The minimisers by the solver of the settings, not differentiable."""
    begin = starting_point(problem, tensors, start)
    return (_newton if problem.settings.solver == "newton" else _accelerated)(problem, tensors, begin)


def starting_point(problem: Problem, tensors: Tensors, start: Tensor | None) -> Tensor:
    """The point where a solver starts, rows × size; zero by default."""
    shape = problem.count(tensors), problem.size
    dtype, device = problem.dtype(tensors), tensors[0].device
    if start is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return start.detach().to(device, dtype).reshape(shape)


def _refuse_nan(gradient: Tensor, iteration: int, residual: float | None = None) -> None:
    """Refuse a gradient that is not finite."""
    rows = ~torch.isfinite(gradient).all(dim=1)
    if bool(rows.any()):
        raise ImplicitError(
            f"the gradient of ζ is not finite at iteration {iteration} (row {int(rows.nonzero()[0])})",
            "Check the input, the parameters and the range on which ζ is defined; NaN has no minimiser.",
            residual=residual,
        )


def _not_convex(smallest: float, row: int, iteration: int, residual: float) -> ImplicitError:
    """The error for a Hessian that is not positive definite."""
    return ImplicitError(
        f"the inner problem is not strongly convex: its Hessian has eigenvalue {smallest:.3g} at iteration "
        f"{iteration} (row {row})",
        _CONVEX,
        residual=residual,
    )


def factorised(hessian: Tensor, iteration: int, residual: float) -> Tensor:
    """The Cholesky factors of Hessians; refuses one that is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if bool(failed.any()):
        row = int(failed.nonzero()[0])
        if bool(torch.isfinite(hessian[row]).all()):
            raise _not_convex(float(torch.linalg.eigvalsh(hessian[row])[0]), row, iteration, residual)
        _refuse_nan(hessian.flatten(1), iteration, residual)
    return factor


def _at_start(problem: Problem, tensors: Tensors, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients at the start, their norms, and the norms to be reached."""
    gradient = problem.gradient(beta, tensors)
    _refuse_nan(gradient, 0)
    norms = gradient.norm(dim=1)
    return gradient, norms, problem.settings.tolerance_for(beta.dtype) * norms.clamp(min=1.0)


def _unfinished(method: str, iterations: int, beta: Tensor, norms: Tensor, goal: Tensor) -> ImplicitError:
    """The error for a problem that was not solved to its tolerance."""
    worst = int((norms / goal).argmax())
    return ImplicitError(
        f"{method} did not reach the tolerance {float(goal[worst]):.3g} in {iterations} iterations, with "
        f"minimisers of norm up to {float(beta.norm(dim=1).max()):.3g}",
        f"Raise max_iterations or the tolerance; if the norms grow, the problem is unbounded: {_CONVEX}",
        residual=float(norms[worst]),
    )


def _path(columns: Sequence[Tensor], beta: Tensor) -> Tensor:
    return torch.stack(list(columns), dim=1) if columns else beta.new_zeros(len(beta), 0)


def _newton(problem: Problem, tensors: Tensors, start: Tensor) -> Outcome:
    beta = start.clone()
    gradient, norms, goal = _at_start(problem, tensors, beta)
    steps: list[Tensor] = []
    length, ratio = torch.zeros_like(norms), torch.zeros_like(norms)
    for iteration in range(problem.settings.iterations):
        rows = (norms > goal).nonzero()[:, 0]
        if not len(rows):
            break
        unsolved = problem.take(tensors, rows)
        direction = -_newton_step(problem, unsolved, beta[rows], gradient[rows], iteration, float(norms.max()))
        step, moved, slopes = _search(problem, unsolved, beta[rows], direction, norms[rows])
        beta[rows], gradient[rows] = moved, slopes
        norms[rows] = slopes.norm(dim=1)
        steps.append(torch.zeros_like(norms).index_copy(0, rows, step))
        moved_by = step * direction.norm(dim=1)
        ratio[rows] = torch.where(length[rows] > 0, moved_by / length[rows], 0.0)
        length[rows] = moved_by
        if not bool(step.any()):  # the gradient is as small as its round-off lets it be
            break
    # a gradient that no step lowers may stay a thousand units of round-off above its goal
    stalled = max(1.0, 1e3 * torch.finfo(beta.dtype).eps / max(float(goal.min()), 1e-300))
    if bool((norms > goal * stalled).any()):
        raise _unfinished("Newton's method", len(steps), beta, norms, goal)
    away = (ratio > 0.5) & (length > 1e-3 * (1 + beta.norm(dim=1)))
    if bool(away.any()):
        row = int(away.nonzero()[0])
        raise ImplicitError(
            f"after {len(steps)} iterations the gradient is small, and steps are still {float(length[row]):.3g} "
            f"long (row {row}): the infimum lies at infinity, so the inner problem is not strongly convex",
            _CONVEX,
            residual=float(norms[row]),
        )
    path = _path(steps, beta)
    return Outcome(beta, norms, len(steps), path, torch.zeros_like(path))


def _newton_step(
    problem: Problem, tensors: Tensors, beta: Tensor, gradient: Tensor, iteration: int, residual: float
) -> Tensor:
    if problem.settings.linear == "cg":
        return inverse_product(problem, beta, tensors, gradient)
    factor = factorised(problem.hessian(beta, tensors), iteration, residual)
    return torch.cholesky_solve(gradient[..., None], factor)[..., 0]


def _search(
    problem: Problem, tensors: Tensors, beta: Tensor, direction: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Step sizes, where they lead and the gradients there; a step is zero where none lowers the gradient."""
    step = torch.ones_like(norms)
    moved = beta + direction
    slopes = problem.gradient(moved, tensors)
    for _ in range(_HALVINGS):
        longer = ~(slopes.norm(dim=1) <= (1 - _SLOPE * step) * norms)  # also where it is NaN
        rows = longer.nonzero()[:, 0]
        if not len(rows):
            return step, moved, slopes
        step[rows] *= 0.5
        moved[rows] = beta[rows] + step[rows, None] * direction[rows]
        slopes[rows] = problem.gradient(moved[rows], problem.take(tensors, rows))
    step[rows], moved[rows] = 0.0, beta[rows]
    slopes[rows] = problem.gradient(beta[rows], problem.take(tensors, rows))
    return step, moved, slopes


def _accelerated(problem: Problem, tensors: Tensors, start: Tensor) -> Outcome:
    beta, ahead = start.clone(), start.clone()
    _, norms, goal = _at_start(problem, tensors, beta)
    declared = getattr(problem.constants, "smoothness", None)  # twice the true constant needs no search
    guess = declared if isinstance(declared, int | float) and declared > 0 else 1.0
    curvature, weight = torch.full_like(norms, guess), torch.ones_like(norms)
    steps: list[Tensor] = []
    momenta: list[Tensor] = []
    for iteration in range(problem.settings.iterations):
        active = norms > goal
        if not bool(active.any()):
            break
        slope = problem.gradient(ahead, tensors)
        _refuse_nan(slope, iteration, float(norms.max()))
        curvature, moved, slope_there = _doubled(problem, tensors, ahead, slope, curvature, active)
        _refuse_nan(slope_there, iteration, float(norms.max()))
        upwards = ((slope * (moved - beta)).sum(dim=1) > 0) & active
        weight = torch.where(upwards, 1.0, weight)
        following = 0.5 * (1 + (1 + 4 * weight.square()).sqrt())
        momentum = torch.where(active & ~upwards, (weight - 1) / following, 0.0)
        weight = torch.where(upwards, weight, following)
        steps.append(torch.where(active, 1 / curvature, 0.0))
        momenta.append(momentum)
        moved = torch.where(active[:, None], moved, beta)
        ahead = moved + momentum[:, None] * (moved - beta)
        norms = torch.where(active, slope_there.norm(dim=1), norms)
        beta, curvature = moved, _FORGET * curvature
    if bool((norms > goal).any()):
        raise _unfinished("The accelerated gradient method", len(steps), beta, norms, goal)
    return Outcome(beta, norms, len(steps), _path(steps, beta), _path(momenta, beta))


def _doubled(
    problem: Problem, tensors: Tensors, ahead: Tensor, slope: Tensor, curvature: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted curvatures, where the steps lead, and the gradients there."""
    for _ in range(_DOUBLINGS):
        moved = ahead - slope / curvature[:, None]
        slope_there = problem.gradient(moved, tensors)
        change = moved - ahead
        rise, length = ((slope_there - slope) * change).sum(dim=1), change.square().sum(dim=1)
        # at the end both sides are round-off of the gradients
        noise = torch.finfo(ahead.dtype).eps * 8 * (slope.norm(dim=1) + slope_there.norm(dim=1)) * length.sqrt()
        longer = active & ~(rise <= 0.5 * curvature * length + noise)
        if not bool(longer.any()):
            break
        curvature = torch.where(longer, 2 * curvature, curvature)
    return curvature, moved, slope_there


def inverse_product(problem: Problem, beta: Tensor, tensors: Tensors, right: Tensor) -> Tensor:
    """The inverse Hessians at some rows times vectors, to nearly the precision of the element type.

    ``right`` has the shape of β, rows × size, or is any number of such matrices stacked in front.
    """

    def product(direction: Tensor) -> Tensor:
        return problem.product(beta, tensors, direction)

    multiply = torch.vmap(product) if right.dim() > beta.dim() else product
    space, tolerance = Rows(), 4 * torch.finfo(right.dtype).eps
    solution = conjugate_gradients(multiply, right, space=space, tolerance=tolerance, most=10 * problem.size + 10)
    if solution.direction is not None:
        _refuse_nan(solution.curvature.reshape(-1, 1), solution.iterations - 1)
        size = space.dot(solution.direction, solution.direction)
        place = tuple(((solution.curvature <= 0) & (size > 0)).nonzero()[0])
        value, largest = float(solution.curvature[place] / size[place]), float(right.norm(dim=-1).max())
        raise _not_convex(value, int(place[-1]), solution.iterations - 1, largest)
    return solution.x
