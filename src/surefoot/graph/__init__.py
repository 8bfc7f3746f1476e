"""The graph of a model.

* ``capture``: from a module and an example input to a graph, through ``torch.export``.
* ``structure``: leaves, nodes, parameter blocks, live sets.
* ``canonical``: normalisations split from their scale and shift.
* ``checks``, ``outputs``, ``refusals``: what is accepted, and the errors for what is not.
* ``preserve``, ``fingerprint``: the user's model stays as it was; equal models share a capture.
"""

from surefoot.graph.capture import capture
from surefoot.graph.structure import Block, Graph, Leaf, Node, Ref, Role, Source, Spec

__all__ = ["Block", "Graph", "Leaf", "Node", "Ref", "Role", "Source", "Spec", "capture"]
