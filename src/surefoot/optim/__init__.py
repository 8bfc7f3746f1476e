"""Optimizers whose steps rest on a proof.

We use these words. A *problem* is a model, data and a loss, read once. A *point* is weights as they are stored,
with value, gradient and enclosure when asked. A *direction* proposes where to go, and learns. A *search* looks for
a step along it. *Descent* puts them together: propose, search, prove, write. An *epoch check* accepts the weights
if the objective of all data is proved to be lower than before, and rolls back otherwise.

* ``problem``: problems and points; ``directions``, ``lbfgs``, ``levenberg``: directions; ``search``: the search;
  ``segment``: steps proved ahead.
* ``descent``: :class:`CertifiedDescent`, :class:`GaussNewton`, :class:`Newton`; ``history``: their records.
* ``keep``: :class:`KeepIfLower`; ``epochs``: :class:`ProvedEpochs`; ``projected``: the paper's projected methods.
"""

from surefoot.optim.descent import CertifiedDescent, GaussNewton, Newton, OptimizerError
from surefoot.optim.epochs import ProvedEpochs
from surefoot.optim.history import History, Stationarity, StepRecord
from surefoot.optim.keep import EpochRecord, KeepIfLower
from surefoot.optim.projected import ProjectedGradient, ProjectedSGD, ProjectedSVRG

__all__ = [
    "CertifiedDescent", "EpochRecord", "GaussNewton", "History", "KeepIfLower", "Newton", "OptimizerError",
    "ProjectedGradient", "ProjectedSGD", "ProjectedSVRG", "ProvedEpochs", "Stationarity", "StepRecord",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
