"""Steps until a theorem applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from surefoot.objectives import Ridge
from surefoot.theorems.deciding import Method, convergence
from surefoot.theorems.record import Convergence

_NEAR = 100.0  # the factor from which sharper constants are worth their cost


def until_proved(
    step: Callable[[], Any],
    model: nn.Module,
    x: Any,
    objective: nn.Module,
    regularizer: Ridge | None = None,
    method: Method = "gauss_newton",
    most: int = 100,
) -> tuple[int, Convergence]:
    """Take steps until convergence from the weights is proved; returns how many, and the last verdict.

    Args:
        step: takes one step of any method and changes the weights of the model.
        model: the network.
        x: all the data of the objective.
        objective: a loss bound to its targets.
        regularizer: a ridge that is added to the objective.
        method: the method whose convergence is to be proved.
        most: the largest number of steps to take.

    >>> model, x, y = nn.Linear(2, 1).double(), torch.eye(2).double(), torch.ones(2, 1).double()
    >>> optimizer = sf.GaussNewton(model, sf.Square())
    >>> steps, verdict = sf.theorems.until_proved(lambda: optimizer.step(x, y), model, x, sf.Square(y))
    >>> verdict.proved
    True
    """
    for taken in range(most + 1):
        verdict = proved_from_here(model, x, objective, regularizer, method, thorough=taken == most)
        if verdict.proved or taken == most:
            break
        step()
    return taken, verdict


def proved_from_here(
    model: nn.Module,
    x: Any,
    objective: nn.Module,
    regularizer: Ridge | None = None,
    method: Method = "gauss_newton",
    *,
    thorough: bool = False,
) -> Convergence:
    """A quick verdict about the present weights; a thorough one if little is missing or if it is asked for."""
    verdict = convergence(model, x, objective, regularizer, method, "low")
    if not verdict.proved and (verdict.missing <= _NEAR or thorough):
        return convergence(model, x, objective, regularizer, method)
    return verdict
