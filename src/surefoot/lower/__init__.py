"""Lower bounds by search: how far a certificate is from the truth.

* ``space``: the domain as a set of vectors: projection, random points.
* ``function``: the model as a function of one vector, with its first two derivatives.
* ``ascent``: power iterations in the directions, projected ascent in the point; differences of gradients.
* ``search``: :func:`estimate`, all of it from a model and a domain.

What is found, and how it stands next to a certificate, is in :mod:`surefoot.attained`.
"""

from surefoot.attained import Estimate, LowerBound, bracket
from surefoot.lower.search import estimate

__all__ = ["Estimate", "LowerBound", "bracket", "estimate"]
