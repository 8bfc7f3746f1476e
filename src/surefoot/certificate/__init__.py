"""The certificate and how it is shown.

* ``proving``: from the passes of the calculus to a certificate, and on which ball, if none is given.
* ``downhill``: a step that is proved on the segment against the gradient.
* ``pieces``: the certificate of data in pieces, from those of the batches; ``summed``: their gradient.
* ``regularised``: with a function of the parameters added.
* ``record``: :class:`Certificate`. ``rows``: its table, and the table as a tree of modules.
* ``advice``: the verdict, what limits it, what would help. ``numbers``: how numbers are written.
* ``text``: printed. ``notebook``: in a notebook. ``plot``: as a data frame and as a figure.
* ``document``: as JSON, and back; how to cite it.
"""

from surefoot.certificate.record import Certificate
from surefoot.certificate.rows import Row

__all__ = ["Certificate", "Row"]
