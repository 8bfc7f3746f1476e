"""The graph of a model.

* ``capturing``: from a module and an example input to a graph, once per model and shape.
* ``structure``, ``nodes``, ``assemble``: the graph; its leaves, operations and blocks; how it is put together.
* ``trace``, ``translate``: ``torch.export``, and what goes wrong in it, in the user's terms.
* ``read``, ``naming``, ``plain``: from an exported program to a graph.
* ``checks``, ``derivative``, ``stateful``, ``refusals``: what is accepted, and errors for the rest.
* ``survey``, ``identity``, ``preserve``: the model stays as it was, and one that has not changed is not captured
  again.
* ``compose``: cutting a graph in parts and putting two graphs one behind the other.
* ``evaluate``: operations and graphs in double precision.
"""

from surefoot.graph.capturing import capture_with
from surefoot.graph.structure import Block, Graph, Leaf, Node, Ref, Role, Source, Spec

__all__ = ["Block", "Graph", "Leaf", "Node", "Ref", "Role", "Source", "Spec", "capture_with"]
