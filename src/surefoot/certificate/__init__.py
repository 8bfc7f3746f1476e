"""The certificate and how it is shown.

* ``proving``: from the passes of the calculus to a certificate. ``longest_step``: on which ball, if none is given.
* ``record``: :class:`Certificate`. ``rows``: its table, and the table as a tree of modules.
* ``advice``: the verdict, what limits it, what would help. ``numbers``: how numbers are written.
* ``text``, ``notebook``, ``plot``, ``frame``: printed, in a notebook, as a figure, as a data frame.
* ``document``: as JSON, and back. ``citation``: how to cite it.
"""

from surefoot.certificate.record import Certificate
from surefoot.certificate.rows import Row

__all__ = ["Certificate", "Row"]
