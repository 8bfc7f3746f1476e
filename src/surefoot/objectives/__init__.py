"""Objectives: losses of the outputs of a model, bound to their targets or not.

* ``base``: :class:`Objective`: value, derivatives, constants; :class:`Loss`, with a scale and a reduction.
* ``constants``: :class:`Constants` of an objective as a function of the stacked outputs, certified or as printed.
* ``cross_entropy``: :class:`CrossEntropy` and :class:`NegativeLogLikelihood`, losses of class numbers.
* ``entrywise``: losses of outputs and targets of one shape, from :class:`Square` to :class:`Reconstruction`.
* ``torch_losses``: losses of torch.nn as objectives, and :class:`ModelLoss`, of models that return their loss.
* ``regularizers``: functions of the parameters: :class:`Ridge`, :class:`PseudoHuber`, :class:`ElasticNet`.
"""

from surefoot.calculus.leaves import attach
from surefoot.objectives.base import Loss, Objective
from surefoot.objectives.constants import Constants, ObjectiveError
from surefoot.objectives.cross_entropy import CrossEntropy, NegativeLogLikelihood
from surefoot.objectives.entrywise import (
    Absolute,
    BinaryCrossEntropy,
    Divergence,
    Huber,
    Poisson,
    Reconstruction,
    SoftMargin,
    Square,
    encode_decode,
)
from surefoot.objectives.regularizers import ElasticNet, PseudoHuber, Regularizer, Ridge
from surefoot.objectives.torch_losses import ModelLoss, as_objective, from_torch

__all__ = [
    "Absolute", "BinaryCrossEntropy", "Constants", "CrossEntropy", "Divergence", "ElasticNet", "Huber", "Loss",
    "ModelLoss", "NegativeLogLikelihood", "Objective", "ObjectiveError", "Poisson", "PseudoHuber",
    "Reconstruction", "Regularizer", "Ridge", "SoftMargin", "Square", "as_objective", "attach", "encode_decode",
    "from_torch",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
