"""Layers that are themselves minimisers.

* ``layer``: :class:`ArgMin`, the layer, and its :class:`Solution`.
* ``constants``: constants of an inner problem, the error of an inexact solution, and errors that are raised.
* ``problem``: the inner problem as a function of tensors.
* ``solver``: Newton's method for all samples at once.
* ``operation``: derivatives of every order; the layer as one operation of a graph.
* ``proved``: the error of a computed minimiser and of its first derivative.
* ``rule``: bounds of the operation.
"""

from surefoot.implicit import rule  # noqa: F401  registers the bounds
from surefoot.implicit.constants import Constants, ImplicitError
from surefoot.implicit.layer import ArgMin, Solution

__all__ = ["ArgMin", "Constants", "ImplicitError", "Solution"]


def __dir__() -> list[str]:
    return list(__all__)
