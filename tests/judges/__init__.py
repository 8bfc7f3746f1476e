"""Slow, obvious and independent versions of what the package computes, and the properties it promises.

* ``function``: a model as a function of one vector on a set, in double precision, read from its modules.
* ``dense``: Jacobian and second derivative written out, and their norms.
* ``models``: a dozen small models of every kind.
* ``suprema``: values, slopes and curvatures found by sampling and ascent.
* ``properties``: the named assertions.
"""

from judges.dense import jacobian, jacobian_norm, second_derivative, tensor_norm
from judges.function import Target
from judges.properties import (
    Violation,
    assert_invariant_under,
    assert_monotone_in_radius,
    assert_upper_bound,
    violations,
)
from judges.suprema import Suprema, attack

__all__ = [
    "Suprema",
    "Target",
    "Violation",
    "assert_invariant_under",
    "assert_monotone_in_radius",
    "assert_upper_bound",
    "attack",
    "jacobian",
    "jacobian_norm",
    "second_derivative",
    "tensor_norm",
    "violations",
]
