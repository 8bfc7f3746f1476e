"""Optimizers whose steps rest on a proof.

* ``base``: :class:`GuaranteedOptimizer`: steps and their records; ``known_function``: values, gradients, whether
  the function is the same; ``held_parameters``: groups, steps that happen or do not, resuming.
* ``evaluation``: the loss of the live model and its gradient.
* ``record``: what is remembered of a step, and the anytime bound on the gradient.
* ``watch``: whether data, weights and function are those of the last step.
* ``stored``: steps to weights as they are stored, and what is promised of them.
* ``projection``: the nearest point of balls and boxes; ``constrained``: what optimizers on a set share.
* ``moving_ball``: the ball on which a step is certified.
* ``descent``: :class:`CertifiedDescent`; ``by_evaluation``: its steps proved by their value; ``ahead``: those that
  are promised from derivatives.
* ``directions``: where to go; ``limited_memory``: L-BFGS; ``wolfe``: how far; ``point``: the objective at points,
  values and gradients when asked; ``shards``: the same where several processes hold the data; ``vectors``:
  parameters as one vector.
* ``projected``: :class:`ProjectedGradient`; ``stochastic``: :class:`ProjectedSGD`; ``variance_reduced``:
  :class:`ProjectedSVRG`.
* ``proved_epochs``: :class:`ProvedEpochs`; ``burst_keeping``: bursts kept or undone; ``burst_training``: their
  mini-batch steps; ``pace``: their learning rate; ``tail``: the last steps, on all data; ``all_data``: the value
  that decides; ``burst_ledger``: what became of them; ``bursts``: records, states, batches; ``joint``:
  mini-batches of several processes.
* ``second_order``: :class:`GaussNewton` and :class:`Newton`; ``damped``: what they share; ``forcing``: how
  exactly they solve; ``trust_region``: damping by the length of steps.
"""

from surefoot.optim.base import GuaranteedOptimizer, OptimizerError
from surefoot.optim.bursts import BurstRecord
from surefoot.optim.by_evaluation import StalledWarning
from surefoot.optim.descent import CertifiedDescent
from surefoot.optim.projected import ProjectedGradient
from surefoot.optim.proved_epochs import ProvedEpochs
from surefoot.optim.record import Stationarity, StepRecord
from surefoot.optim.second_order import GaussNewton, Newton
from surefoot.optim.stochastic import ProjectedSGD, VarianceBound, VarianceEstimate
from surefoot.optim.variance_reduced import ProjectedSVRG

__all__ = [
    "BurstRecord", "CertifiedDescent", "GaussNewton", "GuaranteedOptimizer", "Newton", "OptimizerError",
    "ProjectedGradient", "ProjectedSGD", "ProjectedSVRG", "ProvedEpochs", "StalledWarning", "Stationarity",
    "StepRecord", "VarianceBound", "VarianceEstimate",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
