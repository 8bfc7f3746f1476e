"""What a solver of inner problems returns, and when it gives up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.implicit.errors import ImplicitError

_CONVEX = (
    "ζ must be strongly convex in β and bounded below: add a ridge (mu / 2 * beta.square().sum()), check its "
    "sign, or scale the data."
)


@dataclass(frozen=True)
class Outcome:
    """Minimisers, one per row, and the path to them.

    Attributes:
        beta: the minimisers.
        residual: the norm of the gradient at each.
        iterations: how many were made.
        steps: the step sizes, rows × iterations; zero where a row was finished.
        momenta: likewise, how far each iteration looked ahead; zeros for Newton's method.
    """

    beta: Tensor
    residual: Tensor
    iterations: int
    steps: Tensor
    momenta: Tensor


def refuse_nan(gradient: Tensor, iteration: int, residual: float | None = None) -> None:
    """Refuse a gradient that is not finite.

    Raises:
        ImplicitError: naming the first such row.
    """
    rows = ~torch.isfinite(gradient).all(dim=1)
    if bool(rows.any()):
        first = int(rows.nonzero()[0])
        raise ImplicitError(
            f"the gradient of ζ is not finite at iteration {iteration} (row {first})",
            "Check the input, the parameters and the range on which ζ is defined; NaN has no minimiser.",
            residual=residual,
        )


def not_convex(smallest: float, row: int, iteration: int, residual: float) -> ImplicitError:
    """The error for a Hessian that is not positive definite."""
    return ImplicitError(
        f"the inner problem is not strongly convex: its Hessian has eigenvalue {smallest:.3g} at iteration "
        f"{iteration} (row {row})",
        _CONVEX,
        residual=residual,
    )


def at_infinity(length: float, row: int, iterations: int, residual: float) -> ImplicitError:
    """The error for a gradient that vanishes on the way to infinity."""
    return ImplicitError(
        f"after {iterations} iterations the gradient is small, and steps are still {length:.3g} long (row {row}): "
        "the infimum lies at infinity, so the inner problem is not strongly convex",
        _CONVEX,
        residual=residual,
    )


def not_converged(method: str, iterations: int, residual: float, tolerance: float, size: float) -> ImplicitError:
    """The error for a problem that was not solved to its tolerance."""
    return ImplicitError(
        f"{method} did not reach the tolerance {tolerance:.3g} in {iterations} iterations, with minimisers of "
        f"norm up to {size:.3g}",
        f"Raise max_iterations or the tolerance; if the norms grow, the problem is unbounded: {_CONVEX}",
        residual=residual,
    )
