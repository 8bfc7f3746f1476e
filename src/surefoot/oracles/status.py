"""The sentences that a step carries, and the step that is returned when a model is unbounded below."""

from __future__ import annotations

import torch

from surefoot.oracles.problem import Problem
from surefoot.oracles.step import Step

_NAMES = {"gradient": "linear", "gauss_newton": "Gauss-Newton", "newton": "Newton"}


def solved_status(model: str, kappa: float, doubled: int, where: str | None, how: str) -> str:
    """What to say of a step that was found, perhaps after kappa was doubled."""
    found = f"the minimiser of the {_NAMES[model]} model with κ = {kappa:g}, by {how}"
    if not doubled:
        return found
    times = "once" if doubled == 1 else f"{doubled} times"
    return f"{found}; the model was unbounded below {where}, and κ was doubled {times}"


def refused(
    problem: Problem,
    model: str,
    kappa: float,
    doubled: int,
    where: str,
    unbounded: int | None,
    iterations: int = 0,
) -> Step:
    """The step zero, where the model has no minimiser."""
    return Step(
        direction={path: torch.zeros_like(value) for path, value in problem.parameters.items()},
        kappa=kappa,
        model_decrease=0.0,
        status=f"the {_NAMES[model]} model with κ = {kappa:g} is unbounded below {where}: take κ larger",
        solved=False,
        calls=problem.autodiff.calls,
        iterations=iterations,
        residual=1.0,
        doubled=doubled,
        unbounded_at=unbounded,
    )
