"""The element-wise activations of torch.nn as scalar functions.

An activation is a function of its parameters that returns a :class:`ScalarFunction`; the decorator makes it
known by its name. Parameters have the names and the defaults of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from surefoot.scalar.function import ScalarFunction
from surefoot.scalar.primitives import PRIMITIVES

ACTIVATIONS: dict[str, Callable[..., ScalarFunction]] = {}

x = ScalarFunction.variable()
apply, piecewise = ScalarFunction.apply, ScalarFunction.piecewise


def activation(name: str, **parameters: float | str | None) -> ScalarFunction:
    """The activation of that name.

    Raises:
        ValueError: if there is no such activation.
    """
    if name in ACTIVATIONS:
        return ACTIVATIONS[name](**parameters)
    if name in PRIMITIVES and PRIMITIVES[name].arity == 1 and not parameters:
        return apply(name, x)
    raise ValueError(
        f"no scalar function is named {name!r} with parameters {sorted(parameters)}; build it with "
        f"ScalarFunction.apply or ScalarFunction.piecewise. Known: {', '.join(sorted(ACTIVATIONS))}"
    )


def register(function: Callable[..., ScalarFunction]) -> Callable[..., ScalarFunction]:
    """Make an activation known by the name of the function that builds it."""
    ACTIVATIONS[function.__name__.rstrip("_")] = function
    return function


@register
def identity() -> ScalarFunction:
    """The identity."""
    return x


@register
def relu() -> ScalarFunction:
    """max(x, 0)."""
    return piecewise([0.0], [0.0, x])


@register
def leaky_relu(negative_slope: float = 0.01) -> ScalarFunction:
    """Slope 1 for positive, ``negative_slope`` for negative arguments."""
    return piecewise([0.0], [negative_slope * x, x])


@register
def prelu(weight: float = 0.25) -> ScalarFunction:
    """The leaky ReLU of a fixed, learned slope."""
    return leaky_relu(weight)


@register
def rrelu(lower: float = 1.0 / 8, upper: float = 1.0 / 3) -> ScalarFunction:
    """The randomised leaky ReLU as it is evaluated: with the mean slope."""
    return leaky_relu((lower + upper) / 2)


@register
def elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> ScalarFunction:
    """scale * x for positive, scale * alpha * (exp(input_scale * x) - 1) for negative arguments."""
    return scale * piecewise([0.0], [alpha * apply("expm1", input_scale * x), x])


@register
def celu(alpha: float = 1.0) -> ScalarFunction:
    """alpha * elu(x / alpha): continuously differentiable for every alpha.

    Torch multiplies by 1 / alpha rounded to a double, which moves the slope at 0 by a rounding error; this is
    the function without it.
    """
    return alpha * elu().compose(x / alpha)


@register
def selu() -> ScalarFunction:
    """The self-normalising ELU, with the two constants of torch."""
    return elu(alpha=1.6732632423543772848170429916717, scale=1.0507009873554804934193349852946)


@register
def gelu(approximate: str = "none") -> ScalarFunction:
    """x times the normal distribution function, or its approximation by a hyperbolic tangent."""
    if approximate == "tanh":
        return 0.5 * x * (1.0 + apply("tanh", math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3.0)))
    return 0.5 * x * apply("erfc", -(x * apply("rsqrt", 2.0)))


@register
def silu() -> ScalarFunction:
    """x * sigmoid(x)."""
    return x * apply("sigmoid", x)


@register
def mish() -> ScalarFunction:
    """x * tanh(softplus(x))."""
    return x * apply("tanh", apply("softplus", x))


@register
def softplus(beta: float = 1.0, threshold: float = 20.0) -> ScalarFunction:
    """log(1 + exp(beta x)) / beta, everywhere.

    Torch returns x itself where beta x exceeds the threshold, at most exp(-threshold) / beta below this
    function (2e-9 by default). That jump is an approximation of floating-point evaluation, as round-off is,
    so the threshold is ignored.
    """
    return apply("softplus", beta * x) / beta if beta != 1.0 else apply("softplus", x)


@register
def log_sigmoid() -> ScalarFunction:
    """-softplus(-x)."""
    return -apply("softplus", -x)


@register
def softsign() -> ScalarFunction:
    """x / (1 + |x|); the two pieces have the same slope at 0 but not the same curvature."""
    return piecewise([0.0], [x / (1.0 - x), x / (1.0 + x)])


@register
def clamp(min: float | None = None, max: float | None = None) -> ScalarFunction:
    """x limited to [min, max]; a limit that is None is none."""
    lower, upper = -math.inf if min is None else min, math.inf if max is None else max
    if not lower < upper:
        return ScalarFunction.constant(upper)
    return piecewise([lower, upper], [_limit(lower), x, _limit(upper)])


def _limit(limit: float) -> ScalarFunction:
    """The constant limit; where it is infinite the piece is never used."""
    return ScalarFunction.constant(limit) if math.isfinite(limit) else x


@register
def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> ScalarFunction:
    """x limited to [min_val, max_val]."""
    return clamp(min_val, max_val)


@register
def relu6() -> ScalarFunction:
    """x limited to [0, 6]."""
    return clamp(0.0, 6.0)


@register
def hardsigmoid() -> ScalarFunction:
    """x + 3 limited to [0, 6], over 6."""
    return relu6().compose(x + 3.0) / 6.0


@register
def hardswish() -> ScalarFunction:
    """x * hardsigmoid(x)."""
    return x * hardsigmoid()


@register
def tanhshrink() -> ScalarFunction:
    """x - tanh(x)."""
    return x - apply("tanh", x)


@register
def softshrink(lambd: float = 0.5) -> ScalarFunction:
    """x moved towards 0 by lambd."""
    return piecewise([-lambd, lambd], [x + lambd, 0.0, x - lambd]) if lambd else x


@register
def hardshrink(lambd: float = 0.5) -> ScalarFunction:
    """x where it exceeds lambd in absolute value, else 0: discontinuous. Odd, so both ends of [-λ, λ] give 0."""
    above = threshold(lambd, 0.0)
    return above - above.compose(-x) if lambd else x


@register
def threshold(threshold: float, value: float) -> ScalarFunction:
    """x above the threshold, ``value`` up to it."""
    return piecewise([threshold], [value, x])


@register
def abs_() -> ScalarFunction:
    """|x|."""
    return piecewise([0.0], [-x, x])


@register
def sign() -> ScalarFunction:
    """-1, 0 or 1: discontinuous at 0."""
    step = piecewise([0.0], [0.0, 1.0])
    return step - step.compose(-x)


@register
def square() -> ScalarFunction:
    """x squared."""
    return x**2.0


@register
def pow_(exponent: float) -> ScalarFunction:
    """x to a fixed power."""
    return x**exponent


ACTIVATIONS |= {"logsigmoid": log_sigmoid, "swish": silu}
