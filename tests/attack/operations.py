"""The attack on every rule, by itself.

A rule sees nothing of its arguments but their enclosures, so its Jacobian and curvature bounds must hold for all
arguments within those. Such arguments are drawn, each within its spread of the centre, and the derivatives of the
operation are found there by power iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attack.enclosures import RELATIVE, run_node, stacked
from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import Enclosure


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
    middle = stacked(center[step.node.name])
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
    """Differences of the derivative in one slot when another one moves, and the second derivative itself."""
    for other in step.names:
        claimed = step.bounds.curvature.get((slot, other), step.bounds.curvature.get((other, slot)))
        limit = 0.0 if claimed is None else float(claimed)
        if limit == math.inf:
            continue
        attained = _largest_change(step, center, first, slot, (other, second[other]), w)
        if limit > 0 and slot <= other:
            attained = max(attained, _bend(step, center, first, (slot, other), w))
        if not attained <= limit * (1 + RELATIVE):
            where = f"{step.node.op} '{step.node.name}' rule's curvature[{slot}, {other}]"
            yield f"{where}: {attained:.8g} > {limit:.8g}"


def _largest_change(
    step: Step, center: Mapping[str, Any], first: dict[str, Tensor], slot: str, move: tuple[str, Tensor], w: Tensor
) -> float:
    """How fast the derivative in one slot changes when another moves all the way, or a little."""
    other, end = move
    best, before = 0.0, _gradient(step, center, first, slot, w)
    for moved in (end, first[other] + 0.01 * (end - first[other])):
        distance = float((moved - first[other]).norm())
        after = _gradient(step, center, {**first, other: moved}, slot, w)
        if distance > 0 and before is not None and after is not None:
            error = 1e-11 * float(before.norm() + after.norm())
            best = max(best, (float((before - after).norm()) - error) / distance)
    return best


def _bend(
    step: Step, center: Mapping[str, Any], point: dict[str, Tensor], pair: tuple[str, str], w: Tensor
) -> float:
    """The norm of a second derivative, maximised over one direction at a time."""
    i, j = pair
    leaves = {slot: value.detach().clone().requires_grad_() for slot, value in point.items()}
    output = stacked(_result(step, center, leaves))
    best, v = 0.0, {i: torch.ones_like(leaves[i]) / math.sqrt(leaves[i].numel())}
    if output is None or not output.requires_grad:
        return best
    for _ in range(3):
        for a, b in ((i, j), (j, i)):
            bent = _second(output, leaves[a], leaves[b], w, v[a])
            if bent is None or not bool(bent.norm() > 0):  # entries of 1e-200 have squares that vanish
                return best
            best = max(best, float(bent.norm()))
            v[b] = bent / bent.norm()
        turned = _mixed_difference(step, center, point, pair, v)
        if turned is None or not bool(turned.norm() > 0):
            return best
        w = turned / turned.norm()
    return best


def _second(output: Tensor, a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Tensor | None:
    """The derivative in b of ⟨v, derivative in a of ⟨w, output⟩⟩."""
    (slope,) = torch.autograd.grad(output, a, w, create_graph=True, allow_unused=True)
    if slope is None or not slope.requires_grad:
        return None
    try:
        (found,) = torch.autograd.grad(slope, b, v, retain_graph=True, allow_unused=True)
    except RuntimeError as error:  # some backward kernels have no derivative of their own
        if "is not implemented" not in str(error):
            raise
        return None
    return None if found is None else found.detach()


def _mixed_difference(
    step: Step, center: Mapping[str, Any], point: dict[str, Tensor], pair: tuple[str, str], v: dict[str, Tensor]
) -> Tensor | None:
    """A multiple of the second derivative in two directions, by differences."""
    i, j = pair
    total: Tensor | float = 0.0
    for s, t in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        moved = dict(point)
        moved[i] = moved[i] + 1e-3 * s * v[i]
        moved[j] = moved[j] + 1e-3 * t * v[j]
        value = _evaluate(step, center, moved)
        if value is None:
            return None
        total = total + s * t * value
    assert isinstance(total, Tensor)
    return total


def _evaluate(step: Step, center: Mapping[str, Any], arguments: Mapping[str, Tensor]) -> Tensor | None:
    with torch.no_grad():
        return stacked(_result(step, center, arguments))


def _result(step: Step, center: Mapping[str, Any], arguments: Mapping[str, Tensor]) -> Any:
    """The operation at arguments given by slot; a tensor that sits in two slots may differ between them."""
    node = step.node
    names = {slot: f"{slot}@{name}" for slot, name in step.names.items()}
    keys = list(node.arguments)
    args = tuple(_at_slot(a, keys[k], names) for k, a in enumerate(node.args))
    kwargs = {key: _at_slot(a, key, names) for key, a in node.kwargs.items()}
    moved = replace(node, args=args, kwargs=kwargs)
    return run_node(moved, {**center, **{names[slot]: value for slot, value in arguments.items()}})


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
    output = stacked(_result(step, center, {**arguments, slot: leaf}))
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
