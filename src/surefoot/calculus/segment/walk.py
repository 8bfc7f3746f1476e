"""The pass over a graph: from the leaves along a segment to the objective along it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.segment.fallback import by_rule, constant_error
from surefoot.errors import UnsupportedOperation
from surefoot.graph.nodes import in_double
from surefoot.graph.structure import Graph, Node, Ref, Source, Spec
from surefoot.operations.call import Moving, Norms, Use
from surefoot.operations.evaluation import value_of
from surefoot.operations.record import Form, record_of
from surefoot.taylor import UNIT, TaylorModel, is_finite, rounded_up


def leaf_models(
    graph: Graph,
    values: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    length: float,
    order: int,
    stored: bool = False,
    aside: Mapping[str, float] | None = None,
) -> dict[str, TaylorModel]:
    r"""Leaves along the segment; values and the direction by leaf name.

    If weights are ``stored``, those at the end of a step :math:`\eta \ge \bar\eta/8` are rounded to
    :math:`u + \eta d + \delta`, :math:`\|\delta\| \le 2^{-53}(\|u\| + 2\eta\|d\|)(1 + 2^{-52})`, once for the
    product and once for the sum. So the step is one along :math:`d + \delta/\eta`, and the slope of the weights is
    off by at most :math:`2^{-53}(8\|u\|/\bar\eta + 2\|d\|)(1 + 2^{-52})`.

    ``aside`` is how far another direction may be from this one, in norm, by leaf name: what is said then holds
    along all of these, their slope being one that is off by so much.
    """
    models = {}
    for name, leaf in graph.leaves.items():
        value = in_double(values[name].detach())
        if name in direction:
            model = TaylorModel((value, in_double(direction[name].detach())), length)
            off = (aside or {}).get(name, 0.0)
            if stored and length:
                size, speed = (float(norm) for norm in model.norms if norm is not None)
                off += UNIT * (8 * size / length + 2 * speed)
            if off:
                error = rounded_up(value.new_tensor([[0.0, 0.0, off, 0.0]]))
                model = TaylorModel(model.padded(order).coefficients, length, error)
            models[name] = model
        else:
            rows = leaf.source is Source.INPUT and value.dim() > 0
            models[name] = TaylorModel((value,), length, rowwise=rows)
    return models


def expand(graph: Graph, leaves: Mapping[str, TaylorModel], order: int, norms: Norms) -> tuple[TaylorModel, ...]:
    """The outputs of a graph along a segment, to an order of at least 2; not numbers where something overflows."""
    models = dict(leaves)
    length = next(model.length for model in models.values())
    graph = _picked(graph)
    with torch.no_grad():
        for node in graph.nodes:
            models[node.name] = _apply(graph, node, models, order, length, norms)
            if not _is_finite(models[node.name]):
                return tuple(_unknown(graph.spec(name), length, order) for name in graph.outputs)
            for name in graph.finished[node.name]:
                del models[name]
    return tuple(models[name] for name in graph.outputs)


def _picked(graph: Graph) -> Graph:
    """The same with each part of a tensor that is cut (``chunk``, ``split``, …) as an operation of its own."""
    several = (node for node in graph.nodes if isinstance(node.spec, tuple))
    cut = {node.name: node for node in several if record_of(node).form_of(node) is Form.LAYOUT}
    if not cut:
        return graph
    nodes = [_part(graph, cut[node.args[0].name], node) if _picks(node, cut) else node for node in graph.nodes]
    return replace(graph, nodes=tuple(node for node in nodes if node.name not in cut))


def _picks(node: Node, cut: Mapping[str, Node]) -> bool:
    return node.op == "getitem" and isinstance(node.args[0], Ref) and node.args[0].name in cut


def _part(graph: Graph, whole: Node, getitem: Node) -> Node:
    """One of the parts: a slice, or one entry along the dimension."""
    index, dim, tensor = getitem.args[1], whole.arguments["dim"], whole.arguments["self"]
    common: dict[str, Any] = {"kwargs": {}, "module": whole.module}
    if len(whole.specs[0].shape) < len(graph.specs(tensor.name)[0].shape):  # the dimension is gone
        return getitem.by(torch.ops.aten.select.int, args=(tensor, dim, index), **common)
    ends = list(accumulate((spec.shape[dim] for spec in whole.specs), initial=0))
    return getitem.by(torch.ops.aten.slice.Tensor, args=(tensor, dim, ends[index], ends[index + 1]), **common)


def _apply(
    graph: Graph, node: Node, models: Mapping[str, TaylorModel], order: int, length: float, norms: Norms
) -> TaylorModel:
    arguments = {name: models[name] for name in node.inputs}
    if all(model.is_constant for model in arguments.values()):
        values = {name: model.value for name, model in arguments.items()}
        value = value_of(node, values)
        rows = any(model.rowwise for model in arguments.values()) and _has_rows(value, arguments)
        return _constant(graph, node, values, TaylorModel((value,), length, rowwise=rows), order)
    if node.op == "getitem":  # of a result and the places where it was found, of which nothing else is said
        if node.args[1] != 0:
            raise Use(node, graph.spec).refuse("only the first of several results is covered along a segment")
        return arguments[node.inputs[0]]
    known = min([order, *(model.order for model in arguments.values() if model.tail is not None)])
    slots = {slot: arguments[ref.name] for slot, ref in node.arguments.items() if isinstance(ref, Ref)}
    taylor = record_of(node).taylor
    model = None if taylor is None else taylor(Moving(node, slots, known, norms))
    return by_rule(graph, node, arguments, known) if model is None else model


def _constant(
    graph: Graph, node: Node, values: Mapping[str, Tensor], model: TaylorModel, order: int
) -> TaylorModel:
    """What is computed from constants, with its round-off; without, where no rule says what that is."""
    value = model.value
    exact = not isinstance(value, Tensor) or not value.is_floating_point() or record_of(node).bounds is None
    if exact or record_of(node).form_of(node) is Form.LAYOUT:
        return model
    try:
        error = constant_error(graph, node, values, value)
    except UnsupportedOperation:
        return model
    tail = value.new_tensor([[0.0, error, 0.0, 0.0]])
    return replace(model.padded(order), tail=tail) if error else model


def _is_finite(model: TaylorModel) -> bool:
    return model.is_constant or all(is_finite(c) for c in model.coefficients if c is not None)


def _unknown(spec: Spec | tuple[Spec, ...], length: float, order: int) -> TaylorModel:
    """A tensor of which nothing is known."""
    assert isinstance(spec, Spec)
    return TaylorModel((torch.full(spec.shape, torch.nan, dtype=torch.float64),) * order, length)


def _has_rows(value: object, arguments: Mapping[str, TaylorModel]) -> bool:
    """Whether a constant keeps the rows of the batch; nothing moves, so they are only a way to count."""
    rows = {tuple(model.value.shape[:1]) for model in arguments.values() if model.rowwise}
    return isinstance(value, Tensor) and value.dim() > 0 and rows == {tuple(value.shape[:1])}
