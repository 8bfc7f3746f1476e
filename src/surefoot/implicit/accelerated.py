r"""Nesterov's accelerated gradient method, for all rows at once, without a step size.

From a point y the step is :math:`\beta^+ = y - g(y)/L`. It is accepted when :math:`\langle g(\beta^+) - g(y),
\beta^+ - y\rangle \le \frac L2\|\beta^+ - y\|^2`, else L is doubled. By convexity :math:`\zeta(\beta^+) \le
\zeta(y) + \langle g(\beta^+), \beta^+ - y\rangle`, so this implies the bound :math:`\zeta(\beta^+) \le \zeta(y) +
\langle g(y), \beta^+ - y\rangle + \frac L2\|\beta^+ - y\|^2` that the method rests on (Nesterov 1983), without
differences of values. It holds once L is twice the true constant. Where :math:`\langle g(y), \beta^+ -
\beta\rangle > 0` the momentum is reset (O'Donoghue and Candès 2015), which makes the rate that of strong convexity
without :math:`\mu` being known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.implicit.outcome import Outcome, not_converged, refuse_nan
from surefoot.implicit.problem import Problem, Tensors

_DOUBLINGS = 60


def accelerated(problem: Problem, tensors: Tensors, start: Tensor, smoothness: float | None = None) -> Outcome:
    """Minimise from a start, one row per minimiser.

    Args:
        problem: the inner problem.
        tensors: all but β.
        start: rows × size.
        smoothness: a first guess of L; twice the true one needs no search.

    Raises:
        ImplicitError: if something is not finite, or there is no convergence.
    """
    settings = problem.settings
    beta, ahead = start.clone(), start.clone()
    gradient = problem.gradient(beta, tensors)
    refuse_nan(gradient, 0)
    norms = gradient.norm(dim=1)
    goal = settings.tolerance_for(beta.dtype) * norms.clamp(min=1.0)
    curvature = torch.full_like(norms, smoothness or 1.0)
    weight = torch.ones_like(norms)
    steps: list[Tensor] = []
    momenta: list[Tensor] = []
    for iteration in range(settings.iterations):
        active = norms > goal
        if not bool(active.any()):
            break
        slope = problem.gradient(ahead, tensors)
        refuse_nan(slope, iteration, float(norms.max()))
        curvature, moved, found = _step(problem, tensors, ahead, slope, curvature, active)
        refuse_nan(found, iteration, float(norms.max()))
        upwards = ((slope * (moved - beta)).sum(dim=1) > 0) & active
        weight = torch.where(upwards, 1.0, weight)
        following = 0.5 * (1 + (1 + 4 * weight.square()).sqrt())
        momentum = torch.where(active & ~upwards, (weight - 1) / following, 0.0)
        weight = torch.where(upwards, weight, following)
        steps.append(torch.where(active, 1 / curvature, 0.0))
        momenta.append(momentum)
        moved = torch.where(active[:, None], moved, beta)
        ahead = moved + momentum[:, None] * (moved - beta)
        norms = torch.where(active, found.norm(dim=1), norms)
        beta = moved
        curvature = curvature * 0.98  # so that a steep region is forgotten
    if bool((norms > goal).any()):
        worst = int((norms / goal).argmax())
        raise not_converged(
            "The accelerated gradient method",
            len(steps),
            float(norms[worst]),
            float(goal[worst]),
            float(beta.norm(dim=1).max()),
        )
    empty = beta.new_zeros(len(beta), 0)
    path = torch.stack(steps, dim=1) if steps else empty
    return Outcome(beta, norms, len(steps), path, torch.stack(momenta, dim=1) if momenta else empty)


def _step(
    problem: Problem, tensors: Tensors, ahead: Tensor, slope: Tensor, curvature: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted curvatures, where the steps lead, and the gradients there."""
    for _ in range(_DOUBLINGS):
        moved = ahead - slope / curvature[:, None]
        found = problem.gradient(moved, tensors)
        change = moved - ahead
        rise, length = ((found - slope) * change).sum(dim=1), change.square().sum(dim=1)
        # at the end both sides are round-off of the gradients
        noise = torch.finfo(ahead.dtype).eps * 8 * (slope.norm(dim=1) + found.norm(dim=1)) * length.sqrt()
        longer = active & ~(rise <= 0.5 * curvature * length + noise)
        if not bool(longer.any()):
            break
        curvature = torch.where(longer, 2 * curvature, curvature)
    return curvature, moved, found
