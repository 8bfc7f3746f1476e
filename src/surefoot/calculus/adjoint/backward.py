r"""The costates :math:`\hat\lambda_z = \partial F/\partial z` at the centre, by one backward pass.

It is in double precision and does not depend on how large the domain is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import norm, remembered
from surefoot.operations.call import Call
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.record import record_of
from surefoot.scalar import Rounded

Value = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Backward:
    """A backward pass at the centre."""

    seed: Value  # the costate of the output, 1 if that is one number
    # for each operation, what it adds to the costates of its arguments, by name: the transposed Jacobian times its
    # own costate. ``None`` where automatic differentiation sees no derivative: of ``detach``, whose value is the
    # identity, or of an operation without a backward formula.
    pulled: Mapping[str, Mapping[str, Value | None]]
    # for operations whose record has a ``pullback``, proved bounds of the error of every entry of that, by name of
    # the argument, the costate and the arguments being exact
    errors: Mapping[str, Mapping[str, Tensor]]


def backward(result: Pass, seed: Tensor | None = None) -> Backward | None:
    """The backward pass after a forward pass with centre values; ``None`` if the output is not one number, a value
    or a costate is not known or not finite, or there is no operation, as in ``nn.Identity``, where the forward
    pass says all. With a seed, a costate of norm at most 1, for any one output.
    """
    numbers = result.enclosures[result.outputs[0]].numel
    if result.graph is None or not result.steps or len(result.outputs) != 1 or (seed is None and numbers != 1):
        return None
    if result.shared is None or seed is not None:
        return _backward(result, seed)
    if not result.shared.costates:
        result.shared.costates.append(_backward(result, None))
    return result.shared.costates[0]


def _backward(result: Pass, seed: Tensor | None) -> Backward | None:
    values = {name: e.value for name, e in result.enclosures.items()}
    needed = {name for step in result.steps for name in step.node.inputs} | set(result.outputs)
    if any(values[name] is None for name in needed):
        return None
    seed = torch.ones_like(values[result.outputs[0]]) if seed is None else seed
    costates: dict[str, Value] = {result.outputs[0]: seed}
    pulled: dict[str, dict[str, Value | None]] = {}
    errors: dict[str, dict[str, Tensor]] = {}
    for step in reversed(result.steps):
        if step.node.name not in costates:
            continue
        pulled[step.node.name], errors[step.node.name] = _pulled(step, result, values, costates[step.node.name])
        for name, value in pulled[step.node.name].items():
            if value is not None:
                value = value if result.shared is None else remembered(value)
                costates[name] = added(costates[name], value) if name in costates else value
            else:
                costates.setdefault(name, zeros(values[name]))
    return Backward(seed, pulled, errors) if all(norm(value).is_finite for value in costates.values()) else None


def _pulled(
    step: Step, result: Pass, values: Mapping[str, Any], costate: Value
) -> tuple[dict[str, Value | None], dict[str, Tensor]]:
    """What an operation adds to the costates of its arguments, by name, and errors where they are proved."""
    proved = proved_pull_back(step, result, costate)
    found: dict[str, Value | None] = {name: rounded.value for name, rounded in proved.items()}
    if set(proved) != set(step.names.values()):
        found = {**pull_back(step, values, costate), **found}
    return found, {name: rounded.error for name, rounded in proved.items()}


def proved_pull_back(step: Step, result: Pass, costate: Value) -> dict[str, Rounded]:
    """The same by name of the argument with proved errors, of arguments for which the operation has formulas."""
    pullback = record_of(step.node).pullback
    if pullback is None or not isinstance(costate, Tensor):
        return {}
    by_slot = pullback(Call(step.node, result.enclosures), costate)
    found: dict[str, Rounded] = {}
    for name in set(step.names.values()):
        slots = [slot for slot, held in step.names.items() if held == name]
        if all(slot in by_slot for slot in slots):
            total = sum((by_slot[slot] for slot in slots[1:]), by_slot[slots[0]])
            found[name] = total.expand(result.enclosures[name].shape)
    return found


def pull_back(step: Step, values: Mapping[str, Any], costate: Value) -> dict[str, Value | None]:
    """The transposed Jacobians of an operation at these values times its costate, by name of the argument."""
    inputs = {name: values[name] for name in step.node.inputs}
    names = list(dict.fromkeys(step.names.values()))
    leaves: dict[str, list[Tensor]] = {}
    for name in names:
        leaves[name] = [part.detach().clone().requires_grad_() for part in parts(inputs[name]) if _real(part)]
        fresh = iter(leaves[name])
        whole = tuple(next(fresh) if _real(part) else part for part in parts(inputs[name]))
        inputs[name] = whole[0] if isinstance(inputs[name], Tensor) else whole
    flat = [part for name in names for part in leaves[name]]
    try:
        with torch.enable_grad():
            results = parts(run_in_double(step.node, inputs))
            pairs = [(z, c) for z, c in zip(results, parts(costate), strict=True) if z.requires_grad]
            if not pairs:
                return dict.fromkeys(names)
            outputs, slopes = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, flat, slopes, allow_unused=True))
    except (RuntimeError, NotImplementedError):  # no backward formula: the caller falls back on norms
        return dict.fromkeys(names)
    pulled: dict[str, Value | None] = {}
    for name in names:
        slopes_of = [(part, next(found)) for part in leaves[name]]
        if all(slope is None for _, slope in slopes_of):
            pulled[name] = None
            continue
        filled = iter([torch.zeros_like(part) if slope is None else slope for part, slope in slopes_of])
        whole = tuple(next(filled) if _real(part) else zeros(part) for part in parts(values[name]))
        pulled[name] = whole[0] if isinstance(values[name], Tensor) else whole
    return pulled


def parts(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a value: one, or several results of one operation."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def zeros(value: Any) -> Any:
    """Zeros of the shape of a value, in double precision."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value, dtype=torch.float64)
    return tuple(zeros(part) for part in value)


def added(first: Value, second: Value) -> Value:
    """The sum of two values of one shape."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first + second
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _real(value: Tensor) -> bool:
    return value.is_floating_point()
