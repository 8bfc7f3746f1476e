"""Changes of the floating-point type, read as the identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot.graph.structure import Graph, Node, Ref, Spec

_CASTS = (
    "aten.to",
    "aten._to_copy",
    "aten.type_as",
    "aten.contiguous",
    "aten.clone",
    "aten.alias",
    "aten.dropout",
)


def casts(graph: Graph) -> Graph:
    """Readers of a cast, a copy or an idle dropout read its argument instead."""
    source: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        moved = substituted(node, source)
        nodes.append(moved)
        if node.op in _CASTS and _same_kind(graph, node):
            source[node.name] = moved.inputs[0]
    return replace(graph, nodes=tuple(nodes))


def substituted(node: Node, source: Mapping[str, str]) -> Node:
    """The node with some of the tensors it reads replaced by others."""
    if not any(name in source for name in node.inputs):
        return node
    args = tuple(_swap(a, source) for a in node.args)
    return replace(node, args=args, kwargs={key: _swap(a, source) for key, a in node.kwargs.items()})


def _swap(argument: Any, source: Mapping[str, str]) -> Any:
    if isinstance(argument, Ref):
        return Ref(source.get(argument.name, argument.name))
    if isinstance(argument, list | tuple):
        return type(argument)(_swap(item, source) for item in argument)
    return argument


def _same_kind(graph: Graph, node: Node) -> bool:
    before, after = graph.spec(node.inputs[0]), node.spec
    if not isinstance(before, Spec) or not isinstance(after, Spec):
        return False
    return before.dtype.is_floating_point and after.dtype.is_floating_point and before.shape == after.shape
