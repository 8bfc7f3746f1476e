"""Lower bounds by search: how far a certificate is from the truth.

* ``value``: numbers that are known to be attained, a type of their own; :func:`bracket` next to a certificate.
* ``space``: the domain as a set of vectors: projection, random points.
* ``function``: the model as a function of one vector, with its first two derivatives.
* ``ascent``: power iterations in the directions, projected ascent in the point; differences of gradients.
* ``search``: :func:`estimate`, all of it from a model and a domain.
"""

from surefoot.lower.search import estimate
from surefoot.lower.value import Estimate, LowerBound, bracket

__all__ = ["Estimate", "LowerBound", "bracket", "estimate"]
