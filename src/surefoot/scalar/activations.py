"""The element-wise activations of torch.nn as scalar functions.

An activation is a function of its parameters that returns a :class:`ScalarFunction`; the decorator makes it
known by its name. Parameters have the names and the defaults of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from surefoot.scalar.function import ACTIVATIONS, ScalarFunction

x = ScalarFunction.variable()
apply, piecewise = ScalarFunction.apply, ScalarFunction.piecewise

_LARGE = 20.0  # torch's default threshold of soft-plus: from there on what it leaves out is an error of evaluation


def register(function: Callable[..., ScalarFunction]) -> Callable[..., ScalarFunction]:
    """Make an activation known by the name of the function that builds it."""
    ACTIVATIONS[function.__name__] = function
    return function


@register
def leaky_relu(negative_slope: float = 0.01) -> ScalarFunction:
    """Slope 1 for positive, ``negative_slope`` for negative arguments."""
    return piecewise([0.0], [negative_slope * x, x])


@register
def elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> ScalarFunction:
    """scale * x for positive, scale * alpha * (exp(input_scale * x) - 1) for negative arguments."""
    return scale * piecewise([0.0], [alpha * apply("expm1", input_scale * x), x])


@register
def celu(alpha: float = 1.0) -> ScalarFunction:
    """x for positive, alpha * (exp(x / alpha) - 1) for negative x: continuously differentiable for every alpha.

    With u = x / alpha this is alpha times a function of u whose pieces meet smoothly at 0; for alpha < 0 the sides
    are exchanged, and the exponential grows. Torch multiplies by 1 / alpha rounded to a double, which moves the
    slope at 0 by a rounding error; this is the function without it.
    """
    pieces = [apply("expm1", x), x]
    return alpha * piecewise([0.0], pieces if alpha > 0 else pieces[::-1]).compose(x / alpha)


@register
def gelu(approximate: str = "none") -> ScalarFunction:
    """x times the normal distribution function, or its approximation by a hyperbolic tangent."""
    if approximate == "tanh":
        return 0.5 * x * (1.0 + apply("tanh", math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3.0)))
    return 0.5 * x * apply("erfc", -(x * apply("rsqrt", 2.0)))


@register
def softplus(beta: float = 1.0, threshold: float = 20.0) -> ScalarFunction:
    """log(1 + exp(beta x)) / beta; with a threshold below 20, x where beta x exceeds the threshold.

    Torch returns x itself above the threshold: a jump by log(1 + exp(-threshold)) / beta. With a threshold below
    20 the function returned here has that jump, so nothing that reaches it has a Lipschitz constant. From 20, the
    default, on it is the function without the jump; what torch evaluates is off by at most exp(-threshold) / beta,
    and whoever compares values of torch with those certified here counts it as an error of evaluation.
    """
    smooth = apply("softplus", x)
    whole = smooth if threshold >= _LARGE else piecewise([threshold], [smooth, x])
    return whole.compose(beta * x) / beta if beta != 1.0 else whole


@register
def clamp(min: float | None = None, max: float | None = None) -> ScalarFunction:
    """x limited to [min, max]; a limit that is None is none. It is max where min exceeds it."""
    lower, upper = -math.inf if min is None else min, math.inf if max is None else max
    if not lower < upper:
        return 0.0 * x + upper  # not a number where x is not
    first, last = (limit if math.isfinite(limit) else x for limit in (lower, upper))  # else the piece is not used
    return piecewise([lower, upper], [first, x, last])


@register
def threshold(threshold: float, value: float) -> ScalarFunction:
    """x above the threshold, ``value`` up to it."""
    return piecewise([threshold], [value, x])


@register
def hardshrink(lambd: float = 0.5) -> ScalarFunction:
    """x where it exceeds lambd in absolute value, else 0: discontinuous. Odd, so both ends of [-λ, λ] give 0.

    No x is in [-λ, λ] for λ < 0.
    """
    above = threshold(lambd, 0.0)
    return above - above.compose(-x) if lambd > 0 else x


def _plain() -> dict[str, ScalarFunction]:
    """The activations without parameters."""
    step = piecewise([0.0], [0.0, 1.0])
    relu6 = clamp(0.0, 6.0)
    hardsigmoid = relu6.compose(x + 3.0) / 6.0
    silu, log_sigmoid = x * apply("sigmoid", x), -apply("softplus", -x)
    return {
        "identity": x,
        "relu": piecewise([0.0], [0.0, x]),
        "relu6": relu6,
        "selu": elu(alpha=1.6732632423543772848170429916717, scale=1.0507009873554804934193349852946),
        "silu": silu,
        "swish": silu,
        "mish": x * apply("tanh", apply("softplus", x)),
        "log_sigmoid": log_sigmoid,
        "logsigmoid": log_sigmoid,
        "softsign": piecewise([0.0], [x / (1.0 - x), x / (1.0 + x)]),  # same slope at 0 but not same curvature
        "hardsigmoid": hardsigmoid,
        "hardswish": x * hardsigmoid,
        "tanhshrink": x - apply("tanh", x),
        "abs": piecewise([0.0], [-x, x]),
        "sign": step - step.compose(-x),
        "square": x**2.0,
    }


_FURTHER: dict[str, Callable[..., ScalarFunction]] = {
    "prelu": lambda weight=0.25: leaky_relu(weight),  # of a fixed, learned slope
    "rrelu": lambda lower=1.0 / 8, upper=1.0 / 3: leaky_relu((lower + upper) / 2),  # as evaluated: the mean slope
    "hardtanh": lambda min_val=-1.0, max_val=1.0: clamp(min_val, max_val),
    "softshrink": lambda lambd=0.5: piecewise([-lambd, lambd], [x + lambd, 0.0, x - lambd]) if lambd else x,
    "pow": lambda exponent: x**exponent,
}
ACTIVATIONS |= _FURTHER
ACTIVATIONS |= {name: lambda function=function: function for name, function in _plain().items()}
