"""Arithmetic and memory complexity of the oracles.

* ``report``: ``cost``, the paper's complexities of a model next to what PyTorch counts, and its table.
* ``layers``: the cost of one computation of a chain, and of a gradient, a Gauss-Newton and a Newton step.
* ``counted``: multiplications and memory as PyTorch counts them.
"""

from surefoot.complexity.counted import Counted
from surefoot.complexity.layers import ComputationCost, OracleCost
from surefoot.complexity.report import Cost, Passes, chain_cost, cost

__all__ = ["ComputationCost", "Cost", "Counted", "OracleCost", "Passes", "chain_cost", "cost"]
