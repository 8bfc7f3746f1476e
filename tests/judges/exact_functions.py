"""Scalar functions of torch with two derivatives, as real functions, without cancellation where that is known.

At a break the derivatives are those from the right; a ball that contains a break is :class:`Undecided`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flint import arb

from judges.exact_numbers import ONE, ZERO, Derivatives, Undecided, exactly, natural_power

Function = Callable[[arb], Derivatives]


def at_least(x: arb, threshold: Any) -> bool:
    """Whether x ≥ threshold.

    Raises:
        Undecided: if the ball does not tell.
    """
    if x >= threshold:
        return True
    if x < threshold:
        return False
    raise Undecided("a ball contains a break")


def tanh(x: arb) -> Derivatives:
    y, slope = x.tanh(), natural_power(x.sech(), 2)
    return y, slope, -2 * y * slope


def sigmoid(x: arb) -> Derivatives:
    y, rest = 1 / (1 + (-x).exp()), 1 / (1 + x.exp())
    slope = y * rest
    return y, slope, slope * (rest - y)


def softplus(x: arb) -> Derivatives:
    """log(1 + eˣ)."""
    y, slope, _ = sigmoid(x)
    return x.exp().log1p(), y, slope


def log_sigmoid(x: arb) -> Derivatives:
    """-log(1 + e⁻ˣ)."""
    value, slope, bend = softplus(-x)
    return -value, slope, -bend


def exp(x: arb) -> Derivatives:
    y = x.exp()
    return y, y, y


def expm1(x: arb) -> Derivatives:
    y = x.exp()
    return x.expm1(), y, y


def log(x: arb) -> Derivatives:
    y = 1 / _positive(x)
    return x.log(), y, -y * y


def log1p(x: arb) -> Derivatives:
    y = 1 / _positive(1 + x)
    return x.log1p(), y, -y * y


def sqrt(x: arb) -> Derivatives:
    y = _positive(x).sqrt()
    return y, 1 / (2 * y), -1 / (4 * y * x)


def rsqrt(x: arb) -> Derivatives:
    y = _positive(x).rsqrt()
    return y, -y / (2 * x), 3 * y / (4 * x * x)


def sin(x: arb) -> Derivatives:
    return x.sin(), x.cos(), -x.sin()


def cos(x: arb) -> Derivatives:
    return x.cos(), -x.sin(), -x.cos()


def atan(x: arb) -> Derivatives:
    y = 1 / (1 + x * x)
    return x.atan(), y, -2 * x * y * y


def erf(x: arb) -> Derivatives:
    slope = 2 * (-x * x).exp() / arb.pi().sqrt()
    return x.erf(), slope, -2 * x * slope


def silu(x: arb) -> Derivatives:
    y, slope, bend = sigmoid(x)
    return x * y, y + x * slope, 2 * slope + x * bend


def mish(x: arb) -> Derivatives:
    inner, s, b = softplus(x)
    y, slope, bend = tanh(inner)
    return x * y, y + x * slope * s, 2 * slope * s + x * (bend * s * s + slope * b)


def gelu(approximate: str = "none") -> Function:
    """x Φ(x), or with Φ by the hyperbolic tangent."""

    def exact(x: arb) -> Derivatives:
        phi = (-x / arb(2).sqrt()).erfc() / 2
        density = (-x * x / 2).exp() / (2 * arb.pi()).sqrt()
        return x * phi, phi + x * density, density * (2 - x * x)

    def by_tanh(x: arb) -> Derivatives:
        root, cubic = (2 / arb.pi()).sqrt(), exactly(0.044715)
        inner, s, b = root * (x + cubic * x * x * x), root * (1 + 3 * cubic * x * x), root * 6 * cubic * x
        phi, slope, bend = sigmoid(2 * inner)  # (1 + tanh z)/2
        return x * phi, phi + x * 2 * slope * s, 4 * slope * s + x * (4 * bend * s * s + 2 * slope * b)

    return by_tanh if approximate == "tanh" else exact


def elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Function:
    a, c, k = exactly(alpha), exactly(scale), exactly(input_scale)

    def function(x: arb) -> Derivatives:
        if at_least(x, 0):
            return c * x, c, ZERO
        y = (k * x).exp()
        return c * a * (k * x).expm1(), c * a * k * y, c * a * k * k * y

    return function


def celu(alpha: float = 1.0) -> Function:
    """Torch: elu with α, and 1/α inside."""
    a = exactly(alpha)

    def function(x: arb) -> Derivatives:
        if at_least(x, 0):
            return x, ONE, ZERO
        y = (x / a).exp()
        return a * (x / a).expm1(), y, y / a

    return function


def thresholded_softplus(beta: float = 1.0, threshold: float = 20.0) -> Function:
    """Soft-plus, and the identity above the threshold; without a jump from the default threshold on.

    From 20 on, what torch leaves out is meant as an error of evaluation.
    """
    b, limit = exactly(beta), exactly(threshold)

    def function(x: arb) -> Derivatives:
        if threshold < 20 and not b * x <= limit:
            if not b * x > limit:
                raise Undecided("soft-plus at its threshold")
            return x, ONE, ZERO
        value, slope, bend = softplus(b * x)
        return value / b, slope, bend * b

    return function


def leaky_relu(negative_slope: float = 0.01) -> Function:
    slope = exactly(negative_slope)
    return lambda x: (x, ONE, ZERO) if at_least(x, 0) else (slope * x, slope, ZERO)


def absolute(x: arb) -> Derivatives:
    return (x, ONE, ZERO) if at_least(x, 0) else (-x, -ONE, ZERO)


def sign(x: arb) -> Derivatives:
    if x == 0:
        return ZERO, ZERO, ZERO
    return (ONE if at_least(x, 0) else -ONE), ZERO, ZERO


def clamp(low: float | None = None, high: float | None = None) -> Function:
    def function(x: arb) -> Derivatives:
        if low is not None and high is not None and low > high:
            return exactly(high), ZERO, ZERO
        if low is not None and not at_least(x, exactly(low)):
            return exactly(low), ZERO, ZERO
        if high is not None and at_least(x, exactly(high)):
            return exactly(high), ZERO, ZERO
        return x, ONE, ZERO

    return function


def power(exponent: float) -> Function:
    """A whole power by multiplication, others of positive numbers."""
    if exponent == int(exponent) and exponent >= 0:
        n = int(exponent)
        slope, bend = arb(n), arb(n * (n - 1))
        return lambda x: (
            natural_power(x, n),
            slope * natural_power(x, max(n - 1, 0)),
            bend * natural_power(x, max(n - 2, 0)),
        )
    p = exactly(exponent)

    def function(x: arb) -> Derivatives:
        whole = exponent == int(exponent)
        y = 1 / natural_power(x, -int(exponent)) if whole else (p * _positive(x).log()).exp()
        return y, p * y / x, p * (p - 1) * y / (x * x)

    return function


def huber(delta: float) -> Function:
    d = exactly(delta)

    def function(x: arb) -> Derivatives:
        if at_least(x, d):
            return d * x - d * d / 2, d, ZERO
        if not at_least(x, -d):
            return -d * x - d * d / 2, -d, ZERO
        return x * x / 2, x, ONE

    return function


def _positive(x: arb) -> arb:
    if not x > 0:
        raise Undecided("a root or logarithm of a ball that is not positive")
    return x
