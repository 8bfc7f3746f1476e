"""An objective as the last operation of a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from surefoot.errors import ObjectiveError
from surefoot.graph import Graph, Leaf, Source
from surefoot.graph.compose import Naming, compose
from surefoot.graph.nodes import Node, Ref, Spec, fresh
from surefoot.graph.structure import assemble
from surefoot.operations.captured import capture
from surefoot.operations.written_out import steps


@runtime_checkable
class Attachable(Protocol):
    """An objective that is one operation of outputs, targets if it takes any, and options, and refuses misfits."""

    operation: str
    function: Any
    options: Any
    takes_targets: bool
    check: Callable[[Spec, Spec | None], None]
    fit: Callable[[Spec, Tensor], None]
    chosen: Callable[[], Tensor]
    arranged: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# The graphs of a model with each loss that was attached to it, and the names of their targets: an optimizer
# composes once.
_composed_with: WeakKeyDictionary[Graph, dict[Hashable, tuple[Graph, str]]] = WeakKeyDictionary()


def attach(graph: Graph, objective: nn.Module) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of the objective of a model, and the values of its targets by leaf name.

    The objective is a loss bound to targets, or any module that maps the outputs to one number.

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> whole, targets = sf.objectives.attach(graph, sf.Square(torch.zeros(5, 3)))
    >>> [node.op for node in whole.nodes], list(targets)
    (['aten.linear', 'surefoot.square'], ['targets'])
    """
    outputs = graph.spec(graph.outputs[0])
    if len(graph.outputs) != 1 or not isinstance(outputs, Spec):
        raise ObjectiveError(
            f"an objective reads one tensor, the model returns {len(graph.outputs)}: return only what is compared"
        )
    if not isinstance(objective, Attachable):
        return _composed_with_module(graph, outputs, objective), {}
    if not objective.takes_targets:
        objective.check(outputs, None)
        return _composed(graph, outputs, objective, None)[0], {}
    targets = objective.chosen()
    objective.fit(outputs, targets)
    composed, name = _composed(graph, outputs, objective, Spec(tuple(targets.shape), targets.dtype))
    return composed, {name: targets}


def _composed(graph: Graph, outputs: Spec, objective: Attachable, targets: Spec | None) -> tuple[Graph, str]:
    """The loss as one more node."""
    kept = _composed_with.setdefault(graph, {})
    key = objective.operation, targets, tuple(objective.options.items())
    if key not in kept:
        taken = {*graph.leaves, *graph.by_name}
        leaves, read = dict(graph.leaves), [graph.outputs[0]]
        if targets is not None:
            leaf = Leaf(fresh("targets", taken), "targets", Source.TARGET, targets)
            leaves[leaf.name] = leaf
            read.append(leaf.name)
        name, args = fresh("loss", taken), tuple(map(Ref, read))
        before: tuple[Node, ...] = ()
        if targets is not None and _is_arranged(objective, outputs, targets):
            before, args = steps(
                objective.arranged, dict(zip(read, (outputs, targets), strict=True)), name, "objective"
            )
        node = Node(
            name=name,
            op=objective.operation,
            target=type(objective).function,
            args=args,
            kwargs=objective.options,
            module="objective",
            spec=Spec((), outputs.dtype),
        )
        composed = assemble(leaves, [*graph.nodes, *before, node], (node.name,), graph.held, graph.aliases)
        kept[key] = composed, read[-1]
    return kept[key]


def _is_arranged(objective: Attachable, outputs: Spec, targets: Spec) -> bool:
    """Whether the loss reads outputs and targets in other shapes."""
    given = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in (outputs, targets)]
    return any(after is not before for after, before in zip(objective.arranged(*given), given, strict=True))


def _composed_with_module(graph: Graph, outputs: Spec, objective: nn.Module) -> Graph:
    """Any module after the model; its own parameters and buffers do not vary."""
    device = next((value.device for value in graph.held.values()), torch.device("cpu"))
    second = capture(objective, torch.zeros(outputs.shape, dtype=outputs.dtype, device=device))
    if len(second.outputs) != 1 or second.numel(second.outputs[0]) != 1:
        raise ObjectiveError("an objective returns one number")
    values = {name: value.detach() for name, value in objective.named_parameters()}
    kept = _composed_with.setdefault(graph, {})
    key = second, tuple(value.data_ptr() for value in values.values())  # held below, so no address is used again
    if key not in kept:
        leaves = {
            name: replace(leaf, source=Source.CONSTANT) if leaf.source is Source.PARAMETER else leaf
            for name, leaf in second.leaves.items()
        }
        held = {**second.held, **{leaf.name: values[leaf.path] for leaf in second.parameters}}
        fixed = assemble(leaves, second.nodes, second.outputs, held, second.aliases)
        plain = Naming(lambda path: path, lambda path: path)
        inner = Naming(lambda path: f"objective.{path}", lambda path: f"objective.{path}".rstrip("."))
        kept[key] = compose(graph, fixed, plain, inner), ""
    return kept[key][0]
