r"""The form of a loss that is a sum over the entries of the outputs.

.. math:: h(x) = c\sum_e\big(\mu_e\varphi(s_ex_e - t_e) - b_ex_e + k_e\big), \qquad c, \mu_e \ge 0

with a convex scalar function :math:`\varphi`. With :math:`\omega_e = s_ex_e - t_e` the gradient has the entries
:math:`c(\mu_es_e\varphi'(\omega_e) - b_e)` and the Hessian is diagonal with the entries
:math:`c\mu_es_e^2\varphi''(\omega_e)`. The suprema of the derivatives of φ come from ball arithmetic
(:mod:`surefoot.scalar`); where φ'' jumps, its supremum is the Lipschitz constant of φ'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.operations.losses.sums import UNIT, times
from surefoot.scalar import (
    Rounded,
    ScalarFunction,
    derivatives,
    range_on,
    rounded_derivatives,
    rounded_slope,
    sup_on,
)
from surefoot.scalar.rounded import SMALL

_SLACK = 2.0**-40  # more than the relative round-off of everything below
_USUAL = {"weight": 1.0, "sign": 1.0, "shift": 0.0, "linear": 0.0, "constant": 0.0}


@dataclass(frozen=True)
class Form:
    r"""The form of a loss for given targets; see the module. Tensors are double and broadcast to the outputs."""

    function: ScalarFunction | None  # φ; ``None`` if the loss is affine
    weight: Tensor  # μ
    sign: Tensor  # s
    shift: Tensor  # t
    linear: Tensor  # b
    constant: Tensor  # k
    factor: float = 1.0  # c
    # :math:`\mu - b` for soft-plus, s = 1 and t = 0: then :math:`\mu\sigma(x) - b = (\mu - b)\sigma(x) -
    # b\sigma(-x)`, which does not cancel for a label. ``None`` for other forms.
    rest: Tensor | None = None

    @staticmethod
    def of(like: Tensor, function: ScalarFunction | None, **numbers: Tensor | float) -> Form:
        """The form with numbers in place of tensors, on the device of one; by default 1 for μ and s, else 0."""
        double = torch.zeros((), dtype=torch.float64, device=like.device)
        given: Any = {name: double + number for name, number in {**_USUAL, **numbers}.items()}
        return Form(function, **given)

    def to(self, change: Callable[[Tensor], Tensor]) -> Form:
        """The same with changed tensors."""
        changed: Any = {name: change(getattr(self, name)) for name in _USUAL}
        return replace(self, **changed)

    def total(self, x: Tensor) -> Tensor:
        """The sum without c, differentiable, in the precision of the outputs."""
        form = self.to(lambda numbers: numbers.to(x))
        entries = form.constant - form.linear * x
        if form.function is not None:
            entries = entries + form.weight * form.function(form.argument(x))
        return entries.expand(x.shape).sum()

    def argument(self, x: Tensor) -> Tensor:
        """ω at the outputs."""
        return self.sign * x - self.shift

    def reach(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Intervals that enclose ω for outputs between these; round-off is covered."""
        ends = [torch.where(self.sign == 0, 0.0, self.sign * end) for end in (low, high)]
        slack = (torch.maximum(ends[0].abs(), ends[1].abs()) + self.shift.abs()) * (4 * UNIT)
        return torch.minimum(*ends) - self.shift - slack, torch.maximum(*ends) - self.shift + slack

    def slope(self, x: Tensor) -> Rounded:
        r"""The gradient at x with its error.

        The tensors of the form are computed from the targets, a relative :math:`2^{-48}` off, and c is rounded.
        """
        weight, sign, shift, linear = map(nearly, (self.weight, self.sign, self.shift, self.linear))
        if self.function is None:
            return (-linear).scaled(self.factor).expand(x.shape)
        argument = sign * x - shift
        slope = rounded_slope(self.function, argument)
        if self.rest is not None:
            total = nearly(self.rest) * slope - linear * rounded_slope(self.function, -argument)
        else:
            total = weight * sign * slope - linear
        return total.scaled(self.factor).expand(x.shape)

    def bend(self, x: Tensor) -> Rounded:
        """The diagonal of the Hessian at x with its error."""
        if self.function is None:
            return Rounded.exact(torch.zeros_like(x))
        weight, sign, shift = map(nearly, (self.weight, self.sign, self.shift))
        half = rounded_derivatives(self.function, sign * x - shift, 2)[2]
        return (weight * sign * sign * half).scaled(2 * self.factor).expand(x.shape)

    def proved(self, x: Tensor) -> Rounded:
        r"""The loss at x with its error; n terms in any order are off by γ_n of the sum of their absolute values.

        With ``rest``, :math:`\mu\varphi(x) - bx = (\mu - b)\varphi(x) + b\varphi(-x)`, as soft-plus is :math:`x +
        \varphi(-x)`.
        """
        weight, sign, shift, linear = map(nearly, (self.weight, self.sign, self.shift, self.linear))
        entries, argument = nearly(self.constant) - linear * x, sign * x - shift
        if self.function is not None:
            here = rounded_derivatives(self.function, argument, 0)[0]
            if self.rest is not None:
                there = rounded_derivatives(self.function, -argument, 0)[0]
                entries = nearly(self.constant) + nearly(self.rest) * here + linear * there
            else:
                entries = entries + weight * here
        terms = entries.expand(x.shape)
        up = 1 + (x.numel() + 16) * 2 * UNIT
        error = (terms.error.sum() + terms.value.abs().sum() * (x.numel() * 2 * UNIT)) * up
        return Rounded(terms.value.sum(), error).scaled(self.factor)

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

    def bends(self, low: Tensor, high: Tensor, x: object = None) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the diagonal of the Hessian between two outputs.

        A point x between them makes these sharper where they are near to each other: a derivative is at most its
        value at the point plus the distance times the supremum of the next one.
        """
        if self.function is None:
            return torch.zeros_like(low), torch.zeros_like(low)
        (near, far), square = self.reach(low, high), self.factor * self.weight * self.sign.square()
        least = range_on(self.function, near, far, 2)[0].nan_to_num(nan=0.0).clamp(min=0.0)
        most = times(square, sup_on(self.function, 2, near, far))
        least, upper = times(square, least) * (1 - _SLACK), most * (1 + _SLACK)
        if not isinstance(x, Tensor):
            return least, upper
        here, argument = self.curvatures(x), self.argument(x)
        further = sup_on(self.function, 3, near, far) * torch.maximum(far - argument, argument - near)
        move = times(square, further.nan_to_num(nan=torch.inf, posinf=torch.inf)) * (1 + _SLACK)
        move = move + _SLACK * (here.abs() + most)
        return torch.maximum(least, here - move), torch.minimum(upper, here + move)

    def size_at_zero(self, shape: Sequence[int]) -> float:
        """An upper bound of |h(0)|."""
        total = self.constant.abs()
        if self.function is not None:
            low, high = self.reach(torch.zeros_like(self.shift), torch.zeros_like(self.shift))
            total = total + times(self.weight, sup_on(self.function, 0, low, high))
        return float(total.expand(tuple(shape)).sum()) * self.factor * (1 + _SLACK)


def nearly(numbers: Tensor) -> Rounded:
    """Numbers of a form as computed from the targets: elementary functions and a few products."""
    return Rounded(numbers, numbers.abs() * 2.0**-48 + SMALL)
