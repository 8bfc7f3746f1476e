"""Scalar functions and their constants: suprema of |a| and its first five derivatives, Taylor series.

* ``function``: :class:`ScalarFunction`, an expression in one real variable.
* ``activations``: the element-wise activations of torch.nn, each as such an expression.
* ``primitives``: the elementary functions they are made of, on tensors, balls and half lines.
* ``tails``: arithmetic on half lines, where quantities are enclosed together with their growth.
* ``enclosure``: evaluation on power series of enclosures; kinks, and how smoothly pieces join; one interval.
* ``bounds``: :func:`supremum` and :func:`value_range` over one interval, by branch and bound.
* ``table``: :func:`sup_on` and :func:`range_on` over as many intervals as a tensor has entries, from
  enclosures on cells that cover the real line.
* ``recurrences``: the Taylor coefficients of the elementary functions on tensors.
* ``rounded``: :class:`Rounded`, numbers as computed with a bound on their error.
* ``series``: :func:`taylor` and :func:`derivatives`, those of scalar functions.
"""

from surefoot.scalar import activations as _activations  # noqa: F401 - fills the names
from surefoot.scalar.bounds import supremum, value_range
from surefoot.scalar.function import ScalarFunction
from surefoot.scalar.rounded import Rounded
from surefoot.scalar.series import derivatives, rounded_derivatives, rounded_slope, taylor
from surefoot.scalar.table import range_on, sup_on, sups_on

__all__ = [
    "Rounded", "ScalarFunction", "derivatives", "range_on", "rounded_derivatives", "rounded_slope", "sup_on",
    "supremum", "sups_on", "taylor", "value_range",
]  # fmt: skip
