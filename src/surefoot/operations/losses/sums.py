r"""What all losses share.

Every loss here is :math:`h(\hat y) = \frac{\text{scale}}N\sum_i h_i(\hat y_i)` with the samples along the first
dimension; N is the number of samples unless another reduction is asked for. So the gradient is the stack of the
:math:`\nabla h_i`, and the Hessian is block-diagonal with blocks :math:`\nabla^2h_i`.

A model that returns one number returns its loss, and nothing is left to compute.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surefoot.enclosure import norm
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Bounds, Call, Moving, Slot, Use
from surefoot.operations.common import ONE, affine
from surefoot.operations.record import Form, LossFacts, Near, operation
from surefoot.scalar import Rounded
from surefoot.taylor import TaylorModel, rounded_up

Numbers: TypeAlias = "float | tuple[Numbers, ...]"
UNIT = 2.0**-52
Second = Callable[[Call, Tensor], tuple[Tensor, float]]
NearLoss = Callable[[Call, Tensor], Near]


def samples(use: Use) -> tuple[Slot]:
    """Row i of the outputs enters the i-th summand."""
    return ("outputs",)


def keywords(function: Callable[..., object]) -> dict[str, Hashable]:
    """The keyword-only arguments of a function with their usual values."""
    arguments = inspect.signature(function).parameters.values()
    return {argument.name: argument.default for argument in arguments if argument.kind is argument.KEYWORD_ONLY}


def divisor(shape: Sequence[int], reduction: str) -> int:
    """N for outputs of this shape.

    >>> [divisor((2, 3, 4), reduction) for reduction in ("mean", "sum", "entries", "row")]
    [2, 1, 24, 12]
    """
    sizes = {"mean": shape[:1], "entries": shape, "row": shape[1:]}
    return math.prod(sizes.get(reduction, ()))


def as_tensor(numbers: Numbers, like: Tensor) -> Tensor:
    """Weights as a tensor of the type and on the device of another one."""
    return torch.tensor(numbers, dtype=torch.float64).to(like)


def times(weight: Tensor, size: Tensor) -> Tensor:
    """A product in which zero times infinity is zero: what has no weight is constant."""
    return torch.where(weight == 0, 0.0, weight * size)


def row_bounds(call: Call, slope: Magnitude, curvatures: Magnitude, change: Magnitude, **others: Any) -> Bounds:
    """Bounds of a sum over the rows, from its gradient and, for each row, curvature and how far that changes."""
    outputs = call["outputs"]
    pair, count = ("outputs", "outputs"), outputs.shape[0]
    return Bounds(
        jacobian={"outputs": slope},
        curvature={pair: curvatures.max()},
        reduction=outputs.numel,
        rows_along=lambda costate: {pair: curvatures * costate.bound},
        change_along=lambda costate: {pair: costate.row_spread(count) * curvatures + change * costate.bound},
        **others,
    )


def compared(moving: Moving) -> tuple[TaylorModel, Tensor] | None:
    """Outputs and targets along a segment; ``None`` if the targets move, or samples are not kept apart."""
    outputs, targets = moving.slots["outputs"], moving.slots["targets"]
    return (outputs, targets.value) if outputs.rowwise and targets.is_constant else None


def near_loss(pullback: Callable[[Call, Tensor], Mapping[Slot, Rounded]], second: Second) -> NearLoss:
    """The quadratic model of a loss from its proved gradient and twice its quadratic part, of known error."""

    def near(call: Call, move: Tensor) -> Near:
        one = torch.ones((), dtype=torch.float64, device=move.device)
        slope = pullback(call, one)["outputs"].expand(move.shape)
        bent, error = second(call, move)
        return Near((slope.value * move).sum() + 0.5 * bent, float(norm(slope.error)), error)

    return near


def dense(model: TaylorModel, order: int) -> list[Tensor]:
    """The coefficients up to an order with zeros written out."""
    given = [*model.coefficients, *[None] * (order - model.order)]
    return [torch.zeros_like(model.value) if c is None else c for c in given]


def weighted_sum(coefficients: list[Tensor], tail: Tensor, length: float, weights: Tensor) -> TaylorModel:
    """The sum over the samples with weights, a column."""
    sums = tuple((weights * c).sum() for c in coefficients)
    return TaylorModel(sums, length, rounded_up(times(weights, tail).sum(dim=0, keepdim=True)), rowwise=False)


def value(outputs: Tensor) -> Tensor:
    """The number itself."""
    return outputs.reshape(())


@operation("surefoot.returned", form=Form.LINEAR, rounds=False, loss=LossFacts(value, convex=True, smooth=True))
def returned(call: Call) -> Bounds:
    """One number as it is: slope 1, no curvature."""
    return affine(call, {"outputs": ONE}, peak=call["outputs"].peak)
