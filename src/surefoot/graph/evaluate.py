"""Evaluating operations in double precision, as the real functions they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.nodes import Node
from surefoot.graph.structure import Graph

Run = Callable[[Node, Mapping[str, Any]], Any]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def run_widened(node: Node, values: Mapping[str, Any], formula: Callable[..., Any] | None = None) -> Any:
    """The operation on these values in double precision, by its kernel or by a formula of the same signature."""
    wide = widened(node, formula)
    with double_by_default():
        value = wide.run(values)
    return in_double(value) if isinstance(value, Tensor) else tuple(map(in_double, value))


def widened(node: Node, formula: Callable[..., Any] | None = None) -> Node:
    """The operation for arguments in double precision, by its kernel or by a formula of the same signature.

    Casts to a narrower type are the identity in real arithmetic. What a model makes on the meta device from
    numbers alone is made where it has entries.
    """
    args = tuple(_widened(argument) for argument in node.args)
    kwargs = {key: _widened(argument, key) for key, argument in node.kwargs.items()}
    return replace(node, target=node.target if formula is None else formula, args=args, kwargs=kwargs)


def outputs_of(graph: Graph, values: Mapping[str, Any], run: Run = run_widened) -> tuple[Any, ...]:
    """The outputs of a graph from values of its leaves by name, in double precision, differentiable.

    Nodes that have a value already keep it; others are freed after their last reader.
    """
    present = dict(values)
    for node in graph.nodes:
        if node.name not in present:
            present[node.name] = run(node, present)
        for name in graph.finished[node.name]:
            del present[name]
    return tuple(present[name] for name in graph.outputs)


def fold(graph: Graph, values: Mapping[str, Any], run: Run = run_widened) -> dict[str, Any]:
    """The given values, and in double precision all that can be computed from them alone."""
    present = {name: in_double(value) for name, value in values.items()}
    for node in graph.nodes:
        if all(name in present for name in node.inputs):
            present[node.name] = run(node, present)
    return present


def in_double(value: Tensor) -> Tensor:
    """Real numbers in double precision; integers and truth values as they are."""
    return value.to(torch.float64) if value.is_floating_point() else value


@contextmanager
def double_by_default() -> Iterator[None]:
    """Whole numbers times 0.1 are of the default type: double precision here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _widened(argument: Any, key: str = "") -> Any:
    if isinstance(argument, torch.dtype) and argument in _NARROW:
        return torch.float64
    if key == "device" and argument is not None and torch.device(argument).type == "meta":
        return torch.device("cpu")
    return argument
