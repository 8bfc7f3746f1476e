"""Oracles on a chain of computations.

* ``autodiff``: the value, and the derivative as a linear operator in both directions.
"""

from surefoot.oracles.autodiff import Autodiff

__all__ = ["Autodiff"]
