"""When an inner problem has no minimiser to return."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.errors import SurefootError

_CONVEX = (
    "ζ must be strongly convex in β and bounded below: add a ridge (mu / 2 * beta.square().sum()), check its "
    "sign, or scale the data."
)


class ImplicitError(SurefootError, RuntimeError):
    """An inner problem could not be solved, or is not posed as it should be.

    Args:
        what: what was met.
        remedy: what to do next.
        residual: the norm of the gradient that was reached, where there is one; also an attribute.

    >>> print(ImplicitError("the inner problem is not strongly convex", "Add a ridge.", residual=0.5))
    The inner problem is not strongly convex (gradient norm reached: 0.5). Add a ridge.
    """

    def __init__(self, what: str, remedy: str, *, residual: float | None = None) -> None:
        self.residual = residual
        reached = "" if residual is None else f" (gradient norm reached: {residual:.3g})"
        super().__init__(f"{what[:1].upper()}{what[1:]}{reached}. {remedy}")


def refuse_nan(gradient: Tensor, iteration: int, residual: float | None = None) -> None:
    """Refuse a gradient that is not finite.

    Raises:
        ImplicitError: naming the first such row.
    """
    rows = ~torch.isfinite(gradient).all(dim=1)
    if bool(rows.any()):
        raise ImplicitError(
            f"the gradient of ζ is not finite at iteration {iteration} (row {int(rows.nonzero()[0])})",
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
