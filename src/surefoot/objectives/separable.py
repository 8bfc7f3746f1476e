r"""Losses that are sums over the entries of the outputs, in one form.

.. math:: h(x) = c\sum_e\big(\mu_e\varphi(s_ex_e - t_e) - b_ex_e + k_e\big), \qquad c, \mu_e \ge 0

with a convex scalar function :math:`\varphi`. With :math:`\omega_e = s_ex_e - t_e` the gradient has the entries
:math:`c(\mu_es_e\varphi'(\omega_e) - b_e)` and the Hessian is diagonal with the entries
:math:`c\mu_es_e^2\varphi''(\omega_e)`. The suprema of the derivatives of φ come from ball arithmetic
(:mod:`surefoot.scalar`); where φ'' jumps, its supremum is the Lipschitz constant of φ'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.objectives.loss import Loss
from surefoot.scalar import ScalarFunction, derivatives, range_on, sup_on

_SLACK = 2.0**-40  # more than the relative round-off of everything below
_UNIT = 2.0**-50  # a few roundings


@dataclass(frozen=True)
class Form:
    """The form of a loss for given targets; see the module. Tensors are double and broadcast to the outputs.

    Attributes:
        factor: c.
        function: φ; ``None`` if the loss is affine.
        weight: μ.
        sign: s.
        shift: t.
        linear: b.
        constant: k.
    """

    factor: float
    function: ScalarFunction | None
    weight: Tensor
    sign: Tensor
    shift: Tensor
    linear: Tensor
    constant: Tensor

    @staticmethod
    def of(
        like: Tensor,
        factor: float,
        function: ScalarFunction | None,
        *,
        weight: Tensor | float = 1.0,
        sign: Tensor | float = 1.0,
        shift: Tensor | float = 0.0,
        linear: Tensor | float = 0.0,
        constant: Tensor | float = 0.0,
    ) -> Form:
        """The form with numbers in place of tensors."""
        numbers = (weight, sign, shift, linear, constant)
        double = torch.zeros((), dtype=torch.float64, device=like.device)
        return Form(factor, function, *(double + number for number in numbers))

    def argument(self, x: Tensor) -> Tensor:
        """ω at the outputs."""
        return self.sign * x - self.shift

    def reach(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Intervals that enclose ω for outputs between these; round-off is covered."""
        ends = [torch.where(self.sign == 0, 0.0, self.sign * end) for end in (low, high)]
        slack = torch.maximum(ends[0].abs(), ends[1].abs()) * _UNIT + self.shift.abs() * _UNIT
        return torch.minimum(*ends) - self.shift - slack, torch.maximum(*ends) - self.shift + slack

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient at x, as computed in double precision."""
        if self.function is None:
            return (-self.factor * self.linear).expand(x.shape)
        slope = derivatives(self.function, self.argument(x), 1)[1]
        return self.factor * (self.weight * self.sign * slope - self.linear)

    def curvatures(self, x: Tensor) -> Tensor:
        """The diagonal of the Hessian at x, as computed in double precision."""
        if self.function is None:
            return torch.zeros_like(x)
        bend = 2 * derivatives(self.function, self.argument(x), 2)[2]
        return self.factor * self.weight * self.sign.square() * bend

    def slopes(self, low: Tensor, high: Tensor) -> Tensor:
        """Upper bounds of the absolute entries of the gradient between two outputs."""
        if self.function is None:
            return (self.linear.abs() * self.factor * (1 + _SLACK)).expand(torch.broadcast_shapes(low.shape))
        steep = self.weight * self.sign
        ends = [times(steep, end) for end in range_on(self.function, *self.reach(low, high), 1)]
        size = torch.maximum(*((end - self.linear).abs() for end in ends))
        size = size + _SLACK * (torch.maximum(ends[0].abs(), ends[1].abs()) + self.linear.abs())
        return self.factor * size * (1 + _SLACK)

    def bends(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the diagonal of the Hessian between two outputs."""
        if self.function is None:
            return torch.zeros_like(low), torch.zeros_like(low)
        reach, square = self.reach(low, high), self.factor * self.weight * self.sign.square()
        least = range_on(self.function, *reach, 2)[0].nan_to_num(nan=0.0).clamp(min=0.0)
        most = sup_on(self.function, 2, *reach)
        return times(square, least) * (1 - _SLACK), times(square, most) * (1 + _SLACK)

    def bends_around(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The same with a point between them, which is sharper where they are near to each other.

        A derivative is at most its value at the point plus the distance times the supremum of the next one.
        """
        least, most = self.bends(low, high)
        if self.function is None:
            return least, most
        near, far = self.reach(low, high)
        here = self.curvatures(x)
        argument = self.argument(x)
        square = self.factor * self.weight * self.sign.square()
        further = sup_on(self.function, 3, near, far) * torch.maximum(far - argument, argument - near)
        further = further.nan_to_num(nan=torch.inf, posinf=torch.inf)
        error = _SLACK * (here.abs() + times(square, sup_on(self.function, 2, near, far)))
        move = times(square, further) * (1 + _SLACK) + error
        return torch.maximum(least, here - move), torch.minimum(most, here + move)

    def size_at_zero(self, shape: Sequence[int]) -> float:
        """An upper bound of |h(0)|."""
        total = self.constant.abs()
        if self.function is not None:
            low, high = self.reach(torch.zeros_like(self.shift), torch.zeros_like(self.shift))
            total = total + times(self.weight, sup_on(self.function, 0, low, high))
        return float(total.expand(tuple(shape)).sum()) * self.factor * (1 + _SLACK)


def times(weight: Tensor, size: Tensor) -> Tensor:
    """A product in which zero times infinity is zero: an entry without weight is constant."""
    return torch.where(weight == 0, 0.0, weight * size)


class SeparableLoss(Loss):
    """A loss in this form."""

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        """The form for these targets and outputs of this shape."""
        raise NotImplementedError

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        """Upper bounds of the slope and the curvature of an entry, whatever the targets; without c."""
        raise NotImplementedError
