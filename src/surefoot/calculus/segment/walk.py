"""The pass over a graph: from the leaves along a segment to the objective along it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.calculus.segment.fallback import by_rule
from surefoot.graph.nodes import in_double
from surefoot.graph.structure import Graph, Node, Ref, Source, Spec
from surefoot.operations.evaluation import value_of
from surefoot.operations.moving import Moving, Norms
from surefoot.operations.record import record_of
from surefoot.taylor import TaylorModel


def leaf_models(
    graph: Graph, values: Mapping[str, Tensor], direction: Mapping[str, Tensor], length: float
) -> dict[str, TaylorModel]:
    """Leaves along the segment; values and the direction by leaf name."""
    models = {}
    for name, leaf in graph.leaves.items():
        value = in_double(values[name].detach())
        if name in direction:
            models[name] = TaylorModel((value, in_double(direction[name].detach())), length)
        else:
            rows = leaf.source is Source.INPUT and value.dim() > 0
            models[name] = TaylorModel((value,), length, rowwise=rows)
    return models


def expand(graph: Graph, leaves: Mapping[str, TaylorModel], order: int, norms: Norms) -> tuple[TaylorModel, ...]:
    """The outputs of a graph along a segment, to an order of at least 2; not numbers where something overflows.

    Raises:
        UnsupportedOperation: if an operation that moves has no rule.
    """
    models = dict(leaves)
    length = next(model.length for model in models.values())
    with torch.no_grad():
        for node in graph.nodes:
            models[node.name] = _apply(graph, node, models, order, length, norms)
            if not _is_finite(models[node.name]):
                return tuple(_unknown(graph.spec(name), length, order) for name in graph.outputs)
            for name in graph.finished[node.name]:
                del models[name]
    return tuple(models[name] for name in graph.outputs)


def _apply(
    graph: Graph, node: Node, models: Mapping[str, TaylorModel], order: int, length: float, norms: Norms
) -> TaylorModel:
    arguments = {name: models[name] for name in node.inputs}
    if all(model.is_constant for model in arguments.values()):
        value = value_of(node, {name: model.value for name, model in arguments.items()})
        rows = any(model.rowwise for model in arguments.values()) and _has_rows(value, arguments)
        return TaylorModel((value,), length, rowwise=rows)
    known = min([order, *(model.order for model in arguments.values() if model.tail is not None)])
    slots = {slot: arguments[ref.name] for slot, ref in node.arguments.items() if isinstance(ref, Ref)}
    taylor = record_of(node).taylor
    model = None if taylor is None else taylor(Moving(node, slots, known, norms))
    return by_rule(graph, node, arguments, known) if model is None else model


def _is_finite(model: TaylorModel) -> bool:
    return model.is_constant or all(bool(torch.isfinite(c).all()) for c in model.coefficients if c is not None)


def _unknown(spec: Spec | tuple[Spec, ...], length: float, order: int) -> TaylorModel:
    """A tensor of which nothing is known."""
    assert isinstance(spec, Spec)
    return TaylorModel((torch.full(spec.shape, torch.nan, dtype=torch.float64),) * order, length)


def _has_rows(value: object, arguments: Mapping[str, TaylorModel]) -> bool:
    """Whether a constant keeps the rows of the batch; nothing moves, so they are only a way to count."""
    rows = {tuple(model.value.shape[:1]) for model in arguments.values() if model.rowwise}
    return isinstance(value, Tensor) and value.dim() > 0 and rows == {tuple(value.shape[:1])}
