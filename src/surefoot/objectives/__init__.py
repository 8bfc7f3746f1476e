"""What is minimised: a loss of the outputs of a model, bound to its targets or not.

* ``base``: :class:`Objective`, and how one becomes the last operation of a graph.
* ``losses``: :class:`Square` and :class:`CrossEntropy`, means over the samples.
* ``regularizers``: :class:`Ridge`, a function of the parameters.
"""

from surefoot.objectives.base import Objective, ObjectiveError, attach
from surefoot.objectives.losses import CrossEntropy, Square
from surefoot.objectives.regularizers import Ridge

__all__ = ["CrossEntropy", "Objective", "ObjectiveError", "Ridge", "Square", "attach"]
