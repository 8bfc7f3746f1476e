r"""Bilinear operations along a segment: data times weights, plus a bias.

For :math:`z = \beta(x, w) + b` the coefficients are :math:`z_j = \sum_{a+b=j}\beta(x_a, w_b) + b_j`, exactly. What
lies beyond the order m, and the rests, are bounded with the norm :math:`J` of :math:`\beta(\cdot, w)` over the
segment and the constant C of :math:`\|\beta(x, w)\| \le C\|x\|\|w\|`, row by row of x:

.. math:: \text{rest}_z \le J\,\text{rest}_x + C\,\|x\|\,\text{rest}_w
    + C\sum_{a+b\ge m}\|x_a\|\|w_b\|\,\bar\eta^{a+b-m}.

Errors pass on likewise (:func:`surefoot.taylor.passed_on`): :math:`\beta(x, w) - \beta(\hat x, \hat w) =
\beta(x - \hat x, w) + \beta(\hat x, w - \hat w)`, and :math:`\beta(\cdot, w(\eta))` turns by C times the speed of
w and bends by C times how fast that changes, and so for x.

A row of a product of k terms per entry has a round-off of at most :math:`k u\,\||x||w|\| \le k u\,C\|x\|\|w\|_F`,
and a coefficient is a sum of at most m of them and the shift. With :math:`S_0`, :math:`S_1`, :math:`S_2` bounds of
:math:`\|x\|`, :math:`\sum_{a\ge1}\|x_a\|\bar\eta^{a-1}` and :math:`\sum_{a\ge2}\|x_a\|\bar\eta^{a-2}`, and with
:math:`T_0`, :math:`T_1`, :math:`T_2` those of w, the errors of :math:`z_0`, of :math:`z_1` and of all others,
divided by :math:`\eta^2`, are this for :math:`S_0T_0`, :math:`S_0T_1 + S_1T_0` and :math:`S_0T_2 + S_1T_1 +
S_2T_0` in the place of :math:`\|x\|\|w\|`.

J is that at the beginning plus :math:`C\|w - w_0\|`; the one at the beginning is the costly part, so it is asked
of :class:`Norms`, which an optimizer keeps from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, Spec, constant
from surefoot.graph.structure import Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Call, Gain, Moving, Slot
from surefoot.operations.common import rows_of
from surefoot.operations.record import record_of
from surefoot.taylor import UNIT, TaylorModel, passed_on, reach, rounded_up
from surefoot.torch_private import schema_of


def along_segment(moving: Moving, data: Slot, weights: Slot, shift: Slot) -> TaylorModel | None:
    """The model of data times weights plus a shift; ``None`` if one of the two factors is missing."""
    node, order = moving.node, moving.order
    if data not in moving.slots or weights not in moving.slots:
        return None
    x, w, bias = moving.slots[data], moving.slots[weights].merged(), moving.slots.get(shift)
    spec = Spec(tuple(x.value.shape), x.value.dtype)
    x = x if x.rowwise and data in rows_of(moving.use) else x.merged()
    slots = data, weights, shift
    at_start, gain = moving.norms.at(node, w.value, spec, lambda: measured(node, w.value, spec, slots))
    norm = at_start + gain.constant * float(w.move)
    coefficients = _coefficients(node, slots, x, w, bias, order)
    excess = _excess(x, w, order, gain.constant)
    inputs, factors = sizes_of(x), [gain.constant * float(size) for size in sizes_of(w)]
    size = torch.cat(product(inputs, factors), dim=1)
    copies = 1.0
    if bias is not None:
        rows = x.value.shape[0] if x.rowwise else 1
        copies = math.sqrt(max(1.0, node.numel / rows / max(1, bias.value.numel())))
        bias = bias.merged()
        size = size + torch.cat(sizes_of(bias), dim=1) * copies
    errors = size * ((gain.reduction + order + 8) * UNIT)
    own = torch.cat([excess.expand(len(errors), 1), errors], dim=1)
    weighted = [gain.constant * size for size in inputs]
    gains: list[Sequence[Tensor | float]] = [[norm, *factors[1:]], weighted, [copies, 0.0, 0.0]]
    for model, (factor, turn, bend) in zip((x, w, bias), gains, strict=True):
        tail = None if model is None else model.truncated(order).tail
        if tail is not None:
            own = own + passed_on(tail, factor, turn, bend)
    return TaylorModel(tuple(coefficients), x.length, rounded_up(own), x.rowwise)


def sizes_of(model: TaylorModel) -> list[Tensor]:
    """Bounds of a tensor, of its speed and of how fast it turns: columns."""
    return [model.sizes, model.speed, model.turn]


def product(first: Sequence[Tensor], second: Sequence[Any]) -> list[Tensor]:
    """Such bounds of a product: of a value, a slope and the rest, as of power series."""
    (a, b, c), (d, e, f) = first, second
    return [a * d, a * e + b * d, a * f + b * e + c * d]


def measured(node: Node, weights: Tensor, data: Spec, slots: tuple[Slot, Slot, Slot]) -> Gain:
    """The norm from the operation's bounds, which are told nothing about the data."""
    slot_x, slot_w, slot_b = slots
    infinite = Magnitude.infinity()
    unknown = Enclosure(data, None, infinite, infinite, infinite, None, infinite, Magnitude.zero((1,)))
    known = {node.arguments[slot_x].name: unknown}
    known[node.arguments[slot_w].name] = replace(constant(weights, 1), is_constant=False)
    rule = record_of(node).bounds
    assert rule is not None
    bounds = rule(Call(_without(node, slot_b), known))
    constant_ = float(bounds.curvature[slot_x, slot_w])
    return Gain(weights.clone(), float(bounds.jacobian[slot_x]), constant_, bounds.reduction)


def _coefficients(
    node: Node,
    slots: tuple[Slot, Slot, Slot],
    x: TaylorModel,
    w: TaylorModel,
    bias: TaylorModel | None,
    count: int,
) -> list[Tensor | None]:
    slot_x, slot_w, slot_b = slots
    result: list[Tensor | None] = []
    for j in range(count):
        total: Tensor | None = None
        added = None if bias is None or j >= bias.order else bias.coefficients[j]
        for a, c in enumerate(x.coefficients[: j + 1]):
            d = w.coefficients[j - a] if j - a < w.order else None
            if c is None or d is None:
                continue
            term = run(node, {slot_x: c, slot_w: d, slot_b: added})
            added = None  # only once
            total = term if total is None else total.add_(term)
        if added is not None:  # a bias that moves where the product does not
            zero = torch.zeros_like(w.value)
            total = run(node, {slot_x: x.value, slot_w: zero, slot_b: added})
        result.append(total)
    if result[0] is None:
        result[0] = run(node, {slot_x: x.value, slot_w: torch.zeros_like(w.value), slot_b: None})
    return result


def _excess(x: TaylorModel, w: TaylorModel, order: int, constant_: float) -> Tensor:
    """The products of coefficients that lie beyond the order, row by row."""
    total = torch.zeros((1, 1), dtype=torch.float64, device=x.value.device)
    for a, size in enumerate(x.norms):
        for b, other in enumerate(w.norms):
            if a + b >= order and size is not None and other is not None:
                total = total + size * (constant_ * float(other.max()) * reach(x.length, a + b - order))
    return total


def run(node: Node, values: dict[str, Any]) -> Tensor:
    """The operation with some of its arguments replaced, by slot."""
    arguments = {**node.arguments, **values}
    schema = schema_of(node.target)
    if schema is None:
        return node.target(**{key: arguments[key] for key in arguments})
    positional = [arguments[a.name] for a in schema.arguments if not a.kwarg_only]
    named = {a.name: arguments[a.name] for a in schema.arguments if a.kwarg_only}
    return node.target(*positional, **named)


def _without(node: Node, slot: Slot) -> Node:
    """The operation without one of its tensors."""
    absent = node.arguments.get(slot)
    if not isinstance(absent, Ref):
        return node
    args = tuple(None if argument is absent else argument for argument in node.args)
    return replace(node, args=args, kwargs={key: None if key == slot else a for key, a in node.kwargs.items()})
