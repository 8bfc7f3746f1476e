"""What is minimised: a loss of the outputs of a model, bound to its targets or not.

* ``base``: :class:`Objective`: value, derivatives, constants.
* ``constants``: :class:`Constants` of an objective as a function of the stacked outputs.
* ``loss``: what supervised losses share, a scale and a reduction.
* ``cross_entropy``: :class:`CrossEntropy`, the logistic loss of several classes.
* ``losses``: :class:`Square`, :class:`BinaryCrossEntropy` and :class:`Huber`.
* ``further``: :class:`Absolute`, :class:`SoftMargin`, :class:`Poisson`, :class:`Divergence` and
  :class:`NegativeLogLikelihood`.
* ``separable``: the form of the losses that are sums over the entries.
* ``reconstruction``: :class:`Reconstruction`, the objective of auto-encoders.
* ``from_torch``: losses of torch.nn as objectives.
* ``regularizers``: :class:`Ridge`, a function of the parameters.
"""

from surefoot.objectives.base import Objective
from surefoot.objectives.constants import Constants, ObjectiveError
from surefoot.objectives.cross_entropy import CrossEntropy
from surefoot.objectives.from_torch import from_torch
from surefoot.objectives.further import Absolute, Divergence, NegativeLogLikelihood, Poisson, SoftMargin
from surefoot.objectives.losses import BinaryCrossEntropy, Huber, Square
from surefoot.objectives.reconstruction import Reconstruction, encode_decode
from surefoot.objectives.regularizers import Ridge

__all__ = [
    "Absolute",
    "BinaryCrossEntropy",
    "Constants",
    "CrossEntropy",
    "Divergence",
    "Huber",
    "NegativeLogLikelihood",
    "Objective",
    "ObjectiveError",
    "Poisson",
    "Reconstruction",
    "Ridge",
    "SoftMargin",
    "Square",
    "encode_decode",
    "from_torch",
]
