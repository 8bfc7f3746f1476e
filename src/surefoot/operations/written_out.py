"""Operations written out in simpler ones, by tracing a line of Python: their bounds are those of the pieces.

An operation with a formula here needs no record of its own. What PyTorch itself composes of other operations
(``tensordot``, ``diff``, ``kron``, …) needs not even that: its composition is read off.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.graph.read import operations
from surefoot.graph.structure import Graph, Node, Ref, Spec
from surefoot.operations.record import Expansion, expansion, record_of
from surefoot.torch_private import schema_of

Formula = Callable[..., Any]
_alias: Any = torch.ops.aten.alias.default


def written_out(
    *names: str, when: Callable[[Graph, Node], bool] = lambda graph, node: True
) -> Callable[[Formula], Formula]:
    """Register a formula for operations: from their arguments by name to their result.

    ``when`` says whether the formula applies to a use; it may also return ``NotImplemented``.
    """

    def register(formula: Formula) -> Formula:
        expansion(*names)(lambda graph, node: traced(graph, node, formula) if when(graph, node) else None)
        return formula

    return register


def composition(graph: Graph, node: Node) -> Expansion | None:
    """What PyTorch composes an operation of; ``None`` if it is not composed, or something is known about it."""
    record = record_of(node)
    known = record.bounds is not None or record.scalar is not None or record.expansions
    if known or schema_of(node.target) is None:
        return None
    whole = functionalize(node.target)  # a composition may write in place
    found = traced(graph, node, whole, pre_dispatch=False)
    return None if found is None or any(part.target == node.target for part in found.nodes) else found


def traced(graph: Graph, node: Node, function: Formula, pre_dispatch: bool = True) -> Expansion | None:
    """The operations that a function of an operation's arguments consists of, in place of the operation.

    A graph may have left out conversions between real types: all real arguments are of the type of the result.
    """
    specs = {name: _converted(graph.spec(name), node.spec) for name in node.inputs}

    def run(*tensors: Tensor) -> Any:
        found = dict(zip(specs, tensors, strict=True))
        result = function(**{key: _with(argument, found) for key, argument in node.arguments.items()})
        if result is NotImplemented:
            raise NotImplementedError
        return result

    try:
        nodes, results = steps(run, specs, node.name, node.module, pre_dispatch, graph.by_name)
    except NotImplementedError:
        return None
    if isinstance(node.spec, tuple):
        return Expansion(nodes, results)
    if results[0].name in specs:
        spec = specs[results[0].name]
        return Expansion(
            (*nodes, replace(node, op="aten.alias", target=_alias, args=results, kwargs={}, spec=spec))
        )
    last = {results[0].name: node.name}
    return Expansion(tuple(part.renamed(last, name=last.get(part.name, part.name)) for part in nodes))


def steps(
    function: Callable[..., Any],
    specs: Mapping[str, Any],
    prefix: str,
    module: str,
    pre_dispatch: bool = True,
    taken: Container[str] = (),
) -> tuple[tuple[Node, ...], tuple[Ref, ...]]:
    """The operations of a function of tensors with these names, and the names of its results.

    Their names begin with the prefix and are not among those that are taken.

    The function sees tensors without entries, so that it can depend on their shapes only.
    """
    if not all(isinstance(spec, Spec) for spec in specs.values()):
        raise NotImplementedError
    empty = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs.values()]
    with torch.no_grad():
        traced = make_fx(lambda *tensors: function(*tensors), pre_dispatch=pre_dispatch)(*empty)
    placeholders = traced.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = {p: Ref(name) for p, name in zip(placeholders, specs, strict=True)}
    nodes = list(operations(traced, values, set(specs)))
    while any(f"{prefix}_{part.name}" in taken for part in nodes):
        prefix += "_"
    names = {part.name: f"{prefix}_{part.name}" for part in nodes}
    (output,) = traced.graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], tuple | list) else output.args
    results = tuple(Ref(names.get(values[result].name, values[result].name)) for result in returned)
    return tuple(part.renamed(names, name=names[part.name], module=module) for part in nodes), results


def _converted(spec: Any, result: Any) -> Any:
    real = all(isinstance(s, Spec) and s.dtype.is_floating_point for s in (spec, result))
    return replace(spec, dtype=result.dtype) if real else spec


def _with(argument: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(argument, Ref):
        return tensors[argument.name]
    if isinstance(argument, list | tuple):
        return type(argument)(_with(item, tensors) for item in argument)
    return argument
