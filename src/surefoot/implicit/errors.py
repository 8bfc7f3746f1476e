"""When an inner problem has no minimiser to return."""

from __future__ import annotations

from surefoot.errors import SurefootError


class ImplicitError(SurefootError, RuntimeError):
    """An inner problem could not be solved, or is not posed as it should be.

    Args:
        what: what was met.
        remedy: what to do next.
        residual: the norm of the gradient that was reached, where there is one.

    Attributes:
        residual: the same.

    >>> print(ImplicitError("the inner problem is not strongly convex", "Add a ridge.", residual=0.5))
    The inner problem is not strongly convex (gradient norm reached: 0.5). Add a ridge.
    """

    def __init__(self, what: str, remedy: str, *, residual: float | None = None) -> None:
        self.residual = residual
        reached = "" if residual is None else f" (gradient norm reached: {residual:.3g})"
        super().__init__(f"{what[:1].upper()}{what[1:]}{reached}. {remedy}")
