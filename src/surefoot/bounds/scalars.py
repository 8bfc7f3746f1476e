r"""The ranges of scalar functions and of all their derivatives, over as many intervals as a tensor has entries.

A function is put together from *pieces* between its kinks, each one

.. math:: a\,g(sx + t), \qquad \text{with derivatives } a s^k g^{(k)}(sx + t),

of a smooth *curve* g. Of a curve two things are written down: how its k-th derivative is computed, with a bound of
the error of computing it, and from where on it is monotone. Between two turning points of :math:`g^{(k)}`, which
are the zeros of :math:`g^{(k+1)}`, it is monotone, so over an interval it is between its values at the ends and at
the turning points inside. The turning points are computed once (sign changes on a grid, then bisection); that
these are all is proved in the tests by ball arithmetic. A turning point c that is computed as c' is off by
:math:`10^{-13}` at most; the range may miss :math:`|g^{(k)}(c) - g^{(k)}(c')| \le \frac12|c -
c'|^2\sup|g^{(k+2)}|`, which the error bounds cover many times over.

Kinks. If :math:`f, …, f^{(m-1)}` are continuous at a kink, its *smoothness* is m: then :math:`f^{(k)}` for
:math:`k \le m` is bounded by its one-sided values (it is the slope of a Lipschitz function), and for k > m there
is no bound where the interval meets the kink.

Round-off. The elementary functions of torch are taken to be within 8 units of the last place, u = 2^-53.
Polynomials and products of theirs are off by at most :math:`64u` times the same computed on absolute values: 64 is
more than the number of operations in any of them for k ≤ 6. Results below 1e-300 may have been flushed to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.program.scalars import Scalar

HIGHEST_ORDER = 6  # of derivatives
_UNIT = 2.0**-53
_ERROR = 64 * _UNIT  # of a computed derivative, relative to its terms
_TINY = 1e-300
_FAR = 2000.0  # beyond, what is not a polynomial is 0 or 1 to more than 1e-300
_INF = math.inf


Computed = tuple[Tensor, Tensor]  # numbers, and how far they may be from exact


class Curve(NamedTuple):
    """A smooth function: its k-th derivative at x, and an interval that has all turning points of all of them."""

    derivative: Callable[[Tensor, int], Computed]
    spread: tuple[float, float] = (0.0, 0.0)


class Piece(NamedTuple):
    """factor · curve(scale · x + shift)."""

    curve: str
    factor: float = 1.0
    scale: float = 1.0
    shift: float = 0.0


class Pieces(NamedTuple):
    """A function by its pieces, from left to right, and its kinks between them with their smoothness."""

    pieces: tuple[Piece, ...]
    kinks: tuple[tuple[float, int], ...] = ()
    domain: float = -_INF  # the function is defined on [domain, ∞)


# Polynomials: integer coefficients, the constant one first.


def _value(coefficients: tuple[int, ...], x: Tensor) -> Computed:
    """A polynomial by Horner's rule, and the same on absolute values."""
    value, size, distance = torch.zeros_like(x), torch.zeros_like(x), x.abs()
    for number in reversed(coefficients):
        value, size = value * x + number, size * distance + abs(number)
    return value, size


def _product(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    out = [0] * (len(a) + len(b) - 1)
    for i, p in enumerate(a):
        for j, q in enumerate(b):
            out[i + j] += p * q
    return tuple(out)


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    width = max(len(a), len(b))
    return tuple(p + q for p, q in zip(a + (0,) * (width - len(a)), b + (0,) * (width - len(b)), strict=True))


def _slope(a: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(k * p for k, p in enumerate(a))[1:] or (0,)


# Curves. Each returns values and the sizes that, times _ERROR, bound the errors.


@cache
def _logistic_factors(order: int) -> tuple[int, ...]:
    r"""With s the logistic function, v = s(1 - s) and d = 1 - 2s: the polynomial p with :math:`s^{(k)} = v\,p(v)`
    for odd k and :math:`v\,d\,p(v)` for even k. From v' = vd, d' = -2v, d² = 1 - 4v.
    """
    if order == 1:
        return (1,)
    if order % 2 == 0:  # (v p)' = v d (p + v p')
        before = _logistic_factors(order - 1)
        return _sum(before, (0, *_slope(before)))
    before = _logistic_factors(order - 1)  # (v d p)' = v ((1 - 4v)(p + v p') - 2v p)
    return _sum(_product((1, -4), _sum(before, (0, *_slope(before)))), (0, *(-2 * p for p in before)))


def _logistic(x: Tensor, order: int) -> Computed:
    """1/(1 + exp(-x)). All derivatives carry v = s(1 - s) as a factor, also where the unit is saturated."""
    if order == 0:
        return torch.sigmoid(x), torch.sigmoid(x)
    s = torch.sigmoid(x)
    v = s * torch.sigmoid(-x)
    value, size = _value(_logistic_factors(order), v)
    return (v * value, v * size) if order % 2 else (-v * torch.tanh(x / 2) * value, v * size)


def _softplus(x: Tensor, order: int) -> Computed:
    if order > 0:
        return _logistic(x, order - 1)
    value = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return value, value


def _tanh(x: Tensor, order: int) -> Computed:
    """2 s(2x) - 1, s the logistic function."""
    if order == 0:
        return torch.tanh(x), torch.tanh(x).abs()
    value, size = _logistic(2 * x, order)
    return 2.0 ** (order + 1) * value, 2.0 ** (order + 1) * size


@cache
def _bell_factors(start: tuple[int, ...], twice: int, order: int) -> tuple[int, ...]:
    """The polynomial before exp(-twice·x²/2) after that many derivatives."""
    if order == 0:
        return start
    before = _bell_factors(start, twice, order - 1)
    return _sum(_slope(before), (0, *(-twice * p for p in before)))


def _bell(start: tuple[int, ...], twice: int, factor: float, x: Tensor, order: int) -> Computed:
    """Derivatives of factor · start(x) · exp(-twice·x²/2); beyond 60 they are below 1e-300."""
    x = x.clamp(-60.0, 60.0)
    value, size = _value(_bell_factors(start, twice, order), x)
    bell = factor * torch.exp(-twice / 2 * x.square())
    return bell * value, bell * size * (1 + x.square())  # exp of what is off by a few u·x²


def _erf(x: Tensor, order: int) -> Computed:
    if order == 0:
        return torch.erf(x), torch.erf(x).abs()
    return _bell((1,), 2, 2 / math.sqrt(math.pi), x, order - 1)


def _gelu(x: Tensor, order: int) -> Computed:
    """xΦ(x), with xΦ(x) = x - xΦ(-x) = max(x, 0) - |x| erfc(|x|/√2)/2 and (xΦ)'' = (2 - x²)φ(x)."""
    if order >= 2:
        return _bell((2, 0, -1), 1, 1 / math.sqrt(2 * math.pi), x, order - 2)
    near = x.abs().clamp(max=60.0)
    tail = torch.erfc(near * math.sqrt(0.5)) / 2  # relative errors grow as those of exp(-x²/2)
    size = tail * (1 + near.square())
    if order == 0:
        return x.clamp(min=0) - near * tail, x.clamp(min=0) + near * size
    density = near * torch.exp(-near.square() / 2) / math.sqrt(2 * math.pi)
    negative = tail - density  # the slope at -|x|; at |x| it is one less this
    return torch.where(x > 0, 1 - negative, negative), (x > 0) + size + density * (1 + near.square())


def _gated(gate: Callable[[Tensor], list[Computed]], x: Tensor, order: int) -> Computed:
    r"""Derivatives of x s(w(x)), s the logistic function; for w > 0 of x - x s(-w), so that no digits cancel.

    Taylor coefficients s_n of s(w) follow from s' = s(1 - s) w': n s_n = Σ_j j w_j (s - s·s)_{n-j}.
    """
    near = x.clamp(-_FAR, _FAR)
    w = gate(near)
    above = w[0][0] > 0
    sign = torch.where(above, -1.0, 1.0).to(x)
    first = torch.sigmoid(-w[0][0].abs())
    s, size = [first], [first]
    for n in range(1, order + 1):
        slope, slope_size = torch.zeros_like(first), torch.zeros_like(first)
        for j in range(1, n + 1):
            m = n - j
            c = s[m] - sum(s[i] * s[m - i] for i in range(m + 1))
            c_size = size[m] + sum(size[i] * size[m - i] for i in range(m + 1))
            if m == 0:
                c = first * torch.sigmoid(w[0][0].abs())
            slope, slope_size = slope + j * sign * w[j][0] * c, slope_size + j * w[j][1] * c_size
        s.append(slope / n)
        size.append(slope_size / n)
    value, total = near * s[order], near.abs() * size[order]
    if order > 0:
        value, total = value + s[order - 1], total + size[order - 1]
    total = total * (
        1 + w[0][1]
    )  # the argument of s is off by some u·|w|, so every factor s relatively by as much
    factorial = math.factorial(order)
    value, total = factorial * value.nan_to_num(0.0), factorial * total.nan_to_num(0.0)
    plain = x if order == 0 else torch.ones_like(x) if order == 1 else torch.zeros_like(x)
    return torch.where(above, plain - value, value), torch.where(above, plain.abs(), 0.0) + total


def _silu_gate(x: Tensor) -> list[Computed]:
    zero = torch.zeros_like(x)
    return [(x, x.abs()), (zero + 1, zero + 1), *[(zero, zero)] * HIGHEST_ORDER]


def _gelu_tanh_gate(x: Tensor) -> list[Computed]:
    """2√(2/π)(x + 0.044715x³)."""
    zero, c, a = torch.zeros_like(x), 2 * math.sqrt(2 / math.pi), 0.044715
    terms = [x + a * x**3, 1 + 3 * a * x.square(), 3 * a * x, zero + a, *[zero] * HIGHEST_ORDER]
    return [(c * term, c * term.abs()) for term in terms]


def _mish_gate(x: Tensor) -> list[Computed]:
    """tanh(log(1 + e^x)) = s(x + log(1 + e^x/2)), so w' = 1 + s(x - log 2)."""
    shifted = x - math.log(2.0)
    terms = [(x + _softplus(shifted, 0)[0], x.abs() + _softplus(shifted, 0)[0])]
    for order in range(1, HIGHEST_ORDER + 2):
        value, size = _softplus(shifted, order)
        one, factorial = int(order == 1), math.factorial(order)
        terms.append(((value + one) / factorial, (size + one) / factorial))
    return terms


def _exp(x: Tensor, order: int) -> Computed:
    return torch.exp(x), torch.exp(x)


def _expm1(x: Tensor, order: int) -> Computed:
    return (torch.expm1(x), torch.expm1(x).abs()) if order == 0 else _exp(x, order)


def _sinh(x: Tensor, order: int) -> Computed:
    value = torch.cosh(x) if order % 2 else torch.sinh(x)
    return value, value.abs()


def _sin(x: Tensor, order: int) -> Computed:
    value = (torch.sin, torch.cos, lambda t: -torch.sin(t), lambda t: -torch.cos(t))[order % 4](x)
    return value, torch.ones_like(x)


@cache
def _rational_factors(twice: int, order: int) -> tuple[int, ...]:
    """The polynomial before (1 + x²)^(-twice/2 - order) after that many derivatives of (1 + x²)^(-twice/2)."""
    if order == 0:
        return (1,)
    before = _rational_factors(twice, order - 1)
    grown = (0, *(-(twice + 2 * (order - 1)) * p for p in before))
    return _sum(_product((1, 0, 1), _slope(before)), grown)


def _rational(whole: Callable[[Tensor], Tensor], twice: int, x: Tensor, order: int) -> Computed:
    """A function with the slope (1 + x²)^(-twice/2): the arc tangent (2), the inverse of sinh (1)."""
    if order == 0:
        return whole(x), whole(x).abs()
    near = x.clamp(-1e15, 1e15)
    value, size = _value(_rational_factors(twice, order - 1), near)
    weight = (1 + near.square()) ** -(twice / 2 + order - 1)
    # beyond 1e15 every derivative is between its value there and zero
    return weight * value, weight * size + torch.where(near == x, 0.0, weight * size / _ERROR)


def _power(exponent: float, x: Tensor, order: int) -> Computed:
    """x^exponent on x > 0; whole exponents on the whole line."""
    factor = math.prod(exponent - k for k in range(order))
    if factor == 0:
        return torch.zeros_like(x), torch.zeros_like(x)
    value = factor * x ** (exponent - order)
    return value, value.abs()


def _log(x: Tensor, order: int) -> Computed:
    if order > 0:
        return _power(-1.0, x, order - 1)
    value = torch.log(x)
    return value, value.abs()


def _log1p(x: Tensor, order: int) -> Computed:
    if order > 0:
        return _power(-1.0, 1 + x, order - 1)
    return torch.log1p(x), torch.log1p(x).abs()


def _cos(x: Tensor, order: int) -> Computed:
    return _sin(x, order + 1)


def _cosh(x: Tensor, order: int) -> Computed:
    return _sinh(x, order + 1)


def _hardswish(x: Tensor, order: int) -> Computed:
    """x(x + 3)/6."""
    derivatives = (0, 3, 1), (3, 2), (2,), (0,)
    value, size = _value(derivatives[min(order, 3)], x)
    return value / 6, size / 6


def _softsign(x: Tensor, order: int) -> Computed:
    """x/(1 + x), on x ≥ 0."""
    if order == 0:
        value = x / (1 + x)
        return torch.where(x == _INF, 1.0, value), torch.where(x == _INF, 1.0, value.abs())
    value, size = _power(-1.0, 1 + x, order)
    return -value, size


CURVES: dict[str, Curve] = {
    "exp": Curve(_exp),
    "expm1": Curve(_expm1),
    "sinh": Curve(_sinh, (-1, 1)),
    "log": Curve(_log),
    "log1p": Curve(_log1p),
    "sigmoid": Curve(_logistic, (-12, 12)),
    "softplus": Curve(_softplus, (-12, 12)),
    "tanh": Curve(_tanh, (-6, 6)),
    "erf": Curve(_erf, (-6, 6)),
    "gelu": Curve(_gelu, (-8, 8)),
    "silu": Curve(lambda x, order: _gated(_silu_gate, x, order), (-20, 20)),
    "gelu_tanh": Curve(lambda x, order: _gated(_gelu_tanh_gate, x, order), (-12, 12)),
    "mish": Curve(lambda x, order: _gated(_mish_gate, x, order), (-20, 20)),
    "sin": Curve(_sin),
    "cos": Curve(_cos),
    "cosh": Curve(_cosh, (-1, 1)),
    "hardswish": Curve(_hardswish, (-3, 3)),
    "softsign": Curve(_softsign),
    "atan": Curve(lambda x, order: _rational(torch.atan, 2, x, order), (-8, 8)),
    "arcsinh": Curve(lambda x, order: _rational(torch.asinh, 1, x, order), (-8, 8)),
}


def pieces(name: str, parameters: tuple[float, ...] = ()) -> Pieces:
    """The pieces of a function; the only place that lists scalar functions."""
    zero, one, line = Piece("power:0", 0.0), Piece("power:0"), Piece("power:1")

    def first(default: float) -> float:
        return parameters[0] if parameters else default

    match name:
        case "sqrt" | "rsqrt" | "reciprocal" | "square" | "power":
            exponent = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0}.get(name, first(1.0))
            whole = exponent == int(exponent)
            return Pieces((Piece(f"power:{exponent!r}"),), domain=-_INF if whole else 0.0)
        case "log":
            return Pieces((Piece("log"),), domain=0.0)
        case "log1p":
            return Pieces((Piece("log1p"),), domain=-1.0)
        case "softplus":
            return Pieces((Piece("softplus", 1 / first(1.0), first(1.0)),))
        case "logsigmoid":
            return Pieces((Piece("softplus", -1.0, -1.0),))
        case "relu":
            return Pieces((zero, line), ((0.0, 1),))
        case "abs":
            return Pieces((Piece("power:1", -1.0), line), ((0.0, 1),))
        case "leaky_relu":
            return Pieces((Piece("power:1", first(0.01)), line), ((0.0, 1),))
        case "elu":
            return Pieces((Piece("expm1", first(1.0)), line), ((0.0, 2 if first(1.0) == 1 else 1),))
        case "celu":
            return Pieces((Piece("expm1", first(1.0), 1 / first(1.0)), line), ((0.0, 2),))
        case "selu":
            scale, alpha = 1.0507009873554805, 1.6732632423543772
            return Pieces((Piece("expm1", scale * alpha), Piece("power:1", scale)), ((0.0, 1),))
        case "hardtanh" | "relu6":
            low, high = (0.0, 6.0) if name == "relu6" else (first(-1.0), parameters[1] if parameters[1:] else 1.0)
            below, above = Piece("power:0", low), Piece("power:0", high)
            if low == -_INF or high == _INF:
                return Pieces((line, above), ((high, 1),)) if low == -_INF else Pieces((below, line), ((low, 1),))
            return Pieces((below, line, above), ((low, 1), (high, 1)))
        case "hardsigmoid":
            return Pieces((zero, Piece("power:1", 1.0, 1 / 6, 0.5), one), ((-3.0, 1), (3.0, 1)))
        case "hardswish":
            return Pieces((zero, Piece("hardswish"), line), ((-3.0, 1), (3.0, 1)))
        case "softsign":  # -1 + 1/(1 - x) and 1 - 1/(1 + x)
            return Pieces((Piece("softsign", -1.0, -1.0), Piece("softsign")), ((0.0, 2),))
        case "huber":
            d = first(1.0)
            tails = Piece("power:1", -d, 1.0, d / 2), Piece("power:1", d, 1.0, -d / 2)
            return Pieces((tails[0], Piece("power:2", 0.5), tails[1]), ((-d, 2), (d, 2)))
        case _ if name in CURVES:
            return Pieces((Piece(name),))
    raise NotImplementedError(f"the ranges of the scalar function '{name}' are not in surefoot.bounds.scalars")


def _curve(name: str) -> Curve:
    if name.startswith("power:"):
        exponent = float(name[6:])
        return Curve(lambda x, order: _power(exponent, x, order), (-1.0, 1.0))
    return CURVES[name]


@cache
def turning_points(curve: str, order: int) -> tuple[float, ...]:
    """Where the derivative of that order of a curve turns: the zeros of the next one, but for trigonometric
    curves, powers with their only one at 0, and curves without any.
    """
    low, high = _curve(curve).spread
    if low == high:
        return ()
    if curve.startswith("power:"):
        return (0.0,)
    # an odd number of steps, so that a zero at the origin is not a point of the grid
    grid = torch.linspace(low, high, 40_002, dtype=torch.float64)
    rule = _curve(curve).derivative
    signs = rule(grid, order + 1)[0].sign()
    at = (signs[1:] * signs[:-1] < 0).nonzero().flatten()
    a, b = grid[at], grid[at + 1]
    for _ in range(60):
        middle = (a + b) / 2
        same = rule(middle, order + 1)[0].sign() == signs[at]
        a, b = torch.where(same, middle, a), torch.where(same, b, middle)
    return tuple(((a + b) / 2).tolist())


def _curve_range(name: str, order: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The range of a derivative of a curve over intervals."""
    rule = _curve(name).derivative
    exponent = float(name[6:]) if name.startswith("power:") else None
    polynomial = exponent is not None and exponent >= 0 and exponent == int(exponent)

    def outward(x: Tensor) -> tuple[Tensor, Tensor]:
        value, size = rule(x, order)
        error = torch.where(value.isinf(), 0.0, _ERROR * size + _TINY)
        if polynomial:  # a zero is exactly zero, and so are lines and constants
            error = (
                torch.where(size == 0, 0.0, error)
                if name not in ("power:0", "power:1")
                else torch.zeros_like(size)
            )
        # where a value is not a number nothing is known of it
        return (value - error).nan_to_num(-_INF, _INF, -_INF), (value + error).nan_to_num(_INF, _INF, -_INF)

    ends = [outward(low), outward(high)]
    least, most = torch.minimum(ends[0][0], ends[1][0]), torch.maximum(ends[0][1], ends[1][1])
    if name in ("sin", "cos"):
        return _wave_range(order + (name == "cos"), low, high, least, most)
    if exponent is not None and not polynomial and exponent < order:
        pole = (low <= 0) & (high >= 0)
        return torch.where(pole, -_INF, least), torch.where(pole, _INF, most)
    for point in turning_points(name, order):
        inside = (low <= point) & (high >= point)
        there = outward(torch.tensor(point, dtype=torch.float64, device=low.device))
        least = torch.where(inside, torch.minimum(least, there[0]), least)
        most = torch.where(inside, torch.maximum(most, there[1]), most)
    return least, most


def _wave_range(quarters: int, low: Tensor, high: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """The range of sin(x + quarters·π/2), which is 1 at x = (1 - quarters)π/2 + 2nπ, and -1 half a turn on."""
    slack = _ERROR * (1 + torch.maximum(low.abs(), high.abs()))
    for top in (True, False):
        turns = (torch.stack([low - slack, high + slack]) / math.pi + (quarters - 1) / 2 - int(not top)) / 2
        meets = ~(turns[0].ceil() > turns[1].floor())  # also where the ends are infinite
        most = torch.where(meets, 1.0, most) if top else most
        least = least if top else torch.where(meets, -1.0, least)
    return least.clamp(min=-1.0), most.clamp(max=1.0)


@torch.no_grad()
def enclose(function: Scalar, order: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The range of a derivative of a function over intervals, rounded outwards.

    Args:
        function: A scalar function of a program; if it is itself a derivative, its order counts as well.
        order: Which derivative of it: 0 for the function itself.
        low: Left ends, in double precision; they may be infinite.
        high: Right ends, not less.

    Returns:
        Lower and upper ends of the ranges. They are infinite where the function has a kink or a pole in the
        interval such that there is no bound, where it is not defined on all of the interval, and where an end is
        not a number.
    """
    total = function.order + order
    if total > HIGHEST_ORDER:
        raise ValueError(
            f"the derivative of order {total} of '{function.name}' was asked for; ranges go up to {HIGHEST_ORDER}"
        )
    parts = pieces(function.name, tuple(function.parameters))
    edges = [-_INF, *(kink for kink, _ in parts.kinks), _INF]
    least, most = torch.full_like(low, _INF), torch.full_like(low, -_INF)
    for piece, left, right in zip(parts.pieces, edges, edges[1:], strict=False):
        met = (low <= right) & (high >= left)
        if len(parts.pieces) > 1 and not bool(met.any()):
            continue
        a, b = _moved(piece, low.clamp(left, right)), _moved(piece, high.clamp(left, right))
        if piece.scale < 0:
            a, b = b, a
        bottom, top = _curve_range(piece.curve, total, a[0], b[1])
        factor = piece.factor * piece.scale**total
        if factor == 0:
            bottom, top = torch.zeros_like(low), torch.zeros_like(low)
        elif factor != 1:
            scaled = torch.stack([bottom, top]) * factor
            reach = scaled.abs() * (8 * _UNIT)
            bottom, top = (scaled - reach).amin(0), (scaled + reach).amax(0)
        least = torch.where(met, torch.minimum(least, bottom), least)
        most = torch.where(met, torch.maximum(most, top), most)
    unknown = ~(low <= high) | (low < parts.domain)
    for kink, smoothness in parts.kinks:
        if total > smoothness:
            unknown = unknown | ((low <= kink) & (high >= kink))
    least, most = least.nan_to_num(-_INF, _INF, -_INF), most.nan_to_num(_INF, _INF, -_INF)
    return torch.where(unknown, -_INF, least), torch.where(unknown, _INF, most)


def _moved(piece: Piece, x: Tensor) -> tuple[Tensor, Tensor]:
    """scale · x + shift, rounded down and up."""
    if piece.scale == 1 and piece.shift == 0:
        return x, x
    value = piece.scale * x + piece.shift
    error = torch.where(value.isinf(), 0.0, 4 * _UNIT * ((piece.scale * x).abs() + abs(piece.shift)))
    return value - error, value + error


def bounds(function: Scalar, order: int, low: Tensor, high: Tensor) -> Tensor:
    """Upper bounds of the absolute value of a derivative over intervals."""
    least, most = enclose(function, order, low, high)
    return torch.maximum(-least, most)
