"""Optimizers whose steps rest on a proof.

We use these words. A *problem* is a model, data and a loss, read once. A *point* is weights as they are stored,
with value, gradient and enclosure when asked. A *direction* proposes where to go, and learns. A *search* looks for
a step along it. *Descent* puts them together: propose, search, prove, write. An *epoch check* accepts an epoch if
the objective of all data is proved to be lower after it, and rolls back otherwise.

* ``problem``: problems and points; ``directions``, ``lbfgs``, ``levenberg``: directions; ``search``: the search;
  ``segment``: steps proved ahead.
* ``descent``: :class:`CertifiedDescent`, :class:`GaussNewton`, :class:`Newton`; ``history``: their records.
"""

from surefoot.optim.descent import CertifiedDescent, GaussNewton, Newton, OptimizerError, StalledWarning
from surefoot.optim.history import History, Stationarity, StepRecord

__all__ = [
    "CertifiedDescent", "GaussNewton", "History", "Newton", "OptimizerError", "StalledWarning", "Stationarity",
    "StepRecord",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
