"""Lower bounds by search: how far a certificate is from the truth.

* ``function``: the domain as a set of vectors, the model as a function of one, with its derivatives.
* ``search``: :func:`estimate`, by power iterations in the directions, projected ascent in the point and
  differences of gradients; :func:`curvature_at_weights`, by Lanczos steps.

The results, and their comparison with a certificate, are in :mod:`surefoot.attained`.
"""

from surefoot.attained import Estimate, LowerBound, bracket
from surefoot.lower.search import curvature_at_weights, estimate

__all__ = ["Estimate", "LowerBound", "bracket", "curvature_at_weights", "estimate"]
