"""How an inner problem is solved and differentiated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from surefoot.implicit.errors import ImplicitError


@dataclass(frozen=True)
class Settings:
    """Options of :class:`~surefoot.implicit.ArgMin`; see there.

    Attributes:
        solver: ``"newton"`` or ``"gradient"``.
        differentiate: ``"implicit"`` or ``"unroll"``.
        linear: ``"cholesky"`` or ``"cg"``.
        tolerance: relative to the gradient at the start where that is above one; ``None`` for that of the type.
        max_iterations: of the solver; ``None`` for 100 of Newton's method, 10 000 of the gradient method.
        order: how many derivatives are exact.
    """

    solver: Literal["newton", "gradient"] = "newton"
    differentiate: Literal["implicit", "unroll"] = "implicit"
    linear: Literal["cholesky", "cg"] = "cholesky"
    tolerance: float | None = None
    max_iterations: int | None = None
    order: int = 2

    def __post_init__(self) -> None:
        _one_of("solver", self.solver, ("newton", "gradient"))
        _one_of("differentiate", self.differentiate, ("implicit", "unroll"))
        _one_of("linear", self.linear, ("cholesky", "cg"))
        tolerance, iterations = self.tolerance, self.max_iterations
        if tolerance is not None and not (isinstance(tolerance, int | float) and 0 < tolerance < math.inf):
            raise ImplicitError(f"the option tolerance is {tolerance!r}", "Pass a positive number, or None.")
        if iterations is not None and not (isinstance(iterations, int) and iterations > 0):
            raise ImplicitError(
                f"the option max_iterations is {iterations!r}", "Pass a positive whole number, or None."
            )
        if not (isinstance(self.order, int) and self.order > 0):
            raise ImplicitError(
                f"the option order is {self.order!r}", "Pass how many derivatives are to be exact: 1, 2, …"
            )

    def tolerance_for(self, dtype: torch.dtype) -> float:
        """The tolerance in an element type: what was given, or 1e-12 in double and 1e-4 in single precision."""
        if self.tolerance is not None:
            return float(self.tolerance)
        return 1e-12 if dtype == torch.float64 else 1e-4

    @property
    def iterations(self) -> int:
        """How many iterations may be made."""
        return self.max_iterations or (100 if self.solver == "newton" else 10_000)


def _one_of(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ImplicitError(f"the option {name} is {given!r}", f"Pass {' or '.join(map(repr, known))}.")
