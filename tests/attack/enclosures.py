"""The attack on every intermediate tensor, far sharper than one on the whole network.

At points of the domain each tensor of the graph is computed and compared with what its enclosure says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.forward import Pass
from surefoot.graph import Graph, Node

# Claims are compared with values in double precision, whose error is relative to the numbers they come from.
RELATIVE = 1e-9
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def values_at(graph: Graph, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """All tensors of a graph in double precision, from the values of its leaves."""
    values: dict[str, Any] = dict(leaves)
    with torch.no_grad():
        for node in graph.nodes:
            values[node.name] = run_node(node, values)
    return values


def run_node(node: Node, values: Mapping[str, Any]) -> Any:
    args = tuple(_wide(a) for a in node.args)
    return replace(node, args=args, kwargs={k: _wide(a) for k, a in node.kwargs.items()}).run(values)


def _wide(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _NARROW else argument


def wrong_enclosures(result: Pass, center: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """What the values at a point contradict, tensor by tensor."""
    variables = result.region.variables
    moves = torch.tensor([float((values[name] - center[name]).norm()) for name in variables], dtype=torch.float64)
    for step in result.steps:
        name, enclosure = step.node.name, result.enclosures[step.node.name]
        value, middle = stacked(values[name]), stacked(center[name])
        if value is None or middle is None:
            continue
        size = float(middle.norm())
        move = float((value - middle).norm())
        reach = float((enclosure.lipschitz.tensor() * moves).nan_to_num(math.inf).sum())
        claims = [
            ("bound", float(value.norm()), enclosure.bound),
            ("peak", float(value.abs().max()), enclosure.peak),
            ("spread", move, enclosure.spread),
            ("lipschitz", move, reach),
        ]
        if enclosure.rows is not None and isinstance(values[name], Tensor):
            rows = (
                (values[name] - center[name]).flatten(1).norm(dim=1)
                if values[name].dim() > 1
                else (values[name] - center[name]).abs()
            )
            excess = rows - enclosure.rows.tensor()
            k = int(excess.argmax())
            claims.append((f"row {k}", float(rows[k]), float(enclosure.rows[k])))
        for what, attained, claimed in claims:
            if not attained <= float(claimed) * (1 + RELATIVE) + 1e-12 * size:
                yield f"{step.node.op} '{name}' {what}: {attained:.8g} > {float(claimed):.8g}"


def stacked(value: Any) -> Tensor | None:
    """One vector, also for operations with several results; ``None`` for ids and infinite values."""
    parts = [v for v in (value if isinstance(value, tuple | list) else (value,)) if v.is_floating_point()]
    if not parts:
        return None
    flat = torch.cat([part.reshape(-1) for part in parts])
    return flat if flat.numel() and bool(torch.isfinite(flat).all()) else None
