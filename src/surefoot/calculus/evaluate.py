"""One operation evaluated at the centre, in double precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Node


def value_of(node: Node, inputs: Mapping[str, Any]) -> Any:
    """The operation at the given values, in double precision; ``None`` if one of them is not known."""
    if any(value is None for value in inputs.values()):
        return None
    with torch.no_grad():
        return run_in_double(node, inputs)


def run_in_double(node: Node, inputs: Mapping[str, Any]) -> Any:
    """The operation on these values, in double precision."""
    args = [_in_double(a) for a in node.args]
    kwargs = {key: _in_double(a, key) for key, a in node.kwargs.items()}
    with _double_by_default():
        value = replace(node, args=tuple(args), kwargs=kwargs).run(inputs)
    if isinstance(value, Tensor):
        return value.to(torch.float64) if value.is_floating_point() else value
    return tuple(v.to(torch.float64) if v.is_floating_point() else v for v in value)


@contextmanager
def _double_by_default() -> Iterator[None]:
    """Whole numbers times 0.1 are of the default type: double precision here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def _in_double(argument: Any, key: str = "") -> Any:
    """Casts to a narrower type are the identity in real arithmetic; constants are computed where they can be."""
    if isinstance(argument, torch.dtype) and argument in _NARROW:
        return torch.float64
    if key == "device" and argument is not None and torch.device(argument).type == "meta":
        return torch.device("cpu")
    return argument
