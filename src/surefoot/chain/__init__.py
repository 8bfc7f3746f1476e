"""A network as a chain of computations: the paper's Definition 1, read off the graph.

* ``chain``: the chain, its states, its value, its parts and compositions.
* ``computation``: one computation, with its biaffine and its non-affine parts.
* ``cut``: where a graph is cut into computations.
"""

from surefoot.chain.chain import Chain
from surefoot.chain.computation import Computation, State

__all__ = ["Chain", "Computation", "State"]
