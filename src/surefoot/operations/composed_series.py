r"""Products, quotients, soft-max and normalisations along a segment, to any order.

They are composed of linear maps, products and scalar functions (:mod:`surefoot.operations.scalar_taylor`), each
with a model of its own; the words are those of :mod:`surefoot.taylor`.

*A linear map* of norm N acts on the coefficients, and multiplies rest and errors by N. Sums of k numbers round by
:math:`(k + 4)u` times the sum of their absolute values, at most :math:`\sqrt k` times their length.

*A product* :math:`z = \beta(a, b)`, entry by entry with broadcasting or of batches of matrices, has
:math:`\|\beta(a, b)\| \le \|a\|\|b\|`, as no two numbers meet twice. Its coefficients are :math:`z_j =
\sum_{i+l=j}\beta(a_i, b_l)`; what lies beyond the order m is :math:`\sum_{i+l\ge m}\|\beta(a_i,
b_l)\|\bar\eta^{i+l-m}`, and rests and errors of a are multiplied by the norm of :math:`\beta(\cdot, b)` over the
segment: at most :math:`\|b\|`, and entry by entry also the largest entry of b times the root of the number of
entries that one of a meets. That map turns by no more than the speed of b, and bends by how fast that changes. A
coefficient is a sum of at most m products, so with :math:`S_0, S_1, S_2` and :math:`T_0, T_1, T_2` the bounds of
:func:`surefoot.operations.bilinear.sizes_of` the round-off is that of a sum of k + m products.

* Quotient: :math:`a\cdot b^{-1}`.
* Soft-max: :math:`e_i/\sum_je_j`, :math:`e = \exp(x - c)`, with c the largest entry at the beginning, a constant.
  Its logarithm is :math:`x - c - \log\sum_je_j`, and that of the sum of exponentials :math:`c + \log\sum_je_j`.
* Normalisation of a group of k numbers: :math:`v = x - \bar x`, then :math:`v\cdot(\frac1k\sum v_i^2 +
  \epsilon)^{-1/2}`. To subtract the mean is a projection.

To second order the rule of the operation itself is sharper, and these are not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Node
from surefoot.operations.bilinear import product, sizes_of
from surefoot.operations.call import Moving
from surefoot.operations.common import rows_of
from surefoot.operations.record import record_of
from surefoot.operations.scalar_taylor import composed
from surefoot.scalar import ScalarFunction
from surefoot.taylor import UNIT, TaylorModel, is_finite, passed_on, reach, rounded_up, row_norms

_X = ScalarFunction.variable()
_EXP, _LOG = (ScalarFunction.apply(name, _X) for name in ("exp", "log"))
_INVERSE, _INVERSE_ROOT = 1.0 / _X, _X**-0.5
Taylor = Callable[[Moving], TaylorModel | None]


def beyond_second(rule: Taylor) -> Taylor:
    """A rule that is asked for more than two coefficients, and not heard where it ends in no numbers."""

    def taylor(moving: Moving) -> TaylorModel | None:
        if moving.order <= 2:
            return None
        try:
            found = rule(moving)
        except OverflowError:
            return None
        finite = found is not None and all(is_finite(c) for c in found.coefficients if c is not None)
        known = found is not None and (found.tail is None or is_finite(found.tail))
        return found if finite and known else None

    return taylor


def function_of(function: ScalarFunction, x: TaylorModel) -> TaylorModel:
    """A scalar function of every entry."""
    finite = all(is_finite(c) for c in x.coefficients if c is not None)
    if not finite or not (x.tail is None or is_finite(x.reach_of_tail)) or not is_finite(x.move):
        raise OverflowError
    return composed(function, x)


def argument(moving: Moving, slot: str) -> TaylorModel:
    """A tensor of an operation, to the order wanted; its rows count if they are those of the result."""
    model = moving.slots[slot].padded(moving.order).truncated(moving.order)
    return model if model.rowwise and slot in rows_of(moving.use) else model.merged()


def _joined(own: Tensor, *tails: Tensor | None) -> Tensor:
    """The errors of an operation itself, three columns, and the tails that reach it; no rest is added."""
    total = torch.cat([torch.zeros_like(own[:, :1]), own], dim=1)
    for tail in tails:
        total = total if tail is None else total + tail
    return rounded_up(total)


def mapped(x: TaylorModel, run: Callable[[Tensor], Tensor], norm: float = 1.0, error: float = 0.0) -> TaylorModel:
    """A linear map that keeps the rows, of that norm, whose computation is off by ``error`` times its argument."""
    coefficients = tuple(None if c is None else run(c) for c in x.coefficients)
    own = torch.cat(sizes_of(x), dim=1) * error
    tail = _joined(own, None if x.tail is None else x.tail * norm)
    return TaylorModel(coefficients, x.length, tail, x.rowwise)


def shifted_by(x: TaylorModel, constant: Tensor | float) -> TaylorModel:
    """The sum with a constant that is exact; it rounds the first coefficient once."""
    first = x.value + constant
    error = UNIT * row_norms(first, x.rowwise)
    own = torch.cat([error, error.new_zeros((len(error), 2))], dim=1)
    return TaylorModel((first, *x.coefficients[1:]), x.length, _joined(own, x.tail), x.rowwise)


def summed(x: TaylorModel, dims: Any, mean: bool = False) -> TaylorModel:
    """Sums or means along dimensions, which stay with size 1."""
    count = x.value.numel() // max(1, x.value.sum(dim=dims, keepdim=True).numel())
    root, scale = math.sqrt(count), 1.0 / count if mean else 1.0
    return mapped(
        x, lambda c: c.sum(dim=dims, keepdim=True) * scale, root * scale, (count + 8) * UNIT * root * scale
    )


def centred(x: TaylorModel) -> TaylorModel:
    """The numbers along the last dimension without their mean."""
    count = x.value.shape[-1]
    return mapped(x, lambda c: c - c.mean(dim=-1, keepdim=True), 1.0, (2 * count + 16) * UNIT)


def multiplied(
    a: TaylorModel, b: TaylorModel, run: Callable[[Tensor, Tensor], Tensor] = torch.mul, inner: int = 1
) -> TaylorModel:
    """The product of two tensors: entry by entry, or of batches of matrices with that inner dimension."""
    order, length, rowwise = a.order, a.length, a.rowwise or b.rowwise
    coefficients: list[Tensor | None] = [None] * order
    beyond = a.value.new_zeros((1, 1))
    for i, first in enumerate(a.coefficients):
        for k, second in enumerate(b.coefficients):
            if first is None or second is None:
                continue
            term = run(first, second)
            if i + k < order:
                present = coefficients[i + k]
                coefficients[i + k] = term if present is None else present + term
            else:
                beyond = beyond + row_norms(term, rowwise) * reach(length, i + k - order)
    shape = coefficients[0].shape if coefficients[0] is not None else run(a.value, b.value).shape
    own = torch.cat(product(sizes_of(a), sizes_of(b)), dim=1) * ((inner + order + 8) * UNIT)
    rows = max(len(own), len(beyond))
    tail = torch.cat([beyond.expand(rows, 1), own.expand(rows, 3)], dim=1)
    for model, other in ((a, b), (b, a)):
        if model.tail is not None:
            gain = other.sizes
            if run is torch.mul:
                copies = math.sqrt(max(1, shape.numel() // max(1, model.value.numel())))
                gain = torch.minimum(gain, (_peaks(other) + other.move) * copies)
            tail = tail + passed_on(model.tail, gain, other.speed, other.turn)
    return TaylorModel(tuple(coefficients), length, rounded_up(tail), rowwise)


def _peaks(x: TaylorModel) -> Tensor:
    """The largest entries of the rows at the beginning, as a column."""
    return x.value.reshape(x.value.shape[0] if x.rowwise else 1, -1).abs().amax(dim=1, keepdim=True)


def _move(moving: Moving, *slots: str) -> bool:
    return all(slot in moving.slots and not moving.slots[slot].is_constant for slot in slots)


@beyond_second
def product_along(moving: Moving) -> TaylorModel | None:
    """Two tensors that both move, multiplied entry by entry or as batches of matrices."""
    slots = record_of(moving.node).factors
    if not _move(moving, *slots):
        return None
    a, b = (argument(moving, slot) for slot in slots)
    if moving.node.op in ("aten.mul", "aten.multiply"):
        return multiplied(a, b)
    matrices = a.value.dim() > 1 and b.value.dim() > 1
    return multiplied(a, b, torch.matmul, inner=a.value.shape[-1]) if matrices else None


@beyond_second
def quotient_along(moving: Moving) -> TaylorModel | None:
    """A tensor divided by one that moves."""
    if "self" not in moving.slots or not _move(moving, "other"):
        return None
    return multiplied(argument(moving, "self"), function_of(_INVERSE, argument(moving, "other")))


def _exponentials(x: TaylorModel, dims: Any, allowed: Tensor | None = None) -> tuple[TaylorModel, Tensor]:
    """exp(x - c), zero where it is not allowed, and c."""
    value = x.value if allowed is None else x.value.masked_fill(~allowed, -torch.inf)
    top = value.amax(dim=dims, keepdim=True)
    if allowed is not None:
        x = mapped(x, lambda c: c * allowed)
    raised = function_of(_EXP, shifted_by(x, -top))
    return (raised if allowed is None else mapped(raised, lambda c: c * allowed)), top


def softmax_along(slot: str) -> Taylor:
    """Soft-max along one dimension, masked or not."""

    @beyond_second
    def taylor(moving: Moving) -> TaylorModel | None:
        x, arguments = argument(moving, slot), moving.node.arguments
        allowed = None
        if moving.node.op == "surefoot.masked_softmax":
            if "mask" in moving.slots and not moving.slots["mask"].is_constant:
                return None
            mask = moving.slots["mask"].value if "mask" in moving.slots else arguments["mask"]
            allowed = moving.node.target(torch.zeros_like(x.value), mask, arguments["causal"]) > 0
        dim = arguments.get("dim", -1)
        raised, _ = _exponentials(x, dim, allowed)
        return multiplied(raised, function_of(_INVERSE, summed(raised, dim)))

    return taylor


@beyond_second
def log_sum_along(moving: Moving) -> TaylorModel | None:
    """The logarithm of a sum of exponentials."""
    x, dims = argument(moving, "self"), moving.node.arguments["dim"]
    raised, top = _exponentials(x, dims)
    found = shifted_by(function_of(_LOG, summed(raised, dims)), top)
    kept = moving.node.arguments.get("keepdim", False)
    return found if kept else mapped(found, lambda c: c.reshape(moving.node.specs[0].shape))


@beyond_second
def log_softmax_along(moving: Moving) -> TaylorModel | None:
    """The logarithm of a soft-max: the sum of two models, one of them copied to the classes."""
    x, dim = argument(moving, "self"), moving.node.arguments["dim"]
    raised, top = _exponentials(x, dim)
    classes = x.value.shape[dim]
    logs = mapped(function_of(_LOG, summed(raised, dim)), lambda c: c.expand(x.value.shape), math.sqrt(classes))
    below = shifted_by(x, -top)
    parts = zip(below.coefficients, logs.coefficients, strict=True)
    coefficients = tuple(a if b is None else -b if a is None else a - b for a, b in parts)
    own = (torch.cat(sizes_of(below), dim=1) + torch.cat(sizes_of(logs), dim=1)) * (2 * UNIT)
    return TaylorModel(coefficients, x.length, _joined(own, below.tail, logs.tail), x.rowwise)


def normalised_along(layout_of: Callable[[Node], Any]) -> Taylor:
    """Groups of numbers, as the layout of an operation says; one row where samples mix."""

    @beyond_second
    def taylor(moving: Moving) -> TaylorModel | None:
        layout, eps = layout_of(moving.node), moving.node.arguments["eps"]
        if layout is None or eps is None or set(moving.slots) != {"input"} or not moving.node.numel:
            return None
        x, rows = argument(moving, "input"), 1 if layout.turned else layout.shape[0]
        if layout.count % rows:
            return None
        laid = mapped(x, lambda c: layout.groups(c).reshape(rows, -1, layout.size))
        apart = centred(laid) if layout.centre else laid
        spread = shifted_by(summed(multiplied(apart, apart), -1, mean=True), float(eps))
        return mapped(multiplied(apart, function_of(_INVERSE_ROOT, spread)), layout.tensor)

    return taylor
