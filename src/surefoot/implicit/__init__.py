"""Layers that are themselves minimisers.

* ``layer``: :class:`ArgMin`, the layer, and what its solutions say.
* ``errors``: :class:`ImplicitError`, and when it is raised.
* ``constants``: what is known about an inner problem, and what an inexact solution costs.
* ``problem``: the inner problem as a function of tensors, and the options of a layer.
* ``solvers``, ``conjugate``: how it is solved.
* ``differentiate``: derivatives of every order, implicit or unrolled.
* ``derived``, ``trace``: constants of an inner problem from its operations.
* ``operation``: the layer as one operation of a graph.
* ``rule``: its bounds.
* ``energy``: a ready-made inner problem, :class:`Energy`.
"""

from surefoot.implicit import rule  # noqa: F401  registers the bounds
from surefoot.implicit.constants import Constants
from surefoot.implicit.energy import Energy
from surefoot.implicit.errors import ImplicitError
from surefoot.implicit.layer import ArgMin, Solution

__all__ = ["ArgMin", "Constants", "Energy", "ImplicitError", "Solution"]
