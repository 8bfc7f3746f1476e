r"""Taylor coefficients of the elementary functions on tensors: one recurrence per kind of function.

Let :math:`p(\eta) = \sum_j p_j \eta^j` and :math:`c(\eta) = g(p(\eta))`. A function of which the derivative is
:math:`g'(p) = s` satisfies :math:`c' = s\,p'`; comparing the coefficients of :math:`\eta^{m-1}`,

.. math:: m\,c_m = \sum_{j=1}^m j\,p_j\,s_{m-j},

so that :math:`c_m` follows from :math:`s_0, …, s_{m-1}`, and these from :math:`c_0, …, c_{m-1}` by the
differential equation of g, e.g. s = c for the exponential (Griewank and Walther, Evaluating Derivatives,
chapter 13). A rule of this file takes the value :math:`c_0` and the coefficients of the arguments, and returns
those of the result.

A coefficient is a tensor, a number (the same for every entry) or None, which is zero; terms with None are
skipped, and a result that has no other terms is None. Where the first coefficient is a
:class:`~surefoot.scalar.rounded.Rounded` tensor so are all that are not zero, and the recurrences carry bounds of
their errors: they are identities of real numbers, made of sums, products, quotients and elementary functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surefoot.scalar.rounded import Rounded

Coefficient: TypeAlias = Tensor | Rounded | float | None
Coefficients: TypeAlias = list[Coefficient]
Term: TypeAlias = tuple[float, Coefficient, Coefficient]
Rule: TypeAlias = Callable[..., Coefficients]
_EXACT = (1.0, -1.0)
Function: TypeAlias = Callable[[Tensor], Tensor]


def combine(terms: Iterable[Term]) -> Coefficient:
    """The sum of weight * a * b over the terms (weight, a, b), in one tensor operation per term.

    Weights are numbers off by at most a relative 2u.
    """
    present: list[tuple[float, Any, Any]] = [term for term in terms if term[1] is not None and term[2] is not None]
    if any(isinstance(factor, Rounded) for term in present for factor in term[1:]):
        return _combined(present)
    number = 0.0
    total: Tensor | None = None
    fresh = False  # whether the total may be overwritten
    for weight, a, b in present:
        if not isinstance(b, Tensor):
            a, b = b, a
        if not isinstance(b, Tensor):
            number += weight * float(a) * b
        elif isinstance(a, Tensor):
            if total is None:
                total = a * b if weight == 1 else torch.addcmul(a.new_zeros(()), a, b, value=weight)
            else:
                total = (total.addcmul_ if fresh else total.addcmul)(a, b, value=weight)
            fresh = True
        else:
            factor = weight * a
            if total is None:
                total, fresh = (b, False) if factor == 1 else (b * factor, True)
            else:
                total, fresh = (total.add_ if fresh else total.add)(b, alpha=factor), True
    if total is None:
        return number or None
    return total + number if number else total


def _combined(terms: Iterable[tuple[float, Any, Any]]) -> Rounded:
    """The sum with errors; numbers among the factors are exact."""
    total: Rounded | None = None
    for weight, a, b in terms:
        product = a * b if isinstance(a, Rounded) else b * a
        part = product if weight in _EXACT else product.scaled(weight)
        part = -part if weight == -1 else part
        total = part if total is None else total + part
    assert total is not None
    return total


def chain(slope: Coefficients, p: Coefficients, order: int, sign: float = 1.0) -> Coefficient:
    """The coefficient of that order of the function with the derivative sign * slope * p'."""
    return combine((sign * j / order, p[j], slope[order - j]) for j in range(order, 0, -1))


def symmetric(a: Coefficients, order: int, first: int = 0, sign: float = 1.0) -> list[Term]:
    """The terms of sign * sum of a_i a_(order - i) over i = first, …, order - first."""
    return [(sign if 2 * i == order else 2 * sign, a[i], a[order - i]) for i in range(first, order // 2 + 1)]


def over(numerator: Coefficient, denominator: Coefficient) -> Coefficient:
    """The quotient."""
    return None if numerator is None or denominator is None else numerator / denominator


def add(value: Coefficient, a: Coefficients, b: Coefficients, sign: float = 1.0) -> Coefficients:
    """The coefficients of a + sign * b."""
    return [value, *(combine([(1.0, x, 1.0), (sign, y, 1.0)]) for x, y in zip(a[1:], b[1:], strict=True))]


def negate(value: Coefficient, a: Coefficients) -> Coefficients:
    """The coefficients of -a."""
    return [value, *(combine([(-1.0, x, 1.0)]) for x in a[1:])]


def multiply(value: Coefficient, a: Coefficients, b: Coefficients) -> Coefficients:
    """The coefficients of a * b; half of the products if the factors are the same."""
    if a is b:
        return [value, *(combine(symmetric(a, m)) for m in range(1, len(a)))]
    return [value, *(combine((1.0, a[j], b[m - j]) for j in range(m + 1)) for m in range(1, len(a)))]


def divide(value: Coefficient, a: Coefficients, b: Coefficients) -> Coefficients:
    """q b = a, so q_m b_0 = a_m - sum over j >= 1 of b_j q_(m - j)."""
    q = [value]
    for m in range(1, len(a)):
        rest = [(-1.0, b[j], q[m - j]) for j in range(1, m + 1)]
        q.append(over(combine([(1.0, a[m], 1.0), *rest]), b[0]))
    return q


def invert(value: Coefficient, p: Coefficients) -> Coefficients:
    """The coefficients of 1 / p."""
    return divide(value, [1.0, *[None] * (len(p) - 1)], p)


def power(value: Coefficient, p: Coefficients, exponent: float) -> Coefficients:
    """c = p^e satisfies p c' = e p' c, so m p_0 c_m = sum over j >= 1 of (j e - m + j) p_j c_(m - j).

    Natural powers are products, so that p_0 may be zero.
    """
    if float(exponent).is_integer() and exponent >= 0:
        return [value, *_natural_power(p, int(exponent))[1:]]
    c = [value]
    for m in range(1, len(p)):
        weights = {j: float((j * Fraction(exponent) + j - m) / m) for j in range(1, m + 1)}
        terms = ((weight, p[j], c[m - j]) for j, weight in weights.items())
        c.append(over(combine(terms), p[0]))
    return c


def _natural_power(p: Coefficients, exponent: int) -> Coefficients:
    """A power by squaring: p^(2 n) = (p^n)^2 and p^(2 n + 1) = p p^(2 n)."""
    if exponent < 2:
        return p if exponent else [1.0, *[None] * (len(p) - 1)]
    half = _natural_power(p, exponent // 2)
    square = multiply(combine([(1.0, half[0], half[0])]), half, half)
    return multiply(combine([(1.0, p[0], square[0])]), p, square) if exponent % 2 else square


def root(value: Coefficient, p: Coefficients) -> Coefficients:
    """c^2 = p, so 2 c_0 c_m = p_m - sum over j = 1, …, m - 1 of c_j c_(m - j)."""
    c, double = [value], combine([(2.0, value, 1.0)])
    for m in range(1, len(p)):
        c.append(over(combine([(1.0, p[m], 1.0), *symmetric(c, m, 1, -1.0)]), double))
    return c


def exponential(value: Coefficient, p: Coefficients, sign: float = 1.0) -> Coefficients:
    """c' = sign * c p': a multiple of exp(sign * p)."""
    c = [value]
    for m in range(1, len(p)):
        c.append(chain(c, p, m, sign))
    return c


def exponential_minus_one(value: Coefficient, p: Coefficients) -> Coefficients:
    """The exponential but for its value, which is small where p is."""
    return [value, *exponential(torch.exp(tensor(p[0])), p)[1:]]


def logarithmic(value: Coefficient, p: Coefficients, base: Coefficients) -> Coefficients:
    """c' base = p', so m base_0 c_m = m p_m - sum over j = 1, …, m - 1 of j c_j base_(m - j)."""
    c = [value]
    for m in range(1, len(p)):
        rest = ((-j / m, c[j], base[m - j]) for j in range(m - 1, 0, -1))
        c.append(over(combine([(1.0, p[m], 1.0), *rest]), base[0]))
    return c


def logarithm_of_one_plus(value: Coefficient, p: Coefficients) -> Coefficients:
    """c' (1 + p) = p'."""
    return logarithmic(value, p, [tensor(p[0]) + 1.0, *p[1:]])


def arc_tangent(value: Coefficient, p: Coefficients) -> Coefficients:
    """c' (1 + p^2) = p'."""
    return logarithmic(value, p, _one_plus_square(p[:-1]))


def inverse_hyperbolic_sine(value: Coefficient, p: Coefficients) -> Coefficients:
    """c' (1 + p^2)^(1/2) = p'."""
    base = _one_plus_square(p[:-1])
    return logarithmic(value, p, root(torch.sqrt(tensor(base[0])), base))


def _one_plus_square(p: Coefficients) -> Coefficients:
    return multiply(torch.square(tensor(p[0])) + 1.0, p, p)


def riccati(value: Coefficient, p: Coefficients, slope: Tensor, bend: Tensor, square: float) -> Coefficients:
    """c' = w p' with w = slope + bend (c - c_0) + square (c - c_0)^2.

    Written around c_0, the quadratic function of c does not cancel where c is close to one of its zeros: there
    the slope is small and given.
    """
    c: Coefficients = [value]
    w: Coefficients = [slope]
    for m in range(1, len(p)):
        c.append(chain(w, p, m))
        w.append(combine([(1.0, bend, c[m]), *symmetric(c, m, 1, square)]) if m + 1 < len(p) else None)
    return c


def logistic(value: Coefficient, p: Coefficients) -> Coefficients:
    """c' = c (1 - c) p', where 1 - c_0 is the value at -p_0."""
    if len(p) == 1:
        return [value]
    first, other = tensor(value), torch.sigmoid(-tensor(p[0]))
    return riccati(value, p, first * other, other - first, -1.0)


def soft_plus(value: Coefficient, p: Coefficients) -> Coefficients:
    """c' is the logistic function of p."""
    return integral(value, p, logistic(torch.sigmoid(tensor(p[0])), p[:-1]))


def hyperbolic_tangent(value: Coefficient, p: Coefficients) -> Coefficients:
    """c' = (1 - c^2) p', where 1 - c_0^2 = cosh(p_0)^(-2) = 4 σ(2 p_0) σ(-2 p_0)."""
    first = tensor(p[0])
    if isinstance(first, Tensor):
        slope = first.cosh().reciprocal().square()
    else:  # which does not overflow
        slope = torch.sigmoid(first * 2.0) * torch.sigmoid(first * -2.0) * 4.0
    return riccati(value, p, slope, tensor(value) * -2.0, -1.0)


def tangent(value: Coefficient, p: Coefficients) -> Coefficients:
    """c' = (1 + c^2) p'."""
    first = tensor(value)
    return riccati(value, p, torch.square(first) + 1.0, first * 2.0, 1.0)


def integral(value: Coefficient, p: Coefficients, slope: Coefficients) -> Coefficients:
    """c' = slope * p'; the slope has one coefficient fewer."""
    return [value, *(chain(slope, p, m) for m in range(1, len(p)))]


def oscillation(value: Coefficient, p: Coefficients, partner: Function, sign: float, back: float) -> Coefficients:
    """c' = sign * d p' and d' = back * c p' with d_0 = partner(p_0): sines and cosines, of either kind."""
    c: Coefficients = [value]
    d: Coefficients = [partner(tensor(p[0]))]
    for m in range(1, len(p)):
        c.append(chain(d, p, m, sign))
        d.append(chain(c, p, m, back) if m + 1 < len(p) else None)
    return c


def error_function(value: Coefficient, p: Coefficients, sign: float = 1.0) -> Coefficients:
    """c' = sign * 2 / sqrt(pi) * exp(-p^2) p'."""
    inner = p[:-1]
    square = multiply(torch.square(tensor(p[0])), inner, inner)
    gauss: Any = torch.exp(-tensor(square[0])) * (sign * 2.0 / math.sqrt(math.pi))
    if isinstance(gauss, Rounded):  # the factor is rounded, too
        gauss = gauss.scaled(1.0)
    return integral(value, p, exponential(gauss, square, -1.0))


def tensor(value: Coefficient) -> Any:
    """The value of something that is not constant: a tensor, perhaps with errors."""
    assert isinstance(value, Tensor | Rounded)
    return value
