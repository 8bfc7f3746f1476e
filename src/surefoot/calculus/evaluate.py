"""Operations at given values, in double precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def values_at(graph: Graph, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Every tensor of a graph, from the values of its leaves; differentiable."""
    values: dict[str, Any] = {name: widened(value) for name, value in leaves.items()}
    for node in graph.nodes:
        values[node.name] = run_in_double(node, values)
    return values


def value_of(node: Node, inputs: Mapping[str, Any]) -> Any:
    """The operation at the given values; ``None`` if one of them is not known."""
    if any(value is None for value in inputs.values()):
        return None
    with torch.no_grad():
        return run_in_double(node, inputs)


def run_in_double(node: Node, inputs: Mapping[str, Any]) -> Any:
    """The operation on these values; changes to a narrower type are the identity in real arithmetic."""
    args = tuple(_in_double(a) for a in node.args)
    kwargs = {key: _in_double(a, key) for key, a in node.kwargs.items()}
    with _double_by_default():
        value = replace(node, args=args, kwargs=kwargs).run(inputs)
    return widened(value) if isinstance(value, Tensor) else tuple(map(widened, value))


def widened(value: Tensor) -> Tensor:
    """Real numbers in double precision; whole numbers as they are."""
    return value.to(torch.float64) if value.is_floating_point() else value


@contextmanager
def _double_by_default() -> Iterator[None]:
    """Whole numbers times 0.1 are of the default type: double precision here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_double(argument: Any, key: str = "") -> Any:
    """Constants are computed where they can be: not on the meta device."""
    if isinstance(argument, torch.dtype) and argument in _NARROW:
        return torch.float64
    if key == "device" and argument is not None and torch.device(argument).type == "meta":
        return torch.device("cpu")
    return argument


def ordinary_device() -> AbstractContextManager[object]:
    """Where a model was built ``with torch.device("meta")``, bounds are computed on the CPU all the same."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
