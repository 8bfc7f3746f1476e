"""Layers that are themselves minimisers.

* ``layer``: :class:`ArgMin`, the layer, and what its solutions say; a ready-made inner problem, :class:`Energy`.
* ``constants``: what is known about an inner problem, what an inexact solution costs, and when there is none.
* ``problem``: the inner problem as a function of tensors, and the options of a layer.
* ``solvers``: how it is solved, and its linear systems.
* ``derived``: constants of an inner problem from its operations.
* ``operation``: derivatives of every order, implicit or unrolled; the layer as one operation of a graph.
* ``proved``: first derivatives with proved errors.
* ``rule``: its bounds.
"""

from surefoot.implicit import rule  # noqa: F401  registers the bounds
from surefoot.implicit.constants import Constants, ImplicitError
from surefoot.implicit.layer import ArgMin, Energy, Solution

__all__ = ["ArgMin", "Constants", "Energy", "ImplicitError", "Solution"]


def __dir__() -> list[str]:
    return list(__all__)
