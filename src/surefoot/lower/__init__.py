"""Lower bounds by search: how far a certificate is from the truth.

* ``function``: the domain as a set of vectors, the model as a function of one, with its first two derivatives.
* ``search``: :func:`estimate`, by power iterations in the directions, projected ascent in the point and
  differences of gradients; :func:`curvature_at_weights`, by Lanczos steps.
* ``krylov``: Lanczos steps, and an upper bound from them that holds with a stated probability.

The results, and their comparison with a certificate, are in :mod:`surefoot.attained`.
"""

from surefoot.attained import Estimate, LowerBound, ProbableBound, bracket
from surefoot.lower.search import curvature_at_weights, estimate

__all__ = ["Estimate", "LowerBound", "ProbableBound", "bracket", "curvature_at_weights", "estimate"]
