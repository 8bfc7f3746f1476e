"""Half the squared distance of outputs from targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.bilinear import product
from surefoot.operations.call import Bounds, Call, Moving, Slot
from surefoot.operations.losses.factor import Factor
from surefoot.operations.losses.sums import (
    UNIT,
    compared,
    dense,
    divisor,
    keywords,
    near_loss,
    row_bounds,
    samples,
    weighted_sum,
)
from surefoot.operations.record import LossFacts, operation
from surefoot.scalar import Rounded
from surefoot.taylor import FLOOR, TaylorModel, passed_on, reach, row_norms


def value(outputs: Tensor, targets: Tensor, *, reduction: str = "mean", scale: float = 1.0) -> Tensor:
    """Half the squared distance."""
    distance = (outputs - targets.to(outputs.dtype)).square().sum()
    return 0.5 * scale * distance / divisor(outputs.shape, reduction)


def taylor(moving: Moving) -> TaylorModel | None:
    r""":math:`\frac12\|r\|^2` with :math:`r = \hat y - y` has the coefficients
    :math:`\frac12\sum_{a+b=j}\langle r_a, r_b\rangle`; with :math:`\delta = \eta^mR + E` it moves by
    :math:`\langle r + \frac12\delta, \delta\rangle`, so errors pass on with r and :math:`\delta` in the place of
    slopes. The difference r and the products have a round-off of n + 16 units at most, n counting the numbers
    added up.
    """
    pair = compared(moving)
    if pair is None:
        return None
    (outputs, targets), order = pair, moving.order
    first, *others = dense(outputs, outputs.order)
    flat = [c.unsqueeze(-1).flatten(1) for c in (first - targets, *others)]
    products = [torch.zeros_like(flat[0][:, :1]) for _ in range(max(order, 2 * len(flat) - 1))]
    for a, c in enumerate(flat):
        for b, d in enumerate(flat[a:], start=a):
            products[a + b] += (0.5 if a == b else 1.0) * (c * d).sum(dim=1, keepdim=True)
    length = outputs.length
    start = row_norms(flat[0], rowwise=True) + FLOOR
    rest = torch.zeros_like(start)
    for degree, c in enumerate(products[order:], start=order):
        rest = rest + c.abs() * reach(length, degree - order)
    sizes = start + outputs.move, outputs.speed, outputs.turn
    errors = torch.cat(product(sizes, sizes), dim=1) * ((sum(flat[0].shape) + 16) * 2.0**-53)
    tail = torch.cat([rest, errors], dim=1)
    if outputs.tail is not None:
        gain = start + outputs.polynomial_move + 0.5 * outputs.reach_of_tail
        tail = tail + passed_on(outputs.tail, gain, *sizes[1:])
    factor = _factor(outputs.value.shape, **moving.node.kwargs)
    return weighted_sum(products[:order], tail, length, torch.full_like(start, factor))


def root(outputs: Tensor, targets: Tensor, slope: Tensor | None, **options: Any) -> Factor:
    r"""R: :math:`\nabla^2h = cI`."""
    size = _factor(outputs.shape, **options) ** 0.5
    return Factor(size, outputs.shape, None if slope is None else slope / size)


def _factor(shape: torch.Size, *, reduction: str = "mean", scale: float = 1.0) -> float:
    return scale / divisor(shape, reduction)


def pullback(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """c(ŷ - y), and minus that for targets that vary."""
    outputs, targets = (call[slot].value.double() for slot in ("outputs", "targets"))
    gap = Rounded.exact(outputs) - Rounded.exact(targets)
    slope = gap.scaled(_factor(outputs.shape, **call.node.kwargs)) * costate
    return {"outputs": slope, "targets": -slope}


def _second(call: Call, move: Tensor) -> tuple[Tensor, float]:
    """c‖d‖², c off by a few units."""
    factor = _factor(call["outputs"].shape, **call.node.kwargs)
    return factor * move.square().sum(), 8 * UNIT * abs(factor)


@operation(
    "surefoot.square",
    loss=LossFacts(value, convex=True, smooth=True, nonnegative=True, quadratic=True, options=keywords(value)),
    rows=samples,
    taylor=taylor,
    pullback=pullback,
    near=near_loss(pullback, _second),
    factor=root,
    errata=(12,),
)
def square(call: Call) -> Bounds:
    r""":math:`\frac c2\sum_i\|\hat y_i - y_i\|^2`, c = 1/n for a mean: gradient :math:`c(\hat y - y)`,
    curvature c.
    """
    outputs, targets = call["outputs"], call["targets"]
    reduction, scale = call.node.kwargs.get("reduction", "mean"), call.node.kwargs.get("scale", 1.0)
    factor = Magnitude.of(scale) / divisor(outputs.shape, reduction)
    distance = outputs.bound + targets.bound
    if isinstance(outputs.value, Tensor) and isinstance(targets.value, Tensor):
        gap = outputs.value - targets.value
        distance = minimum(distance, norm(gap) * (1 + 4 * UNIT) + outputs.spread)
    curvatures = Magnitude.of(np.ones(outputs.shape[0])) * factor
    return row_bounds(call, distance * factor, curvatures, Magnitude.zero(), bound=distance**2 * factor / 2)
