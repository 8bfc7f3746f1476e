"""Theorems of convergence whose hypotheses are verified, round-off included.

* ``statements``: the theorems and their proofs, as functions of verified numbers. ``gradient_steps``, ``momentum``
  and ``stochastic`` hold those about gradient steps (plain, with momentum, on random batches), ``majorised`` that
  about Gauss-Newton with a fixed damping; ``balls`` has the ball arithmetic they use.
* ``deciding``: :func:`convergence`, which finds the theorem that applies from the present weights, and its ball:
  ``descent`` for gradient steps, ``convex`` for strict minima, ``problem`` for the numbers of both.
* ``waiting``: :func:`until_proved`, which takes steps until a theorem applies.
* ``record``: :class:`Convergence`, the verdict with its numbers, or what is missing.
* ``layered``: networks of linear layers and element-wise functions, sample by sample.
* ``pieces``: all batches, of one process or several; ``piece``: one batch, and its share of the numbers.
* ``samples``: other networks, on each sample by itself.
* ``linear``: a network linearised at its weights; ``affine``: networks that are affine in the trained parameters.
* ``bending``: how fast the Jacobian changes on a ball; ``reach``: how far layers move there.
* ``relative``: how fast the Jacobian changes at the weights, measured by the Jacobian itself.
* ``hessian``: the dense Hessian of an objective at the weights.
"""

from surefoot.theorems.balls import Profile
from surefoot.theorems.deciding import convergence
from surefoot.theorems.gradient_steps import GradientDescent
from surefoot.theorems.majorised import DampedGaussNewton
from surefoot.theorems.momentum import FastHeavyBall, HeavyBall
from surefoot.theorems.record import Convergence, Hypothesis
from surefoot.theorems.statements import Interpolation, NothingHere, StronglyConvex
from surefoot.theorems.stochastic import StochasticDescent
from surefoot.theorems.waiting import until_proved

__all__ = [
    "Convergence", "DampedGaussNewton", "FastHeavyBall", "GradientDescent", "HeavyBall", "Hypothesis",
    "Interpolation", "NothingHere", "Profile", "StochasticDescent", "StronglyConvex", "convergence",
    "until_proved",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
