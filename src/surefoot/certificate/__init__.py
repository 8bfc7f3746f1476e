"""The certificate and how it is shown.

* ``proving``: from the passes of the calculus to a certificate, on a given set or on a ball that is searched for;
  ``segments``: along a segment; ``from_sizes``: of an objective, from norms of tensors;
  ``from_hessian``: around the weights, from the second derivative there.
* ``downhill``: a step that is proved on the segment against the gradient.
* ``pieces``: the certificate of several batches; ``added``: bounds of a sum; ``summed``: the gradient of a sum.
* ``regularised``: the certificate with a function of the parameters added.
* ``record``: :class:`Certificate`. ``rows``: its table.
* ``advice``: the verdict, and what limits it.
* ``text``, ``plot``: a certificate as text, as a data frame or a figure; pages are made by :mod:`surefoot.report`.
* ``document``: a certificate as JSON, and back; how to cite it.
"""

from surefoot.certificate.record import Certificate
from surefoot.certificate.rows import Row

__all__ = ["Certificate", "Row"]
