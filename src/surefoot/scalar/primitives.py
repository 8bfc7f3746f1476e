r"""The elementary functions: one entry of :data:`PRIMITIVES` each.

An entry says how to evaluate the function on tensors, how to enclose its Taylor series on a ball, and, where
its argument may tend to infinity, how to enclose it there. Only exp, log and powers have a rule of their own
at infinity (:mod:`surefoot.scalar.tails`); the others are rewritten in terms of these, e.g. for
:math:`u \to \infty`

.. math:: \sigma(u) = 1 / (1 + e^{-u}), \qquad \operatorname{softplus}(u) = u + \log(1 + e^{-u}).

Several are given by their value and their derivative: the Taylor series of :math:`g(u)` is the integral of
that of :math:`g'(u) u'`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from flint import arb, arb_series

from surefoot.scalar.tails import LENGTH, Scale, TailSeries, hull

Series: TypeAlias = Any  # arb_series on a ball, TailSeries on a half line; both have the same arithmetic


@dataclass(frozen=True)
class Primitive:
    """An elementary function.

    Attributes:
        tensor: evaluates it on tensors (and its parameters).
        ball: encloses it on power series of balls.
        plus: encloses it on a tail series that tends to plus infinity; without it nothing is known there.
        minus: the same for minus infinity.
        arity: the number of its arguments.
    """

    tensor: Callable[..., torch.Tensor]
    ball: Callable[..., Any]
    plus: Callable[..., TailSeries] | None = None
    minus: Callable[..., TailSeries] | None = None
    arity: int = 1

    def enclose(self, *arguments: Series) -> Series:
        """The function of one or two series (and its parameters)."""
        first = arguments[0]
        if self.arity == 2 or not isinstance(first, TailSeries):
            return self.ball(*arguments)
        rule = {1: self.plus, -1: self.minus}.get(first.direction)
        if rule is not None:
            return rule(*arguments)
        return first.bounded(lambda u: self.ball(u, *arguments[1:]))


def integrate(value: Callable[[arb], arb], derivative: Callable[[Series], Series]) -> Callable[[Any], Any]:
    """The function with that value on balls and that derivative on series."""

    def series(u: arb_series) -> arb_series:
        return (derivative(u) * u.derivative()).integral() + value(u[0])

    return series


def opposite(rule: Callable[[TailSeries], TailSeries]) -> Callable[[TailSeries], TailSeries]:
    """The rule of an odd function at minus infinity from that at plus infinity."""
    return lambda u: -rule(-u)


def divide(a: Series, b: Series) -> Series:
    """a / b; not a number where b may be zero."""
    if not isinstance(b, TailSeries) and b[0].contains(0):
        return arb_series([arb("nan")] * LENGTH, prec=LENGTH)
    return a / b


def invert(u: Series) -> Series:
    """1 / u; not a number where u may be zero."""
    return divide(u * 0 + 1, u)


def sigmoid(u: Series) -> Series:
    """1 / (1 + exp(-u)); at minus infinity exp(u) / (1 + exp(u)), which keeps the decay."""
    if isinstance(u, TailSeries) and u.direction < 0:
        growing = u.exp()
        return growing / (1 + growing)
    if not isinstance(u, TailSeries) and (u[0].rad() > 0.03 or abs(u[0]) > 1e6):
        return _sigmoid_wide(u)
    return invert(1 + (-u).exp())


def _sigmoid_wide(u: arb_series) -> arb_series:
    """The same from y' = y z u' with y = sigmoid(u), z = 1 - y = sigmoid(-u), which are monotone.

    Wide balls would suffer from the cancellation in 1 / (1 + exp(-u)), large ones from overflow.
    """
    low, high = u[0].lower(), u[0].upper()
    y = [hull(_sigmoid_at(low), _sigmoid_at(high))]
    z = [hull(_sigmoid_at(-high), _sigmoid_at(-low))]
    slope = [u[order] * order for order in range(LENGTH)]
    products: list[arb] = []
    for order in range(1, LENGTH):
        products.append(sum((y[j] * z[order - 1 - j] for j in range(order)), arb(0)))
        y.append(sum((products[j] * slope[order - j] for j in range(order)), arb(0)) / order)
        z.append(-y[order])
    return arb_series(y, prec=LENGTH)


def _sigmoid_at(v: arb) -> arb:
    decaying = (-abs(v)).exp()
    return (decaying if v < 0 else 1) / (1 + decaying)


def _sigmoid_slope(u: Series) -> Series:
    return sigmoid(u) * sigmoid(-u)


def _tanh_slope(u: Series) -> Series:
    return 4 * _sigmoid_slope(2 * u)


def _tanh_plus(u: TailSeries) -> TailSeries:
    return 1 - 2 * sigmoid(-2 * u)


def _softplus_value(u: arb) -> arb:
    """log(1 + exp(u)) increases; at large u it is u + log(1 + exp(-u))."""
    ends = [v.exp().log1p() if v < 0 else v + (-v).exp().log1p() for v in (u.lower(), u.upper())]
    return hull(*ends)


def _power(u: Series, exponent: float) -> Series:
    """u ** exponent; on balls, natural exponents by multiplication, so that u may be negative."""
    if isinstance(u, TailSeries):
        return u.power(exponent)
    if not exponent.is_integer():
        return u ** arb(exponent)
    result = u ** abs(int(exponent)) if exponent else u * 0 + 1
    return result if exponent >= 0 else invert(result)


def _erfc_plus(u: TailSeries) -> TailSeries:
    """0 <= erfc(u) <= exp(-u^2) for u >= 0; the derivative is -2 / sqrt(pi) exp(-u^2)."""
    gauss = (-(u * u)).exp()
    slope = gauss * u.derivative() * (-2 / arb.pi().sqrt())
    return slope.integral(gauss[0].times(hull(arb(0), arb(1))))


def _erfc_minus(u: TailSeries) -> TailSeries:
    return 2 - _erfc_plus(-u)


def _erf_plus(u: TailSeries) -> TailSeries:
    return 1 - _erfc_plus(u)


def _atan_plus(u: TailSeries) -> TailSeries:
    """The value is between atan of the infimum and pi / 2."""
    low, _ = u[0].limits()
    value = Scale(u.start, hull(low.atan(), arb.pi() / 2))
    return (u.derivative() / (1 + u * u)).integral(value)


def _asinh_plus(u: TailSeries) -> TailSeries:
    """0 <= asinh(u) <= log(1 + 2 u) for u >= 0; the derivative is (1 + u^2)^(-1/2)."""
    value = (1 + 2 * u).log()[0].times(hull(arb(0), arb(1)))
    return (u.derivative() * (1 + u * u).power(-0.5)).integral(value)


def _softplus(u: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(u, torch.zeros_like(u))


PRIMITIVES: dict[str, Primitive] = {
    "add": Primitive(torch.add, operator.add, arity=2),
    "sub": Primitive(torch.sub, operator.sub, arity=2),
    "mul": Primitive(torch.mul, operator.mul, arity=2),
    "div": Primitive(torch.div, divide, arity=2),
    "neg": Primitive(torch.neg, operator.neg, operator.neg, operator.neg),
    "pow": Primitive(torch.pow, _power, _power, _power),
    "reciprocal": Primitive(torch.reciprocal, invert, invert, invert),
    "sqrt": Primitive(torch.sqrt, arb_series.sqrt, lambda u: u.power(0.5)),
    "rsqrt": Primitive(torch.rsqrt, arb_series.rsqrt, lambda u: u.power(-0.5)),
    "exp": Primitive(torch.exp, arb_series.exp, TailSeries.exp, TailSeries.exp),
    "expm1": Primitive(
        torch.expm1, integrate(arb.expm1, arb_series.exp), lambda u: u.exp() - 1, lambda u: u.exp() - 1
    ),
    "log": Primitive(torch.log, arb_series.log, TailSeries.log),
    "log1p": Primitive(torch.log1p, integrate(arb.log1p, lambda u: invert(1 + u)), lambda u: (1 + u).log()),
    "sigmoid": Primitive(torch.sigmoid, sigmoid, sigmoid, sigmoid),
    "softplus": Primitive(
        _softplus,
        integrate(_softplus_value, sigmoid),
        lambda u: u + PRIMITIVES["log1p"].enclose((-u).exp()),
        lambda u: PRIMITIVES["log1p"].enclose(u.exp()),
    ),
    "tanh": Primitive(torch.tanh, integrate(arb.tanh, _tanh_slope), _tanh_plus, opposite(_tanh_plus)),
    "sinh": Primitive(torch.sinh, integrate(arb.sinh, lambda u: (u.exp() + (-u).exp()) / 2)),
    "cosh": Primitive(torch.cosh, integrate(arb.cosh, lambda u: (u.exp() - (-u).exp()) / 2)),
    "asinh": Primitive(
        torch.asinh, integrate(arb.asinh, lambda u: (1 + u * u).rsqrt()), _asinh_plus, opposite(_asinh_plus)
    ),
    "atan": Primitive(torch.atan, arb_series.atan, _atan_plus, opposite(_atan_plus)),
    "sin": Primitive(torch.sin, arb_series.sin),
    "cos": Primitive(torch.cos, arb_series.cos),
    "tan": Primitive(torch.tan, arb_series.tan),
    "erf": Primitive(torch.erf, arb_series.erf, _erf_plus, opposite(_erf_plus)),
    "erfc": Primitive(torch.erfc, arb_series.erfc, _erfc_plus, _erfc_minus),
}

__all__ = ["PRIMITIVES", "Primitive", "Series"]
