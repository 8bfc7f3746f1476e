r"""The elementary functions: one entry of :data:`PRIMITIVES` each.

Only exp, log and powers have a rule of their own at infinity (:mod:`surefoot.scalar.tails`); the others are
rewritten in terms of these, e.g. for :math:`u \to \infty`

.. math:: \sigma(u) = 1 / (1 + e^{-u}), \qquad \operatorname{softplus}(u) = u + \log(1 + e^{-u}).

Several are given by their value and their derivative: the Taylor series of :math:`g(u)` is the integral of
that of :math:`g'(u) u'`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from flint import arb, arb_series

from surefoot.scalar import recurrences as taylor
from surefoot.scalar.tails import LENGTH, Scale, TailSeries, hull

Series: TypeAlias = Any  # arb_series on a ball, TailSeries on a half line; both have the same arithmetic


def unknown(like: Series) -> Series:
    """A series of which nothing is known."""
    return like.unknown() if isinstance(like, TailSeries) else arb_series([arb("nan")] * LENGTH, prec=LENGTH)


def is_undefined(u: Series) -> bool:
    """Whether the value is not a number, which is more than to be unbounded."""
    return (u[0].ball if isinstance(u, TailSeries) else u[0]).is_nan()


@dataclass(frozen=True)
class Primitive:
    """An elementary function of ``arity`` arguments (and its parameters), on tensors and on power series of balls.

    ``series`` is the recurrence of its Taylor coefficients on tensors (:mod:`surefoot.scalar.recurrences`);
    ``plus`` and ``minus`` enclose it on tail series that tend to infinity; without them nothing is known there.
    """

    tensor: Callable[..., torch.Tensor]
    ball: Callable[..., Any]
    series: taylor.Rule
    plus: Callable[..., TailSeries] | None = None
    minus: Callable[..., TailSeries] | None = None
    arity: int = 1

    def enclose(self, *arguments: Series) -> Series:
        """The function of one or two series (and its parameters); unknown where its value is not a number."""
        first = arguments[0]
        tail = self.arity == 1 and isinstance(first, TailSeries)
        rule = {1: self.plus, -1: self.minus}.get(first.direction) if tail else self.ball
        result = rule(*arguments) if rule else first.bounded(lambda u: self.ball(u, *arguments[1:]))
        return unknown(first) if is_undefined(result) else result


def integrate(value: Callable[[arb], arb], derivative: Callable[[Series], Series]) -> Callable[[Any], Any]:
    """The function with that value on balls and that derivative on series."""

    def series(u: arb_series) -> arb_series:
        return (derivative(u) * u.derivative()).integral() + value(u[0])

    return series


def opposite(rule: Callable[[TailSeries], TailSeries]) -> Callable[[TailSeries], TailSeries]:
    """The rule of an odd function at minus infinity from that at plus infinity."""
    return lambda u: -rule(-u)


def multiply(a: Series, b: Series) -> Series:
    """a * b; not a number where a or b is not, which the zero series would hide."""
    return unknown(a) if is_undefined(a) or is_undefined(b) else a * b


def divide(a: Series, b: Series) -> Series:
    """a / b; not a number where b may be zero."""
    undefined = is_undefined(a) or is_undefined(b) or (not isinstance(b, TailSeries) and b[0].contains(0))
    return unknown(a) if undefined else a / b


def invert(u: Series) -> Series:
    """1 / u; not a number where u may be zero."""
    return divide(u * 0 + 1, u)


def sigmoid(u: Series) -> Series:
    """1 / (1 + exp(-u)); at minus infinity exp(u) / (1 + exp(u)), which keeps the decay."""
    if isinstance(u, TailSeries) and u.direction < 0:
        growing = u.exp()
        return growing / (1 + growing)
    if _is_wide(u):
        return arb_series(_sigmoid_wide(u)[0], prec=LENGTH)
    return invert(1 + (-u).exp())


def _is_wide(u: Series) -> bool:
    """Whether 1 / (1 + exp(-u)) would suffer from cancellation, the more so the higher the order, or overflow."""
    return not isinstance(u, TailSeries) and (u[0].rad() > 0.01 or abs(u[0]) > 1e6)


def _sigmoid_wide(u: arb_series) -> tuple[list[arb], list[arb]]:
    """The coefficients of y = sigmoid(u) and of w = y (1 - y), from y' = w u'.

    The values of y and of 1 - y = sigmoid(-u) are monotone in u. With them, the coefficients of w are
    w_m = (1 - 2 y_0) y_m - sum over j = 1, …, m - 1 of y_j y_(m - j).
    """
    (least, rest), (most, remainder) = _sigmoid_pair(u[0].lower()), _sigmoid_pair(u[0].upper())
    y, other = [hull(least, most)], hull(remainder, rest)
    w, bend = [y[0] * other], other - y[0]
    slope = [(order, u[order] * order) for order in range(1, LENGTH) if not u[order].is_zero()]
    for m in range(1, LENGTH):
        y.append(sum((w[m - order] * factor for order, factor in slope if order <= m), arb(0)) / m)
        twice = sum((y[j] * y[m - j] for j in range(1, (m + 1) // 2)), arb(0)) * 2
        w.append(bend * y[m] - twice - (y[m // 2] ** 2 if m % 2 == 0 else 0))
    return y, w


def _sigmoid_pair(v: arb) -> tuple[arb, arb]:
    """sigmoid(v) and sigmoid(-v), at a number."""
    decaying = (-abs(v)).exp()
    large = 1 / (1 + decaying)
    small = decaying * large
    return (small, large) if v < 0 else (large, small)


def _sigmoid_slope(u: Series) -> Series:
    if _is_wide(u):
        return arb_series(_sigmoid_wide(u)[1], prec=LENGTH)
    return sigmoid(u) * sigmoid(-u)


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
        return unknown(u) if exponent < 0 and u[0].contains(0) else u ** arb(exponent)
    result = u ** abs(int(exponent)) if exponent else u * 0 + 1
    return result if exponent >= 0 else invert(result)


def _erfc_plus(u: TailSeries) -> TailSeries:
    """0 <= erfc(u) <= exp(-u^2) for u >= 0; the derivative is -2 / sqrt(pi) exp(-u^2)."""
    gauss = (-(u * u)).exp()
    slope = gauss * u.derivative() * (-2 / arb.pi().sqrt())
    return slope.integral(gauss[0].times(hull(arb(0), arb(1))))


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
    """By torch.logaddexp the second derivative would be NaN far left; from 40 on it is u but for round-off."""
    return torch.nn.functional.softplus(u, threshold=40.0)


PRIMITIVES: dict[str, Primitive] = {
    "add": Primitive(torch.add, operator.add, taylor.add, arity=2),
    "sub": Primitive(torch.sub, operator.sub, partial(taylor.add, sign=-1.0), arity=2),
    "mul": Primitive(torch.mul, multiply, taylor.multiply, arity=2),
    "div": Primitive(torch.div, divide, taylor.divide, arity=2),
    "neg": Primitive(torch.neg, operator.neg, taylor.negate, operator.neg, operator.neg),
    "pow": Primitive(torch.pow, _power, taylor.power, _power, _power),
    "reciprocal": Primitive(torch.reciprocal, invert, taylor.invert, invert, invert),
    "sqrt": Primitive(torch.sqrt, arb_series.sqrt, taylor.root, lambda u: u.power(0.5)),
    "rsqrt": Primitive(torch.rsqrt, arb_series.rsqrt, partial(taylor.power, exponent=-0.5),
                       lambda u: u.power(-0.5)),
    "exp": Primitive(torch.exp, arb_series.exp, taylor.exponential, TailSeries.exp, TailSeries.exp),
    "expm1": Primitive(torch.expm1, integrate(arb.expm1, arb_series.exp), taylor.exponential_minus_one,
                       lambda u: u.exp() - 1, lambda u: u.exp() - 1),
    "log": Primitive(torch.log, arb_series.log, lambda c, p: taylor.logarithmic(c, p, p), TailSeries.log),
    "log1p": Primitive(torch.log1p, integrate(arb.log1p, lambda u: invert(1 + u)), taylor.logarithm_of_one_plus,
                       lambda u: (1 + u).log()),
    "sigmoid": Primitive(torch.sigmoid, sigmoid, taylor.logistic, sigmoid, sigmoid),
    "softplus": Primitive(_softplus, integrate(_softplus_value, sigmoid), taylor.soft_plus,
                          lambda u: u + PRIMITIVES["log1p"].enclose((-u).exp()),
                          lambda u: PRIMITIVES["log1p"].enclose(u.exp())),
    "tanh": Primitive(torch.tanh, integrate(arb.tanh, lambda u: 4 * _sigmoid_slope(2 * u)),
                      taylor.hyperbolic_tangent, _tanh_plus, opposite(_tanh_plus)),
    "sinh": Primitive(torch.sinh, integrate(arb.sinh, lambda u: (u.exp() + (-u).exp()) / 2),
                      partial(taylor.oscillation, partner=torch.cosh, sign=1.0, back=1.0)),
    "cosh": Primitive(torch.cosh, integrate(arb.cosh, lambda u: (u.exp() - (-u).exp()) / 2),
                      partial(taylor.oscillation, partner=torch.sinh, sign=1.0, back=1.0)),
    "asinh": Primitive(torch.asinh, integrate(arb.asinh, lambda u: (1 + u * u).rsqrt()),
                       taylor.inverse_hyperbolic_sine, _asinh_plus, opposite(_asinh_plus)),
    "atan": Primitive(torch.atan, arb_series.atan, taylor.arc_tangent, _atan_plus, opposite(_atan_plus)),
    "sin": Primitive(torch.sin, arb_series.sin,
                     partial(taylor.oscillation, partner=torch.cos, sign=1.0, back=-1.0)),
    "cos": Primitive(torch.cos, arb_series.cos,
                     partial(taylor.oscillation, partner=torch.sin, sign=-1.0, back=1.0)),
    "tan": Primitive(torch.tan, arb_series.tan, taylor.tangent),
    "erf": Primitive(torch.erf, arb_series.erf, taylor.error_function, lambda u: 1 - _erfc_plus(u),
                     lambda u: _erfc_plus(-u) - 1),
    "erfc": Primitive(torch.erfc, arb_series.erfc, partial(taylor.error_function, sign=-1.0), _erfc_plus,
                      lambda u: 2 - _erfc_plus(-u)),
}  # fmt: skip
