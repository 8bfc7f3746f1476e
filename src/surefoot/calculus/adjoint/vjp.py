"""One operation at the centre, differentiated backwards in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.forward import Step
from surefoot.graph.evaluate import run_in_double

Value = Tensor | tuple[Tensor, ...]


def pull_back(step: Step, values: Mapping[str, Any], costate: Value) -> dict[str, Value | None]:
    """The transposed Jacobians at the centre times the costate, by name of the argument.

    ``None`` where automatic differentiation sees no derivative: of ``detach``, whose value is the identity, or of
    an operation without a backward formula.

    Args:
        step: the operation.
        values: of everything it reads, at the centre.
        costate: of its result.
    """
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
