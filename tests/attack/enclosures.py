r"""The attack on every intermediate tensor and on every rule, far sharper than one on the whole network.

*Tensors*: at points of the domain each tensor of the graph is computed and compared with what its enclosure says.

*Rules*: a rule sees nothing of its arguments but their enclosures, so its Jacobian and curvature bounds must hold
for all arguments within those. Such arguments are drawn, each within its spread of the centre, and the operation's
derivative is found there by power iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.enclosure import Enclosure
from surefoot.calculus.forward import Pass, Step
from surefoot.graph import Graph, Node

# Claims are compared with values in double precision, whose error is relative to the numbers they come from.
RELATIVE = 1e-9
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def values_at(graph: Graph, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """All tensors of a graph in double precision, from the values of its leaves."""
    values: dict[str, Any] = dict(leaves)
    with torch.no_grad():
        for node in graph.nodes:
            values[node.name] = _run(node, values)
    return values


def _run(node: Node, values: Mapping[str, Any]) -> Any:
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
        value, middle = _stacked(values[name]), _stacked(center[name])
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


def _stacked(value: Any) -> Tensor | None:
    """One vector, also for operations with several results; ``None`` for ids and infinite values."""
    parts = [v for v in (value if isinstance(value, tuple | list) else (value,)) if v.is_floating_point()]
    if not parts:
        return None
    flat = torch.cat([part.reshape(-1) for part in parts])
    return flat if flat.numel() and bool(torch.isfinite(flat).all()) else None


def wrong_rules(
    result: Pass, center: Mapping[str, Any], generator: torch.Generator, rounds: int = 1
) -> Iterator[str]:
    """What arguments within their enclosures contradict, rule by rule."""
    for step in result.steps:
        arguments = {slot: result.enclosures[name] for slot, name in step.names.items()}
        if not all(isinstance(center[name], Tensor) for name in step.names.values()):
            continue
        if any(not bool(torch.isfinite(center[name]).all()) for name in step.names.values()):
            continue
        for _ in range(rounds):
            first, second = (
                {slot: _draw(center[name], arguments[slot], generator) for slot, name in step.names.items()}
                for _ in range(2)
            )
            yield from _wrong_rule(step, center, first, second, generator)


def _draw(center: Tensor, enclosure: Enclosure, generator: torch.Generator) -> Tensor:
    """A tensor within an enclosure: on the sphere around the centre, then drawn in until all claims hold."""
    direction = torch.randn(center.shape, dtype=torch.float64, generator=generator)
    if float(torch.rand((), generator=generator)) < 0.3:
        direction = direction * (torch.rand(center.shape, generator=generator) < 0.3)
    radius = min(float(enclosure.spread), 10.0 * (1.0 + float(center.norm())))
    move = direction * (radius / float(direction.norm()) if bool(direction.any()) else 0.0)
    if enclosure.rows is not None and move.dim():
        allowed = enclosure.rows.tensor().reshape(-1, *[1] * (move.dim() - 1))
        rows = move.flatten(1).norm(dim=1) if move.dim() > 1 else move.abs()
        move = move * (allowed / rows.reshape(allowed.shape).clamp_min(1e-300)).clamp(max=1.0)
    for _ in range(60):
        moved = center + move
        if float(moved.norm()) <= float(enclosure.bound) and float(moved.abs().max()) <= float(enclosure.peak):
            return moved
        move = move * 0.7
    return center


def _wrong_rule(
    step: Step,
    center: Mapping[str, Any],
    first: dict[str, Tensor],
    second: dict[str, Tensor],
    generator: torch.Generator,
) -> Iterator[str]:
    bounds, where = step.bounds, f"{step.node.op} '{step.node.name}'"
    at_first = _evaluate(step, center, first)
    if at_first is None:
        return
    size = float(at_first.norm())
    for what, attained, claimed in [
        ("bound", size, bounds.bound),
        ("peak", float(at_first.abs().max()), bounds.peak),
    ]:
        if claimed is not None and not attained <= float(claimed) * (1 + RELATIVE):
            yield f"{where} rule's {what}: {attained:.8g} > {float(claimed):.8g}"
    middle = _stacked(center[step.node.name])
    if bounds.spread is not None and middle is not None:
        move = float((at_first - middle).norm())
        if not move <= float(bounds.spread) * (1 + RELATIVE) + 1e-12 * size:
            yield f"{where} rule's spread: {move:.8g} > {float(bounds.spread):.8g}"
    w = torch.randn(at_first.shape, dtype=torch.float64, generator=generator)
    for slot, claimed in bounds.jacobian.items():
        if slot not in step.names or not claimed.is_finite:
            continue
        found, w_top = _slope(step, center, first, slot, w / w.norm())
        other = _evaluate(step, center, {**first, slot: second[slot]})
        distance = float((first[slot] - second[slot]).norm())
        if other is not None and distance > 0:
            found = max(found, (float((other - at_first).norm()) - 1e-12 * size) / distance)
        if not found <= float(claimed) * (1 + RELATIVE):
            yield f"{where} rule's jacobian[{slot}]: {found:.8g} > {float(claimed):.8g}"
        yield from _wrong_curvature(step, center, first, second, slot, w_top)


def _wrong_curvature(
    step: Step,
    center: Mapping[str, Any],
    first: dict[str, Tensor],
    second: dict[str, Tensor],
    slot: str,
    w: Tensor,
) -> Iterator[str]:
    """Differences of the derivative in one slot when another one moves, and back at half the distance."""
    for other in step.names:
        claimed = step.bounds.curvature.get((slot, other), step.bounds.curvature.get((other, slot)))
        limit = 0.0 if claimed is None else float(claimed)
        near = first[other] + 0.01 * (second[other] - first[other])
        for moved in (second[other], near):
            changed = {**first, other: moved}
            distance = float((moved - first[other]).norm())
            a, b = _gradient(step, center, first, slot, w), _gradient(step, center, changed, slot, w)
            if distance == 0 or a is None or b is None:
                continue
            attained = max(0.0, float((a - b).norm()) - 1e-11 * float(a.norm() + b.norm())) / distance
            if not attained <= limit * (1 + RELATIVE):
                yield (
                    f"{step.node.op} '{step.node.name}' rule's curvature[{slot}, {other}]: "
                    f"{attained:.8g} > {limit:.8g}"
                )


def _evaluate(step: Step, center: Mapping[str, Any], arguments: Mapping[str, Tensor]) -> Tensor | None:
    with torch.no_grad():
        return _stacked(_result(step, center, arguments))


def _result(step: Step, center: Mapping[str, Any], arguments: Mapping[str, Tensor]) -> Any:
    """The operation at arguments given by slot; a tensor that sits in two slots may differ between them."""
    node = step.node
    names = {slot: f"{slot}@{name}" for slot, name in step.names.items()}
    keys = list(node.arguments)
    args = tuple(_at_slot(a, keys[k], names) for k, a in enumerate(node.args))
    kwargs = {key: _at_slot(a, key, names) for key, a in node.kwargs.items()}
    moved = replace(node, args=args, kwargs=kwargs)
    return _run(moved, {**center, **{names[slot]: value for slot, value in arguments.items()}})


def _at_slot(argument: Any, key: str, names: Mapping[str, str]) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(
            replace(item, name=names[f"{key}.{k}"]) if f"{key}.{k}" in names else item
            for k, item in enumerate(argument)
        )
    return replace(argument, name=names[key]) if key in names else argument


def _gradient(
    step: Step, center: Mapping[str, Any], arguments: dict[str, Tensor], slot: str, w: Tensor
) -> Tensor | None:
    leaf = arguments[slot].detach().clone().requires_grad_()
    output = _stacked(_result(step, center, {**arguments, slot: leaf}))
    if output is None or not output.requires_grad:
        return None
    (found,) = torch.autograd.grad(output, leaf, w, allow_unused=True)
    return None if found is None else found.detach()


def _slope(
    step: Step, center: Mapping[str, Any], arguments: dict[str, Tensor], slot: str, w: Tensor
) -> tuple[float, Tensor]:
    """The norm of the derivative in one slot after a few power iterations, and the direction it is seen from."""
    best = 0.0
    for _ in range(3):
        pulled = _gradient(step, center, arguments, slot, w)
        if pulled is None or not bool(pulled.any()):
            return best, w
        best = max(best, float(pulled.norm()))
        h = 1e-5 * pulled / pulled.norm()
        ends = [_evaluate(step, center, {**arguments, slot: arguments[slot] + sign * h}) for sign in (1, -1)]
        if ends[0] is None or ends[1] is None or not bool((ends[0] - ends[1]).any()):
            return best, w
        w = (ends[0] - ends[1]) / (ends[0] - ends[1]).norm()
    return best, w
