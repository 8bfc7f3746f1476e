r"""Lengths, variances and directions of groups of numbers, pulled back by formulas whose errors are proved.

With a group x, its length r and direction :math:`d = x/r`: the length has the gradient d, the direction the
symmetric Jacobian :math:`(I - dd^\top)/r`. Groups are scaled and, for variances, centred
(:mod:`surefoot.operations.groups`), which leaves an entry off by at most the error e of the group, and r by e and
a relative :math:`(M + 8)2u`. Where a group is zero, its direction is any vector of norm at most 1: zero, with the
error 1. Subtracting the mean is symmetric and leaves centred numbers as they are, so that it is not done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.operations.call import Call, Slot
from surefoot.operations.dimensions import normalized_dims
from surefoot.operations.groups import Groups, centred, scaled, times_power
from surefoot.operations.softmax import summed
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL

_UNIT = 2.0**-53
_SLACK = 2.0**-50


def groups_along(x: Tensor, dims: list[int], centre: bool = False) -> Groups:
    """The numbers along some dimensions as scaled groups, perhaps centred."""
    kept = [k for k in range(x.dim()) if k not in dims]
    count = math.prod(x.shape[k] for k in kept)
    groups = scaled(x.permute(*kept, *dims).reshape(count, math.prod(x.shape[k] for k in dims)))
    return centred(groups) if centre else groups


@dataclass(frozen=True)
class Directions:
    """The groups of a tensor along some dimensions.

    Attributes:
        shape: of the tensor.
        dims: the dimensions.
        unit: the directions, one group per row.
        length: their lengths on their scale, as a column; one where a group is zero.
        exponents: of the scales.
        zero: which groups may be zero.
        low, high: bounds of the lengths, as a column.
    """

    shape: tuple[int, ...]
    dims: list[int]
    unit: Rounded
    length: Rounded
    exponents: Tensor
    zero: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, x: Tensor, dims: list[int], centre: bool = False) -> Directions:
        """The groups along dimensions, perhaps centred."""
        groups = groups_along(x, dims, centre)
        norms, error = groups.norms, groups.error * (1 + 2.0**-40)
        wrong = norms * ((groups.size + 16) * 2 * _UNIT) + error
        zero = norms <= wrong
        length = Rounded(torch.where(zero, 1.0, norms), torch.where(zero, 0.0, wrong))
        unit = Rounded(groups.numbers, error) / length
        unit = Rounded(torch.where(zero, 0.0, unit.value), torch.where(zero, 1.0, unit.error))
        low, high = (
            times_power(bound, groups.exponents)
            for bound in ((norms - wrong).clamp(min=0.0) * (1 - _SLACK), (norms + wrong) * (1 + _SLACK))
        )
        return cls(tuple(x.shape), dims, unit, length, groups.exponents, zero, low - SMALL, high + SMALL)

    def groups(self, costate: Tensor) -> Rounded:
        """A costate of the shape of the tensor, one group per row."""
        kept = [k for k in range(len(self.shape)) if k not in self.dims]
        return Rounded.exact(costate.permute(*kept, *self.dims).reshape(self.unit.value.shape))

    def column(self, costate: Tensor) -> Rounded:
        """A costate with one entry per group."""
        return Rounded.exact(costate.reshape(-1, 1))

    def across(self, costate: Rounded) -> Rounded:
        """The costate of a direction, pulled back: without its part along the direction, over the length."""
        pulled = (costate - self.unit * summed(self.unit * costate, 1)) / self.length
        value, error = (times_power(part, -self.exponents) for part in (pulled.value, pulled.error))
        return Rounded(value, torch.where(self.zero, torch.inf, error + SMALL))

    def laid(self, rows: Rounded) -> Rounded:
        """Groups in the shape of the tensor."""
        kept = [k for k in range(len(self.shape)) if k not in self.dims]
        order = [*kept, *self.dims]
        back = sorted(range(len(order)), key=order.__getitem__)

        def lay(part: Tensor) -> Tensor:
            whole = part.expand(self.unit.value.shape).reshape([self.shape[k] for k in order])
            return whole.permute(back)

        return Rounded(lay(rows.value), lay(rows.error))


def pull_length(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """Every group times its direction and its entry of the costate."""
    x = call["self"].value
    data = Directions.of(x, normalized_dims(call["dim"], x.dim()))
    return {"self": data.laid(data.unit * data.column(costate))}


def pull_spread(freedom: Callable[[Call, list[int]], float]) -> Callable[[Call, Tensor], dict[Slot, Rounded]]:
    r"""Of a variance, :math:`2\lambda c/f`, or a deviation, :math:`\lambda c/(r\sqrt f)`."""

    def pull(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
        x = call["self"].value
        dims = normalized_dims(call["dim"], x.dim())
        f = freedom(call, dims)
        if call.op == "aten.std":
            data = Directions.of(x, dims, centre=True)
            return {"self": data.laid((data.unit * data.column(costate)).scaled(1 / math.sqrt(f)))}
        data, groups = Directions.of(x, dims), groups_along(x, dims, centre=True)
        numbers = Rounded(
            times_power(groups.numbers, groups.exponents), times_power(groups.error, groups.exponents) + SMALL
        )
        return {"self": data.laid((numbers * data.column(costate)).scaled(2 / f))}

    return pull


def pull_unit(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """Outside of the ball of radius eps a direction, inside linear; where that is not sure, nothing is known."""
    x, eps = call["x"].value, float(call["eps"])
    data = Directions.of(x, normalized_dims(call["dim"], x.dim()))
    slope = data.groups(costate)
    outside = data.across(slope)
    if eps <= 0:
        return {"x": data.laid(outside)}
    outer, inner = data.low > eps, data.high < eps
    return {"x": data.laid(outside.choose(slope / eps, outer, ~outer & ~inner))}


def pull_weight_norm(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    r"""Of :math:`g\,v/\|v\|`: the direction's, times g, and the costate along the direction."""
    v, g, dim = call["v"].value, call["g"].value, call["dim"]
    data = Directions.of(v, [k for k in range(v.dim()) if dim == -1 or k != dim])
    slope, lengths = data.groups(costate), Rounded.exact(g.reshape(-1, 1))
    along = summed(data.unit * slope, 1)
    return {
        "v": data.laid(data.across(slope) * lengths),
        "g": Rounded(along.value.reshape(g.shape), along.error.reshape(g.shape)),
    }
