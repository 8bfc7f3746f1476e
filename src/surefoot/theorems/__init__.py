"""Theorems of convergence whose hypotheses are verified, round-off included.

* ``interpolation``, ``gradient_descent``, ``heavy_ball`` and ``strongly_convex``: the theorems and their proofs,
  as functions of verified numbers; ``arithmetic`` has the ball arithmetic they use.
* ``deciding``: :func:`convergence`, which finds the theorem that applies from the present weights.
* ``search``: one search over balls, for all of them.
* ``record``: :class:`Convergence`, the verdict with its numbers, or what is missing.
* ``network``: a network at its weights: outputs, Jacobian, and how fast the Jacobian changes on a ball.
* ``layered``: networks of linear layers and element-wise functions, sample by sample; ``bending``: how fast their
  Jacobian changes.
* ``curvature``: the Hessian of an objective at the weights and on a ball.
"""

from surefoot.theorems.deciding import convergence
from surefoot.theorems.gradient_descent import GradientDescent
from surefoot.theorems.heavy_ball import HeavyBall
from surefoot.theorems.interpolation import Interpolation
from surefoot.theorems.record import Convergence, Hypothesis
from surefoot.theorems.strongly_convex import NothingHere, StronglyConvex

__all__ = [
    "Convergence", "GradientDescent", "HeavyBall", "Hypothesis", "Interpolation", "NothingHere", "StronglyConvex",
    "convergence",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
