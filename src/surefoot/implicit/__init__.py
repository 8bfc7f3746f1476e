"""Layers that are themselves minimisers.

* ``layer``: :class:`ArgMin`, the layer, and its :class:`Solution`; a ready-made inner problem, :class:`Energy`.
* ``constants``: constants of an inner problem, the error of an inexact solution, and errors that are raised.
* ``problem``: the inner problem as a function of tensors, and the options of a layer.
* ``solvers``: solvers of the inner problem and of its linear systems.
* ``derived``: constants of an inner problem from its operations.
* ``operation``: derivatives of every order, implicit or unrolled; the layer as one operation of a graph.
* ``proved``: first derivatives with proved errors.
* ``rule``: bounds of the operation.
"""

from surefoot.implicit import rule  # noqa: F401  registers the bounds
from surefoot.implicit.constants import Constants, ImplicitError
from surefoot.implicit.layer import ArgMin, Energy, Solution

__all__ = ["ArgMin", "Constants", "Energy", "ImplicitError", "Solution"]


def __dir__() -> list[str]:
    return list(__all__)
