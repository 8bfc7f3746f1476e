r"""Bilinear operations along a segment: data times weights, plus a bias.

For :math:`z = \beta(x, w) + b` the coefficients are :math:`z_j = \sum_{a+b=j}\beta(x_a, w_b) + b_j`, exactly. What
lies beyond the order m, and the rests, are bounded with the norm :math:`J` of :math:`\beta(\cdot, w)` over the
segment and the constant C of :math:`\|\beta(x, w)\| \le C\|x\|\|w\|`, row by row of x:

.. math:: \text{tail}_z \le J\,\text{tail}_x + C\,\|x\|\,\text{tail}_w
    + C\sum_{a+b\ge m}\|x_a\|\|w_b\|\,\bar\eta^{a+b-m}.

A row of a product of k terms per entry has a round-off of at most :math:`k u\,\||x||w|\| \le k u\,C\|x\|\|w\|_F`.

J is that at the beginning plus :math:`C\|w - w_0\|`; the one at the beginning is the costly part, so it is asked
of :class:`Norms`, which an optimizer keeps from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, constant
from surefoot.graph.structure import Node, Ref, Spec
from surefoot.magnitude import Magnitude
from surefoot.operations.registry import Call, rules
from surefoot.taylor.model import UNIT, TaylorModel, rounded_up
from surefoot.torch_private import schema_of

# operation: slots of the data, the weights and what is added
SLOTS = {
    "aten.linear": ("input", "weight", "bias"),
    "surefoot.scale_shift": ("x", "weight", "bias"),
} | {f"aten.conv{kind}{dims}d": ("input", "weight", "bias") for kind in ("", "_transpose") for dims in (1, 2, 3)}


@dataclass
class Gain:
    """The norm of an operation in its data at some weights, and its constant C."""

    weights: Tensor
    norm: float
    constant: float
    reduction: int


class Norms:
    r"""Norms of operations in their data, kept from one segment to the next.

    :math:`\|\beta(\cdot, w)\| \le \|\beta(\cdot, w')\| + C\|w - w'\|`: a norm found at w' serves until the weights
    have moved so far that it is loose by more than ``slack``.
    """

    def __init__(self, slack: float = 0.05) -> None:
        self._slack = slack
        self._kept: dict[tuple[str, tuple[int, ...]], Gain] = {}

    def __call__(self, node: Node, weights: Tensor, data: Spec) -> tuple[float, Gain]:
        """A bound on the norm at these weights, and what it rests on."""
        key = node.name, data.shape[1:]  # the norm of a convolution depends on the size of its images
        gain = self._kept.get(key)
        if gain is not None and gain.weights.shape == weights.shape:
            moved = gain.constant * float(torch.linalg.vector_norm(weights - gain.weights)) * (1 + 2.0**-26)
            if moved <= self._slack * gain.norm:
                return (gain.norm + moved) * (1 + 2.0**-50), gain
        gain = measured(node, weights, data)
        self._kept[key] = gain
        return gain.norm, gain


def measured(node: Node, weights: Tensor, data: Spec) -> Gain:
    """The norm from the operation's rule, which is told nothing about the data."""
    slot_x, slot_w, _ = SLOTS[node.op]
    infinite = Magnitude.infinity()
    unknown = Enclosure(data, None, infinite, infinite, infinite, None, infinite, Magnitude.zero((1,)))
    known = {_name(node, slot_x): unknown, _name(node, slot_w): replace(constant(weights, 1), is_constant=False)}
    bare = replace(node, args=_without_bias(node), kwargs=_without_bias_by_name(node))
    bounds = rules()[node.op](Call(bare, known))
    pair = bounds.curvature[slot_x, slot_w]
    return Gain(weights.clone(), float(bounds.jacobian[slot_x]), float(pair), bounds.reduction)


def bilinear(node: Node, models: dict[str, TaylorModel], norms: Norms, order: int) -> TaylorModel:
    """The model of data times weights plus a bias."""
    slot_x, slot_w, slot_b = SLOTS[node.op]
    x, w, bias = models[slot_x], models[slot_w].merged(), models.get(slot_b)
    x = x if _keeps_rows(node, x) else x.merged()
    at_start, gain = norms(node, w.value, Spec(tuple(x.value.shape), x.value.dtype))
    norm = at_start + gain.constant * float(w.move)
    size = x.sizes * (gain.constant * float(w.sizes))
    coefficients = _coefficients(node, x, w, bias, order)
    excess = _excess(x, w, order, gain.constant)
    copies = 1.0
    if bias is not None:
        rows = x.value.shape[0] if x.rowwise else 1
        copies = math.sqrt(max(1.0, node.numel / rows / max(1, bias.value.numel())))
        size = size + copies * bias.merged().sizes
    error = size * ((gain.reduction + 8) * UNIT * (order + 1))
    own = torch.cat([excess.expand_as(error), error], dim=1)
    for model, factor in ((x, norm), (w, gain.constant * x.sizes), (bias and bias.merged(), copies)):
        tail = None if model is None else model.truncated(order).tail
        if tail is not None:
            own = own + factor * tail
    return TaylorModel(tuple(coefficients), x.length, rounded_up(own), x.rowwise)


def _keeps_rows(node: Node, x: TaylorModel) -> bool:
    """Whether row i of the result is made of row i of the data."""
    if node.op == "surefoot.scale_shift":
        return x.rowwise and node.arguments["dim"] > 0
    least = 2 if node.op == "aten.linear" else int(node.op[-2]) + 2
    return x.rowwise and x.value.dim() >= least


def _coefficients(
    node: Node, x: TaylorModel, w: TaylorModel, bias: TaylorModel | None, count: int
) -> list[Tensor | None]:
    slot_x, slot_w, slot_b = SLOTS[node.op]
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
                total = total + size * (constant_ * float(other.max()) * x.length ** (a + b - order))
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


def _name(node: Node, slot: str) -> str:
    reference = node.arguments[slot]
    assert isinstance(reference, Ref)
    return reference.name


def _without_bias(node: Node) -> tuple[Any, ...]:
    bias = node.arguments.get(SLOTS[node.op][2])
    return tuple(None if argument is bias and bias is not None else argument for argument in node.args)


def _without_bias_by_name(node: Node) -> dict[str, Any]:
    slot = SLOTS[node.op][2]
    return {key: None if key == slot else argument for key, argument in node.kwargs.items()}
