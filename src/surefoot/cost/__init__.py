"""Arithmetic and memory complexity of the oracles.

* ``report``: ``cost``, the paper's complexities of a model next to what PyTorch counts, and its table.
* ``layers``: the cost of one computation of a chain.
* ``oracles``: the cost of a gradient, a Gauss-Newton and a Newton step.
* ``sparsity``: the sparsity of every operation, as a table from names to functions.
* ``products``, ``nonaffine``: these functions, by family; ``record``: what they return.
* ``counted``: multiplications and memory as PyTorch counts them.
* ``units``: large numbers for readers.

The package can be called: ``surefoot.cost(model, x)`` is ``surefoot.cost.cost(model, x)``.
"""

import sys
from types import ModuleType
from typing import Any

from torch import nn

from surefoot.cost.counted import Counted
from surefoot.cost.layers import ComputationCost
from surefoot.cost.oracles import OracleCost
from surefoot.cost.report import Cost, Passes, chain_cost, cost

__all__ = ["ComputationCost", "Cost", "Counted", "OracleCost", "Passes", "chain_cost", "cost"]


class _Callable(ModuleType):
    """A module that is also its main function, so that the public name works however it was imported."""

    def __call__(self, model: nn.Module, x: Any) -> Cost:
        return cost(model, x)


sys.modules[__name__].__class__ = _Callable
