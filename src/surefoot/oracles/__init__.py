"""Oracles on a chain of computations.

* ``autodiff``: the value, and the derivative as a linear operator in both directions.
* ``problem``, ``step``: what an oracle is asked and what it returns.
* ``gradient``: the gradient oracle.
* ``gauss_newton``: the Gauss-Newton oracle. ``dual``, ``dual_system``: by conjugate gradients on the dual.
  ``dual_gram``: with the Gram matrix of the dual; ``gram``, ``gram_layers``: how that is assembled. ``factor``:
  the curvature of a loss as a product. ``space``: directions as vectors.
* ``newton``, ``dynamic``, ``linear_quadratic``: the Newton oracle, dynamic programming, and the paper's
  linear-quadratic problem.
* ``line_search``: how far to go along a direction, in place of the proximal term.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from surefoot.chain.autodiff import Autodiff

if TYPE_CHECKING:
    from surefoot.oracles.gauss_newton import gauss_newton
    from surefoot.oracles.gradient import gradient
    from surefoot.oracles.line_search import line_search
    from surefoot.oracles.linear_quadratic import linear_quadratic
    from surefoot.oracles.newton import newton
    from surefoot.oracles.problem import OracleError
    from surefoot.oracles.step import Step

# A chain holds an autodiff oracle and the other oracles read chains, so these are loaded on first use.
_NAMES = {
    "OracleError": "problem",
    "Step": "step",
    "gauss_newton": "gauss_newton",
    "gradient": "gradient",
    "line_search": "line_search",
    "linear_quadratic": "linear_quadratic",
    "newton": "newton",
}

__all__ = [
    "Autodiff",
    "OracleError",
    "Step",
    "gauss_newton",
    "gradient",
    "line_search",
    "linear_quadratic",
    "newton",
]


class _Oracles(ModuleType):
    """This package: an oracle and the file it is in have the same name, and that name is the oracle's."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Oracles


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'surefoot.oracles' has no attribute {name!r}")
    value = getattr(import_module(f"surefoot.oracles.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_NAMES})
