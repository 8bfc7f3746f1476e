"""How far to go along a direction."""

from __future__ import annotations

import math
from collections.abc import Callable

from surefoot.oracles.problem import OracleError


def armijo(
    value_at: Callable[[float], float],
    value: float,
    slope: float,
    *,
    first: float = 1.0,
    fraction: float = 1e-4,
    shrink: float = 0.5,
    trials: int = 40,
) -> tuple[float, float] | None:
    r"""The first t of :math:`t_0, \beta t_0, \beta^2t_0, …` that descends enough.

    That is :math:`F(u + tv) \le F(u) + c\,t\,\langle\nabla F, v\rangle`. A differentiable F has such a t if the
    slope is negative, because :math:`c < 1`; round-off may hide it.

    Args:
        value_at: t ↦ F(u + tv); a value that is not finite counts as too large.
        value: F(u).
        slope: ⟨∇F(u), v⟩, negative.
        first: :math:`t_0`.
        fraction: c, between 0 and 1.
        shrink: β, between 0 and 1.
        trials: how many t are tried.

    Returns:
        t and F(u + tv), or ``None`` if no trial is low enough.

    Raises:
        OracleError: if the direction does not descend.

    >>> armijo(lambda t: (1 - 4 * t) ** 2, value=1.0, slope=-8.0)
    (0.25, 0.0)
    """
    if not slope < 0:
        raise OracleError(f"a line search needs a direction of descent, this one has the slope {slope:.3g}")
    step = first
    for _ in range(trials):
        found = value_at(step)
        if math.isfinite(found) and found <= value + fraction * step * slope:
            return step, found
        step *= shrink
    return None


__all__ = ["armijo"]
