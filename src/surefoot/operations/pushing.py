r"""Derivatives of one operation along moves of its arguments, with a proved bound on their error.

What is wanted is :math:`\sum_iJ_i\tau_i`, the Jacobians at the arguments as they are, times tangents. By kind:

* Operations that move or select numbers, sums and products add up at most r products of a tangent with a number of
  another argument or a fixed factor for each of at most s arguments: whatever the order, an entry is off by
  :math:`\gamma_{rs+16}(|J||\tau|)`, and :math:`\||J||\tau|\| \le \sqrt r\|J\|\|\tau\|`
  (:mod:`surefoot.calculus.adjoint.costates`); a product that underflows loses :math:`2^{-1022}`.
* Where the Jacobian is a symmetric matrix, what pulls costates back pushes tangents forward, with the same error.
* Others state a formula of their own (``push`` of the record).

Of an operation that is none of these, one that somebody else registered, nothing is proved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Bounds, Call, Slot
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.record import Form, record_of
from surefoot.program.checks import differentiable_attention

_UNIT = 2.0**-53
_PLAIN = (Form.LAYOUT, Form.LINEAR, Form.PRODUCT)


@dataclass(frozen=True)
class Pushed:
    """A derivative along a move as computed, and a bound on the norm of its error."""

    value: Tensor
    error: Magnitude


def pushed(call: Call, bounds: Bounds, tangents: Mapping[Slot, Tensor]) -> Pushed | None:
    """The derivative of an operation along tangents of its arguments, by slot; ``None`` if nothing is proved."""
    record, node = record_of(call.node), call.node
    found = None
    if record.push is not None:
        found = record.push(call, tangents)
    elif record.symmetric and record.pullback is not None and len(tangents) == 1:
        ((slot, tangent),) = tangents.items()
        found = record.pullback(call, tangent).get(slot)
    if found is not None:
        found = found.expand(call.shape)
        return Pushed(found.value, norm(found.error))
    plain = record.form_of(node) in _PLAIN or (record.bounds is not None and not record.rounds_at(node))
    return Pushed(differentiated(call, tangents), _of_products(call, bounds, tangents)) if plain else None


def _of_products(call: Call, bounds: Bounds, tangents: Mapping[Slot, Tensor]) -> Magnitude:
    """The round-off where products of tangents with numbers are added up."""
    size = Magnitude.zero()
    for slot, tangent in tangents.items():
        size = size + bounds.jacobian[slot] * norm(tangent)
    terms = float(bounds.reduction) * len(tangents)
    factor = (terms + 16.0) * (float(bounds.reduction) ** 0.5 + 1.0) * (2 * _UNIT)
    return size * factor + terms * max(1, call.numel) ** 0.5 * 2.0**-1022


def differentiated(call: Call, tangents: Mapping[Slot, Tensor]) -> Tensor:
    """The same as automatic differentiation computes it."""
    values = {name: e.value for name, e in zip(call.names.values(), call.tensors.values(), strict=True)}
    by_name: dict[str, Tensor] = {}
    for slot, tangent in tangents.items():
        name = call.names[slot]
        assert name not in by_name or by_name[name] is tangent
        by_name[name] = tangent

    def function(*moving: Tensor) -> Tensor:
        result = run_in_double(call.node, {**values, **dict(zip(by_name, moving, strict=True))})
        first: Tensor = result if isinstance(result, Tensor) else result[0]  # others are places
        return first

    return _push_forward(function, tuple(values[name] for name in by_name), tuple(by_name.values()))


def _push_forward(function: Callable[..., Any], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    """The directional derivative, by forward differentiation or, where an operation has none, twice backward."""
    with differentiable_attention(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its first forward derivative
        try:
            return torch.func.jvp(function, point, tangents)[1]
        except (RuntimeError, NotImplementedError):
            return torch.autograd.functional.jvp(function, point, tangents)[1]
