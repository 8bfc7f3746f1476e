"""Small graphs to attack: one operation, one of several results, or a function as the calculus sees it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.prepare import prepared
from surefoot.graph import Graph
from surefoot.graph.nodes import Leaf, Node, Ref, Source, Spec
from surefoot.operations.captured import capture


@dataclass(frozen=True)
class Fixed:
    """A real tensor that does not vary."""

    value: Tensor


@dataclass(frozen=True)
class Case:
    """A graph with values of its leaves.

    Attributes:
        graph: one operation, or a few.
        values: a tensor for each leaf.
        variables: the leaves that vary.
        curved: whether blocks of second derivatives are small enough to be formed.
    """

    graph: Graph
    values: Mapping[str, Tensor]
    variables: tuple[str, ...]
    curved: bool = True


def operation(target: Any, *args: Any, op: str | None = None, **kwargs: Any) -> Case:
    """One operation on tensors: real ones vary unless they are :class:`Fixed`."""
    builder = _Builder()
    name = op or (str(target.overloadpacket) if hasattr(target, "overloadpacket") else target.__name__)
    node = builder.node(name, target, args, kwargs)
    return builder.case((node,))


def pieces(target: Any, *args: Any, item: int = 0, **kwargs: Any) -> Case:
    """An operation with several results, and one of these."""
    builder = _Builder()
    whole = builder.node(str(target.overloadpacket), target, args, kwargs)
    spec = whole.specs[item]
    part = Node("part", "getitem", operator.getitem, (Ref(whole.name), item), {}, "", spec)
    return builder.case((whole, part))


def traced(function: Callable[..., Any], *tensors: Tensor) -> Case:
    """A function as the calculus sees it: captured and rewritten. All real tensors vary."""

    class Wrapped(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            return function(*inputs)

    graph = prepared(capture(Wrapped(), tensors))
    values = {leaf.name: value for leaf, value in zip(graph.inputs, tensors, strict=True)}
    values |= {name: value for name, value in graph.held.items() if name in graph.leaves}
    variables = tuple(leaf.name for leaf in graph.inputs if leaf.spec.dtype.is_floating_point)
    return Case(graph, values, variables)


class _Builder:
    """Leaves for the tensors among the arguments of an operation; the same tensor is the same leaf."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.variables: list[str] = []
        self._names: dict[int, str] = {}

    def node(self, name: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
        referred = tuple(self._refer(a) for a in args)
        named = {key: self._refer(a) for key, a in kwargs.items()}
        draft = Node("result", name, target, referred, named, "", ())
        value = draft.run(self.values)
        results = value if isinstance(value, tuple | list) else (value,)
        specs = tuple(Spec(tuple(v.shape), v.dtype) for v in results)
        return replace(draft, spec=specs if isinstance(value, tuple | list) else specs[0])

    def _refer(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(self._refer(item) for item in argument)
        fixed = isinstance(argument, Fixed)
        tensor = argument.value if isinstance(argument, Fixed) else argument
        if not isinstance(tensor, Tensor):
            return argument
        if id(tensor) not in self._names:
            name = f"leaf{len(self._names)}"
            self._names[id(tensor)] = name
            self.values[name] = tensor
            if tensor.is_floating_point() and not fixed:
                self.variables.append(name)
        return Ref(self._names[id(tensor)])

    def case(self, nodes: tuple[Node, ...]) -> Case:
        leaves = {
            name: Leaf(name, name, Source.INPUT, Spec(tuple(v.shape), v.dtype)) for name, v in self.values.items()
        }
        graph = Graph(leaves=leaves, nodes=nodes, outputs=(nodes[-1].name,), blocks={}, held={})
        return Case(graph, dict(self.values), tuple(self.variables))
