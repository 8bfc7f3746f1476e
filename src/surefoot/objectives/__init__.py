"""Losses of the outputs of a model, and regularizers of its weights.

A loss is bound to its targets, ``CrossEntropy(y)``, or gets them with the outputs, ``CrossEntropy()(outputs,
y)``. Losses are means over the samples, the first dimension of the outputs. Any module that maps outputs to one
number is a loss, too.

* ``loss``: :class:`Objective` and :class:`Loss`: value, derivatives, and their :class:`Constants`.
* ``classes``: :class:`CrossEntropy`, the loss of class numbers.
* ``entrywise``: losses of outputs and targets of one shape, from :class:`Square` to :class:`Reconstruction`.
* ``modules``: losses of torch.nn and any modules as objectives, and models that return their loss.
* ``regularizers``: :class:`Ridge`, :class:`PseudoHuber`, :class:`ElasticNet`.
"""

from surefoot.objectives.classes import CrossEntropy
from surefoot.objectives.entrywise import (
    BinaryCrossEntropy,
    Huber,
    Poisson,
    Reconstruction,
    SoftMargin,
    Square,
)
from surefoot.objectives.loss import Constants, Loss, Objective, ObjectiveError
from surefoot.objectives.modules import ModelLoss, OwnLoss, as_objective, from_torch
from surefoot.objectives.regularizers import ElasticNet, PseudoHuber, Regularizer, Ridge

__all__ = [
    "BinaryCrossEntropy", "Constants", "CrossEntropy", "ElasticNet", "Huber", "Loss",
    "ModelLoss", "Objective", "ObjectiveError", "OwnLoss", "Poisson", "PseudoHuber",
    "Reconstruction", "Regularizer", "Ridge", "SoftMargin", "Square", "as_objective", "from_torch",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
