"""A network as a chain of computations: the paper's Definition 1, read off the graph.

* ``chain``: the chain, its states, its value, its parts and compositions.
* ``cut``: one computation, with its biaffine and its non-affine parts, and where a graph is cut into them.
* ``autodiff``: the value of a chain and its derivative as a linear operator; ``batched``: the same where the data
  come in pieces, or lie with several processes.
* ``recorded``: passes as automatic differentiation records them; ``traced``: the same, traced once per graph.
"""

from surefoot.chain.chain import Chain
from surefoot.chain.cut import Computation, State

__all__ = ["Chain", "Computation", "State"]
