"""The sparsity of every operation: its own count, or what follows from its form."""

from __future__ import annotations

import surefoot.operations.families  # noqa: F401  registers the operations
from surefoot.graph import Graph, Node, Role
from surefoot.operations.call import Use
from surefoot.operations.record import Form, record_of
from surefoot.operations.sparsity import Sparsity


def sparsity(graph: Graph, node: Node) -> Sparsity:
    """The non-zero entries of an operation's tensors.

    What has no count of its own is counted by its form: moving numbers costs nothing (the paper does not count the
    extraction of patches either), a lookup in an embedding included; everything else costs one operation for each
    entry of the result and each argument that varies. This is exact for sums and for functions applied to each
    entry, and the default for operations that are not known.
    """
    record = record_of(node)
    if record.cost is not None:
        return record.cost(Use(node, graph.spec))
    form = record.form_of(node)
    if form is Form.LAYOUT:
        return Sparsity()
    varying = [name for name in node.inputs if graph.roles[name] != Role.CONSTANT]
    if form is Form.LINEAR:
        return Sparsity(terms=tuple((name, node.numel) for name in varying))
    derivatives = node.numel * len(varying)
    return Sparsity(evaluation=node.numel, derivative=derivatives, jacobian=derivatives, application=derivatives)
