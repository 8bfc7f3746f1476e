"""An objective as the last operation of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph import Graph, Leaf, Source
from surefoot.graph.assemble import assemble
from surefoot.graph.compose import Naming, compose
from surefoot.graph.naming import fresh
from surefoot.graph.nodes import Node, Ref, Spec
from surefoot.objectives.base import Objective
from surefoot.objectives.constants import ObjectiveError, spec_of
from surefoot.operations.captured import capture


def attach(graph: Graph, objective: nn.Module) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of the objective of a model, and the values of its targets by leaf name.

    Args:
        graph: the model.
        objective: an :class:`Objective` bound to targets, or any module that maps the outputs to one number.

    Raises:
        ObjectiveError: if it does not fit the outputs.
    """
    if len(graph.outputs) != 1 or not isinstance(graph.spec(graph.outputs[0]), Spec):
        raise ObjectiveError(
            f"an objective reads one tensor, the model returns {len(graph.outputs)}: return only what is compared"
        )
    if not isinstance(objective, Objective):
        return _composed_with_module(graph, objective), {}
    outputs = graph.spec(graph.outputs[0])
    assert isinstance(outputs, Spec)
    if not objective.takes_targets:
        objective.check(outputs, None)
        return _composed(graph, objective, None)[0], {}
    targets = objective.chosen()
    objective.fit(outputs, targets)
    composed, name = _composed(graph, objective, spec_of(targets))
    return composed, {name: targets}


def _composed(graph: Graph, objective: Objective, targets: Spec | None) -> tuple[Graph, str]:
    """The loss as one more node; kept with the graph, so that an optimizer composes once."""
    kept: dict[Any, tuple[Graph, str]] = graph.__dict__.setdefault("_objectives", {})
    key = objective.operation, targets, tuple(objective.options.items())
    if key not in kept:
        taken = {*graph.leaves, *graph.by_name}
        leaves = dict(graph.leaves)
        read = [graph.outputs[0]]
        if targets is not None:
            leaf = Leaf(fresh("targets", taken), "targets", Source.TARGET, targets)
            leaves[leaf.name] = leaf
            read.append(leaf.name)
        output = graph.spec(graph.outputs[0])
        assert isinstance(output, Spec)
        node = Node(
            name=fresh("loss", taken),
            op=objective.operation,
            target=type(objective).function,
            args=tuple(map(Ref, read)),
            kwargs=objective.options,
            module="objective",
            spec=Spec((), output.dtype),
        )
        composed = assemble(leaves, [*graph.nodes, node], (node.name,), graph.held, graph.aliases)
        kept[key] = composed, read[-1]
    return kept[key]


def _composed_with_module(graph: Graph, objective: nn.Module) -> Graph:
    """Any module after the model; its own parameters and buffers do not vary."""
    spec = graph.spec(graph.outputs[0])
    assert isinstance(spec, Spec)
    device = next((value.device for value in graph.held.values()), torch.device("cpu"))
    second = capture(objective, torch.zeros(spec.shape, dtype=spec.dtype, device=device))
    if len(second.outputs) != 1 or second.numel(second.outputs[0]) != 1:
        raise ObjectiveError("an objective returns one number")
    parameters = dict(objective.named_parameters())
    leaves: Mapping[str, Leaf] = {
        name: replace(leaf, source=Source.CONSTANT) if leaf.source is Source.PARAMETER else leaf
        for name, leaf in second.leaves.items()
    }
    held = {**second.held, **{leaf.name: parameters[leaf.path].detach() for leaf in second.parameters}}
    second = assemble(leaves, second.nodes, second.outputs, held, second.aliases)
    plain = Naming(lambda path: path, lambda path: path)
    return compose(
        graph, second, plain, Naming(lambda p: f"objective.{p}", lambda p: f"objective.{p}".rstrip("."))
    )
