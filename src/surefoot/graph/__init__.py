"""The graph of a model.

* ``capturing``: from a module and an example input to a graph, once per model and shape.
* ``nodes``, ``structure``: leaves, operations and blocks, and how operations are run; the graph, put together from
  them.
* ``compose``: cutting a graph in parts and putting two graphs one behind the other.
* ``survey``, ``preserve``: all that a forward pass may read; the model stays as it was, and unless it changes it
  is not captured again; ``guard``: a quick look whether anything of that was touched.
* ``flatten``: models that differentiate inside ``forward``, to one level of operations; boolean masks as indices.
* ``trace``, ``read``: ``torch.export``, with its errors in the user's terms; from an exported program to a graph.
* ``refusals``: graphs that would not say the truth about the model.
"""

from surefoot.graph.capturing import capture_with
from surefoot.graph.structure import Block, Graph, Leaf, Node, Ref, Role, Source, Spec

__all__ = ["Block", "Graph", "Leaf", "Node", "Ref", "Role", "Source", "Spec", "capture_with"]


def __dir__() -> list[str]:
    return list(__all__)
