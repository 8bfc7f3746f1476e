"""Lower bounds by search: how far a certificate is from the truth.

* ``value``: numbers that are known to be attained, a type of their own.
* ``space``: the domain as a set of vectors: projection, random points.
* ``function``: the model as a function of one vector, with its first two derivatives.
* ``ascent``: power iterations in the directions, projected ascent in the point.
* ``kinks``: differences of gradients.
* ``search``: :func:`estimate`, all of it from a model and a domain.
* ``bracket``: an estimate next to a certificate.
"""

from surefoot.lower.bracket import bracket
from surefoot.lower.search import estimate
from surefoot.lower.value import Estimate, LowerBound

__all__ = ["Estimate", "LowerBound", "bracket", "estimate"]
