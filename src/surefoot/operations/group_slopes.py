r"""Lengths, variances and directions of groups of numbers, pulled back by formulas whose errors are proved.

With a group x, its length r and direction :math:`d = x/r`: the length has the gradient d, the direction the
symmetric Jacobian :math:`(I - dd^\top)/r`. Groups are scaled and, for variances, centred
(:mod:`surefoot.operations.groups`), which leaves an entry off by at most the error e of the group, and r by e and
a relative :math:`(M + 8)2u`. Where a group is zero, its direction is any vector of norm at most 1: zero, with the
error 1. Subtracting the mean is symmetric and leaves centred numbers as they are, so that it is not done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.norms.hermitian import times_power
from surefoot.operations.call import Call, Slot
from surefoot.operations.common import normalized_dims
from surefoot.operations.groups import Groups, centred, scaled
from surefoot.operations.record import Near
from surefoot.operations.softmax import summed
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL

_UNIT = 2.0**-53
_SLACK = 2.0**-50
Freedom = Callable[[Call, list[int]], float]  # by how much a variance divides


def groups_along(x: Tensor, dims: list[int], centre: bool = False) -> Groups:
    """The numbers along some dimensions as scaled groups, perhaps centred."""
    kept = [k for k in range(x.dim()) if k not in dims]
    count = math.prod(x.shape[k] for k in kept)
    groups = scaled(x.permute(*kept, *dims).reshape(count, math.prod(x.shape[k] for k in dims)))
    return centred(groups) if centre else groups


@dataclass(frozen=True)
class Directions:
    """The groups of a tensor along some dimensions."""

    shape: tuple[int, ...]  # of the tensor
    dims: list[int]  # the dimensions
    unit: Rounded  # the directions, one group per row
    length: Rounded  # their lengths on their scale, as a column; one where a group is zero
    exponents: Tensor  # of the scales
    zero: Tensor  # which groups may be zero
    low: Tensor  # bounds of the lengths, as a column
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
        return Rounded.exact(self.rows(costate))

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor of that shape, one group per row."""
        kept = [k for k in range(len(self.shape)) if k not in self.dims]
        return tensor.permute(*kept, *self.dims).reshape(self.unit.value.shape)

    def column(self, costate: Tensor) -> Rounded:
        """A costate with one entry per group."""
        return Rounded.exact(costate.reshape(-1, 1))

    def across(self, costate: Rounded) -> Rounded:
        """The costate of a direction, pulled back: without its part along the direction, over the length."""
        pulled = (costate - self.unit * summed(self.unit * costate, 1)) / self.length
        value, error = (times_power(part, -self.exponents) for part in (pulled.value, pulled.error))
        return Rounded(value, torch.where(self.zero, torch.inf, error + SMALL))

    def lay(self, rows: Tensor) -> Tensor:
        """Groups in the shape of the tensor."""
        kept = [k for k in range(len(self.shape)) if k not in self.dims]
        order = [*kept, *self.dims]
        back = sorted(range(len(order)), key=order.__getitem__)
        return rows.expand(self.unit.value.shape).reshape([self.shape[k] for k in order]).permute(back)

    def laid(self, rows: Rounded) -> Rounded:
        """The same with errors."""
        return Rounded(self.lay(rows.value), self.lay(rows.error))


def pull_length(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """Every group times its direction and its entry of the costate."""
    x = call["self"].value
    data = Directions.of(x, normalized_dims(call["dim"], x.dim()))
    return {"self": data.laid(data.unit * data.column(costate))}


def pull_spread(freedom: Freedom) -> Callable[[Call, Tensor], dict[Slot, Rounded]]:
    r"""The costate of a variance, :math:`2\lambda c/f`, or a deviation, :math:`\lambda c/(r\sqrt f)`."""

    def pull(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
        x = call["self"].value
        dims = normalized_dims(call["dim"], x.dim())
        f = freedom(call, dims)
        if call.op == "aten.std":
            data = Directions.of(x, dims, centre=True)
            return {"self": data.laid((data.unit * data.column(costate)).scaled(1 / math.sqrt(f)))}
        data, groups = Directions.of(x, dims), groups_along(x, dims, centre=True)
        return {"self": data.laid((groups.exact * data.column(costate)).scaled(2 / f))}

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
    r"""The costates of :math:`g\,v/\|v\|`: the direction's, times g, and the costate along the direction."""
    v, g, dim = call["v"].value, call["g"].value, call["dim"]
    data = Directions.of(v, [k for k in range(v.dim()) if dim == -1 or k != dim])
    slope, lengths = data.groups(costate), Rounded.exact(g.reshape(-1, 1))
    along = summed(data.unit * slope, 1)
    return {
        "v": data.laid(data.across(slope) * lengths),
        "g": Rounded(along.value.reshape(g.shape), along.error.reshape(g.shape)),
    }


def push_weight_norm(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded:
    """The direction's, times g, and the direction times the tangent of g."""
    v, g, dim = call["v"].value, call["g"].value, call["dim"]
    data = Directions.of(v, [k for k in range(v.dim()) if dim == -1 or k != dim])
    total = Rounded.exact(torch.zeros_like(data.unit.value))
    if "v" in tangents:
        total = data.across(data.groups(tangents["v"])) * g.reshape(-1, 1)
    if "g" in tangents:
        total = total + data.unit * data.column(tangents["g"])
    return data.laid(total)


def _sizes(data: Directions) -> tuple[Tensor, float, float]:
    """One over the lengths, a bound on their relative error together with that of directions, and the largest."""
    inverse = times_power(1 / data.length.value, -data.exponents)
    apart = torch.linalg.vector_norm(data.unit.error.expand(data.unit.value.shape), dim=1, keepdim=True)
    apart = apart + data.length.error / data.length.value + (data.unit.value.shape[1] + 32) * _UNIT
    wrong = torch.where(data.zero, torch.inf, apart)
    return inverse, float(wrong.max()) * (1 + 2.0**-40), float(inverse.max()) * (1 + 2.0**-40)


def near_length(freedom: Freedom | None = None) -> Callable[[Call, Tensor], Near | None]:
    r"""Of a length, :math:`\langle n, d\rangle + \frac1{2r}(\|d\|^2 - \langle n, d\rangle^2)`; a deviation is that
    of centred numbers, over the root of f.

    Let E bound the error of the direction n in norm, the relative one of r, and M + 32 units. Then n is off by 2E
    as it is computed, and :math:`(I - nn^\top)/r`, of two terms with n, by 16E/r. Subtracting the mean rounds
    by M + 8 units of the norm, before and after.
    """

    def near(call: Call, move: Tensor) -> Near | None:
        x = call["self"].value
        if not x.numel() or not x.dim():
            return None
        dims = normalized_dims(call["dim"], x.dim())
        data = Directions.of(x, dims, centre=freedom is not None)
        inverse, error, largest = _sizes(data)
        move, scale = data.rows(move), 1.0
        if freedom is not None:
            move, scale = move - move.mean(dim=1, keepdim=True), 1 / math.sqrt(freedom(call, dims))
        along = (data.unit.value * move).sum(dim=1, keepdim=True)
        across = move - data.unit.value * along
        change = (along + 0.5 * inverse * across.square().sum(dim=1, keepdim=True)) * scale
        return Near(change.reshape(call.shape), 8 * error * scale, 64 * error * largest * scale)

    return near


def near_variance(freedom: Freedom) -> Callable[[Call, Tensor], Near | None]:
    r""":math:`(2\langle c, Pd\rangle + \|Pd\|^2)/f`, c the centred numbers, of norm C and off by e on a group: the
    slope is off by :math:`2e/f` and M + 32 units of :math:`4C/f`, the second derivative by as many of 8/f.
    """

    def near(call: Call, move: Tensor) -> Near | None:
        x = call["self"].value
        if not x.numel() or not x.dim():
            return None
        dims = normalized_dims(call["dim"], x.dim())
        f, groups = freedom(call, dims), groups_along(x, dims, centre=True)
        exact = groups.exact
        numbers, wrong = exact.value, exact.error.expand(exact.value.shape)
        move = Directions.of(x, dims).rows(move)
        move = move - move.mean(dim=1, keepdim=True)
        change = (2 * (numbers * move).sum(dim=1) + move.square().sum(dim=1)) / f
        unit = (groups.size + 32) * _UNIT
        error, size = (float(torch.linalg.vector_norm(t, dim=1).max()) for t in (wrong, numbers))
        return Near(change.reshape(call.shape), (4 * error + 8 * unit * size) / f, 16 * unit / f)

    return near


def near_unit(call: Call, move: Tensor) -> Near | None:
    r"""Of :math:`x/r` outside of the ball of radius eps, with p the move across n: :math:`p/r - (\langle n,
    d\rangle p + \frac12n\|p\|^2)/r^2`. With E as for lengths, p is off by 4E, the first derivative by 8E/r and the
    second by 64E/r².
    """
    x = call["x"].value
    if not x.numel() or not x.dim():
        return None
    data = Directions.of(x, normalized_dims(call["dim"], x.dim()))
    if not bool((data.low > float(call["eps"])).all()):
        return None
    inverse, error, largest = _sizes(data)
    move, n = data.rows(move), data.unit.value
    along = (n * move).sum(dim=1, keepdim=True)
    across = move - n * along
    bend = along * across + 0.5 * n * across.square().sum(dim=1, keepdim=True)
    change = inverse * across - inverse * (inverse * bend)
    return Near(data.lay(change), 8 * error * largest, 64 * error * largest * largest)
