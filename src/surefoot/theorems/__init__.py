"""Theorems of convergence whose hypotheses are verified, round-off included.

* ``statements``: the theorems, proved, as functions of verified numbers; ``gradient_steps``, ``momentum`` and
  ``stochastic``: those about gradient steps, plain, with momentum and on random batches; ``majorised``:
  Gauss-Newton with a fixed damping; ``balls``: what they are computed with.
* ``deciding``: :func:`convergence`, which theorem applies from the present weights, on which ball; ``descent`` for
  gradient steps, ``convex`` for strict minima, ``problem`` for what all of them compute.
* ``waiting``: :func:`until_proved`, steps until a theorem applies.
* ``record``: :class:`Convergence`, the verdict with its numbers, or what is missing.
* ``layered``: networks of linear layers and element-wise functions, sample by sample.
* ``pieces``: all batches, of one process or several; ``piece``: one of them, and what it is asked.
* ``samples``: other networks on each sample by itself.
* ``linear``: a network linearised at its weights; ``affine``: networks that are affine in what is trained.
* ``bending``: how fast the Jacobian changes on a ball; ``reach``: how far layers move there.
* ``relative``: the same at the weights, measured by the Jacobian itself.
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
