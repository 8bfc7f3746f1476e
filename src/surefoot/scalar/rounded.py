r"""Numbers as computed, with a proved bound on their error.

A :class:`Rounded` tensor stands for real numbers t with :math:`|t - \text{value}| \le \text{error}`, entry by
entry. Torch's functions of it compute in double precision and return another one that contains the function of
every such t. With a and b the values, :math:`e_a` and :math:`e_b` their errors and :math:`u = 2^{-53}`,

* a sum is off by :math:`e_a + e_b + u|a + b|` and a product by :math:`(|a| + e_a)e_b + |b|e_a + u|ab|`;
* a quotient q = a/b by :math:`(e_a + |q|e_b)/(|b| - e_b) + u|q|`, as :math:`a'/b' - a/b = (a' - a)/b' -
  (a/b)(b' - b)/b'`; nothing is known where b may be zero;
* a monotone function is between its values at the two ends; sine and cosine move by at most :math:`e_a`; cosh,
  which is even and convex, moves by at most :math:`\cosh(|a| + e_a) - \cosh a`.

**The one assumption** of this package about floating point: sums, products, quotients and square roots of doubles
are rounded to nearest, inner products of k numbers are sums of k products in some order, and an elementary
function of torch in double precision is within 8 units in the last place, or off by at most :math:`2^{-1022}`
where it underflows (the sigmoid of -720 comes out as zero); powers and logarithms to base two of numpy are within
4, and the kernel of one activation, as :mod:`surefoot.valuation` runs it, within 64 of :math:`|a(x)| +
|x|\sup|a'|`. Results in single precision enter where :mod:`surefoot.valuation.single` says how good they are, and
no other bound; those in half precision none. A library of functions cannot be proved from here: the tests compare
all of them with ball arithmetic, in every memory layout, where they are hard: next to multiples of π/2 up to the
largest doubles, next to one, where they under- and overflow.

Bounds are sums of a few products of non-negative numbers, a relative :math:`10u` off, and are multiplied by
:math:`1 + 2^{-48}`; every product that may underflow adds :math:`2^{-1022}`, which is more than it and the terms
of its bound lose. Where a value is not finite, the error is infinite or not a number, and both mean that nothing
is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNIT = 2.0**-53
SMALL = 2.0**-1022  # the smallest normal number
_ELEMENTARY = 2.0**-49  # 8 units in the last place, relative to the value
_UP = 1 + 2.0**-48

Function = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Rounded:
    """A computed tensor and, entry by entry, a bound on its error; both broadcast to one shape.

    >>> x = Rounded.exact(torch.tensor([1e-9], dtype=torch.float64))
    >>> cancelled = (torch.exp(x) - 1.0)
    >>> bool(abs(cancelled.value - 1e-9) <= cancelled.error), bool(cancelled.error < 1e-14)
    (True, True)
    """

    value: Tensor
    error: Tensor

    @staticmethod
    def exact(value: Tensor | float) -> Rounded:
        """Numbers without error."""
        wide = torch.as_tensor(value, dtype=torch.float64)
        return Rounded(wide, wide.new_zeros(()))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Rounded:
        rule = _RULES.get(function)
        if rule is not None:
            return rule(*args)
        return _monotone(lambda x: function(x, *args[1:], **(kwargs or {})), args[0].value, args[0].error)

    @property
    def bound(self) -> Tensor:
        """A bound on the absolute values of the entries."""
        return (self.value.abs() + self.error) * _UP

    def expand(self, shape: Sequence[int]) -> Rounded:
        """The numbers with the shape written out; errors that are not known are infinite."""
        error = self.error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return Rounded(self.value.expand(shape), error.expand(shape))

    def rearranged(self, function: Callable[[Tensor], Tensor]) -> Rounded:
        """The same numbers elsewhere, by a function that moves entries or puts zeros between them."""
        wide = self.expand(self.value.shape)
        return Rounded(function(wide.value), function(wide.error))

    def choose(self, other: Rounded, here: Tensor, unsure: Tensor) -> Rounded:
        """This one where ``here``, else the other; where it is not sure which, the error covers both."""
        value = torch.where(here, self.value, other.value)
        apart = (self.value - other.value).abs() * _UP + self.error + other.error
        error = torch.where(unsure, apart * _UP, torch.where(here, self.error, other.error))
        return Rounded(value, error)

    def __add__(self, other: Any) -> Rounded:
        b = _lift(other, self)
        value = self.value + b.value
        return Rounded(value, (self.error + b.error + UNIT * value.abs()) * _UP)

    def __mul__(self, other: Any) -> Rounded:
        b = _lift(other, self)
        value = self.value * b.value
        first, second = self.value.abs() + self.error, b.value.abs()
        error = (first * b.error + second * self.error + UNIT * value.abs()) * _UP
        both = (first > 0) & ((second > 0) | (b.error > 0))
        return Rounded(value, error + both.double() * SMALL)

    def __truediv__(self, other: Any) -> Rounded:
        b = _lift(other, self)
        value = self.value / b.value
        least = b.value.abs() - b.error
        error = (self.error + value.abs() * b.error) / least * _UP + UNIT * value.abs()
        error = error + ((self.value != 0) | (self.error > 0)).double() * SMALL
        return Rounded(value, torch.where(least > 0, error * _UP, torch.inf))

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error)

    def __sub__(self, other: Any) -> Rounded:
        return self + -_lift(other, self)

    __radd__, __rmul__ = __add__, __mul__

    def __rtruediv__(self, other: Any) -> Rounded:
        return _lift(other, self) / self

    def scaled(self, factor: float) -> Rounded:
        """The product with a number that is off by at most a relative 2u."""
        product = self * factor
        return Rounded(product.value, (product.error + 4 * UNIT * product.value.abs()) * _UP)


def _lift(other: Any, like: Rounded) -> Rounded:
    if isinstance(other, Rounded):
        return other
    return Rounded.exact(torch.as_tensor(other, dtype=torch.float64).to(like.value))


def _monotone(function: Function, value: Tensor, error: Tensor) -> Rounded:
    """A function that is monotone, from its values at both ends."""
    result = function(value)
    rounding = _ELEMENTARY * result.abs() + (value != 0).double() * SMALL
    if not bool(error.any()):
        return Rounded(result, rounding)
    away = torch.full_like(error, torch.inf)
    ends = function(torch.nextafter(value - error, -away)), function(torch.nextafter(value + error, away))
    reach = torch.maximum(*((end - result).abs() + _ELEMENTARY * end.abs() for end in ends))
    return Rounded(result, torch.where(error == 0, rounding, (rounding + reach) * _UP + SMALL))


def _lipschitz(function: Function) -> Callable[[Rounded], Rounded]:
    """A function that moves by at most as much as its argument."""

    def rule(x: Rounded) -> Rounded:
        sharp = _monotone(function, x.value, x.error.new_zeros(()))
        return Rounded(sharp.value, (sharp.error + x.error) * _UP)

    return rule


def _power(x: Rounded, exponent: float) -> Rounded:
    """Natural powers by squaring; others of positive numbers only."""
    if not float(exponent).is_integer():
        return _monotone(lambda t: torch.pow(t, exponent), x.value, x.error)
    if exponent < 0:
        return 1.0 / _power(x, -exponent)
    if exponent < 2:
        return x if exponent else Rounded.exact(torch.ones_like(x.value))
    half = _power(x, exponent // 2)
    return half * half * x if exponent % 2 else half * half


_SINE, _COSINE = _lipschitz(torch.sin), _lipschitz(torch.cos)
_RULES: dict[Any, Callable[..., Rounded]] = {
    torch.add: lambda a, b: a + b,
    torch.sub: lambda a, b: _lift(a, b) - b if isinstance(b, Rounded) else a - b,
    torch.mul: lambda a, b: a * b,
    torch.div: lambda a, b: a / b,
    torch.neg: lambda a: -a,
    torch.square: lambda a: a * a,
    torch.reciprocal: lambda a: 1.0 / a,
    torch.pow: _power,
    torch.sin: _SINE,
    torch.cos: _COSINE,
    torch.tan: lambda a: _SINE(a) / _COSINE(a),
    torch.cosh: lambda a: _monotone(torch.cosh, a.value.abs(), a.error),
}
