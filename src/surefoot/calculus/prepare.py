r"""Rewriting a graph before the calculus reads it: the same function, in operations with sharp constants.

* Changes of the floating-point type are the identity in real arithmetic.
* What has an expansion (:func:`surefoot.operations.record.expansion`) is written in other operations: recurrent
  layers are unrolled, attention is products and a soft-max, normalisations written out by hand are recognised.
* Chains of scalar operations on one tensor become one scalar function. Bounded operation by operation
  :math:`x\,\sigma(x)` would look like a product of two unrelated tensors; as one function its constants are exact.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import surefoot.operations.captured  # noqa: F401  registers the operations
from surefoot.calculus.folding import fold
from surefoot.enclosure import Enclosure
from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph.structure import Graph, Node, Ref, Role, Spec, needed
from surefoot.operations.conditions import CHOOSING, COMPARISONS, Condition
from surefoot.operations.record import record_of
from surefoot.operations.written_out import composition
from surefoot.scalar import ScalarFunction

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DEPTH = 8  # how often an expansion may contain another
_prepared: WeakKeyDictionary[Graph, Graph] = WeakKeyDictionary()


def prepared(graph: Graph) -> Graph:
    """The graph the calculus runs on; computed once per graph."""
    if graph not in _prepared:
        ready = fused(expanded(without_casts(graph)))
        _prepared[graph] = replace(ready, nodes=tuple(needed(ready.nodes, ready.outputs)))
    return _prepared[graph]


def without_casts(graph: Graph) -> Graph:
    """Readers of a cast, a copy or an idle dropout read its argument instead."""
    source: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        moved = node.renamed(source) if any(name in source for name in node.inputs) else node
        nodes.append(moved)
        if record_of(node).identity and _same_kind(graph.spec(node.inputs[0]), node.spec):
            source[node.name] = moved.inputs[0]
    return replace(graph, nodes=tuple(nodes))


def _same_kind(before: Spec | tuple[Spec, ...], after: Spec | tuple[Spec, ...]) -> bool:
    if not isinstance(before, Spec) or not isinstance(after, Spec):
        return False
    return before.dtype.is_floating_point and after.dtype.is_floating_point and before.shape == after.shape


def shared(graph: Graph) -> Graph:
    """What is computed twice from the same tensors is computed once: patterns are recognised by name."""
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        moved = node.renamed(names) if any(name in names for name in node.inputs) else node
        same = first.setdefault(repr((moved.op, str(moved.target), moved.args, dict(moved.kwargs))), node.name)
        if same != node.name and node.name not in graph.outputs:
            names[node.name] = same
        else:
            nodes.append(moved)
    return replace(graph, nodes=tuple(nodes))


def expanded(graph: Graph) -> Graph:
    """Every operation replaced by its first expansion that applies, until none does."""
    for node in graph.nodes:
        if any(spec.dtype.is_complex for spec in node.specs):
            raise UnsupportedOperation(
                f"'{node.op}' in {describe(node.module)}: it computes with complex numbers, of which nothing "
                "is proved: write real and imaginary parts, and a Fourier transform as a product with its matrix."
            )
    for _ in range(_DEPTH):
        before, graph = graph, shared(graph)
        graph = _expanded_once(graph)
        if len(graph.nodes) == len(before.nodes) and all(map(operator.is_, graph.nodes, before.nodes)):
            break
    return graph


def _expanded_once(graph: Graph) -> Graph:
    nodes: list[Node] = []
    results: dict[str, tuple[Ref, ...]] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0].name in results:
            args = (results[node.args[0].name][node.args[1]],)
            nodes.append(node.by(torch.ops.aten.alias.default, args=args, kwargs={}))
            continue
        attempts = (expand(graph, node) for expand in (*record_of(node).expansions, composition))
        expansion = next((attempt for attempt in attempts if attempt is not None), None)
        nodes += (node,) if expansion is None else expansion.nodes
        if expansion is not None and expansion.results:
            results[node.name] = expansion.results
    return replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True)
class _Expression:
    """A tensor as a scalar function of the entries of another, or a condition on them."""

    root: str
    function: ScalarFunction | Condition


def scalar(x: Tensor, function: ScalarFunction) -> Tensor:
    """A scalar function on every entry."""
    return function(x)


def as_scalar(graph: Graph, node: Node) -> Node:
    """An operation alone as a scalar function of the entries of one tensor, if it is one and not affine."""
    expression = _expression(graph, node, {}, cache(partial(fold, graph, graph.held)))
    return node if expression is None else _scalar_node(node, expression)


def _scalar_node(node: Node, expression: _Expression) -> Node:
    if isinstance(expression.function, Condition) or expression.function.affine[-1] is not None:
        return node
    args = (Ref(expression.root), expression.function)
    return replace(node, op="surefoot.scalar", target=scalar, args=args, kwargs={})


def fused(graph: Graph, roots: frozenset[str] = frozenset()) -> Graph:
    """Every node that is a scalar function of one tensor, and not affine, becomes one node.

    What is compared, and is not affine in the tensor that it is a function of, is a tensor that others are
    functions of: among the ``roots``.
    """
    known: dict[str, _Expression] = {}
    compared: set[str] = set()
    exact = cache(partial(fold, graph, graph.held))  # computed when first asked for
    nodes = []
    for node in graph.nodes:
        expression = _expression(graph, node, known, exact)
        if expression is None and node.op in COMPARISONS:
            compared |= known.keys() & set(node.inputs)
        if expression is not None and node.name not in roots:
            known[node.name] = expression
        nodes.append(node if expression is None else _scalar_node(node, expression))
    return fused(graph, roots | compared) if compared else replace(graph, nodes=tuple(nodes))


def with_choices(graph: Graph) -> Graph:
    """Lines that a comparison of what varies chooses from, as one scalar function: rectifiers written by hand."""
    compared = (node.name for node in graph.nodes if node.op in COMPARISONS)
    if not any(Role.PARAMETERS in graph.roles[name] for name in compared):
        return graph
    nodes = zip(graph.nodes, fused(graph).nodes, strict=True)
    return replace(graph, nodes=tuple(joined if _chooses_lines(node, joined) else node for node, joined in nodes))


def _chooses_lines(node: Node, joined: Node) -> bool:
    if node.op not in CHOOSING or joined.op != "surefoot.scalar":
        return False
    last = joined.args[1].steps[-1]
    return last.op == "piecewise" and all(piece.affine[-1] is not None for piece in last.pieces)


def _expression(
    graph: Graph, node: Node, known: dict[str, _Expression], exact: Callable[[], Mapping[str, Enclosure]]
) -> _Expression | None:
    build = record_of(node).scalar
    if build is None or not isinstance(node.spec, Spec) or node.spec.dtype not in (*_REAL, torch.bool):
        return None
    operands: dict[str, Any] = {}
    roots: set[str] = set()
    for key, argument in node.arguments.items():
        if isinstance(argument, Ref):
            number = _number(graph, argument, exact) if len(node.inputs) > 1 else None  # one alone is the tensor
            if number is not None:
                operands[key] = number
                continue
            found = known.get(argument.name)
            if not _same_shape(graph, argument, node, found is not None):
                return None
            if found is not None and isinstance(found.function, Condition) and node.op not in CHOOSING:
                return None
            found = found or _Expression(argument.name, ScalarFunction.variable())
            roots.add(found.root)
            operands[key] = found.function
        else:
            operands[key] = argument
    if len(roots) != 1:
        return None
    infinite = {key for key, value in operands.items() if isinstance(value, float) and not math.isfinite(value)}
    if infinite - {"min", "max"}:  # an infinite limit limits nothing
        return None
    if node.spec.dtype is torch.bool and Role.PARAMETERS not in graph.roles[node.name]:
        return None  # a mask of the data is exact as it is
    function = build(operands)
    return None if function is None else _Expression(roots.pop(), function)


def _same_shape(graph: Graph, argument: Ref, node: Node, is_known: bool) -> bool:
    """Whether a tensor meets the result entry by entry; whole numbers are not functions of x, conditions on x are
    known.
    """
    spec = graph.spec(argument.name)
    if not isinstance(spec, Spec) or not isinstance(node.spec, Spec) or not (spec.is_real or is_known):
        return False
    return spec.shape == node.spec.shape


def _number(graph: Graph, argument: Ref, exact: Callable[[], Mapping[str, Enclosure]]) -> float | None:
    """A constant tensor with one entry, as a number.

    A number that was computed from others counts if it was computed exactly: otherwise it is a rounded one, and
    not the number that the model defines.
    """
    if argument.name in graph.held:
        return _finite(graph.held[argument.name])
    spec = graph.spec(argument.name)
    if graph.roles[argument.name] != Role.CONSTANT or not isinstance(spec, Spec) or spec.numel != 1:
        return None
    found = exact()[argument.name]
    return None if found.is_inexact else _finite(found.value)


def _finite(value: Any) -> float | None:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device.type == "meta":
        return None
    number = float(value)
    return number if math.isfinite(number) else None
