"""Computed numbers lie within their error bounds: judged by ball arithmetic at 300 bits."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from flint import arb, arb_series, ctx
from scalar_zoo import CASES

from surefoot.scalar import Rounded, ScalarFunction, rounded_derivatives
from surefoot.scalar.enclosure import evaluate
from surefoot.scalar.primitives import PRIMITIVES
from surefoot.scalar.tails import LENGTH

x = ScalarFunction.variable()
apply = ScalarFunction.apply
UNARY = {name: p for name, p in PRIMITIVES.items() if p.arity == 1 and name != "pow"}
POSITIVE = {"log", "sqrt", "rsqrt"}
EXTREMES = [5e-324, 1e-310, 2.3e-308, 1e-200, 1e-20, 0.5, 19.0, 36.9, 37.1, 39.9, 40.1, 350.0, 372.5, 700.0, 709.7]
BEYOND = [709.9, 720.0, 745.0, 746.0, 1e4, 1e8, 1e16, 1e200]
CANCELLING = {
    "(tanh + 1e7) - 1e7": (apply("tanh", x) + 1e7) - 1e7,
    "exp - 1": apply("exp", x) - 1.0,
    "tanhshrink": ScalarFunction.named("tanhshrink"),
    "1 - tanh^2": 1.0 - apply("tanh", x) ** 2.0,
    "quotient": x / (1.0 + apply("exp", x)) - 0.3 * x,
    "power": (1.0 + x**2.0) ** -1.4999999999,
    "tiny power": (2.0 + apply("sin", x)) ** 1e-10,
    "inner kink": apply("relu", 0.1 * x - 0.03) * apply("tan", 0.3 * apply("tanh", x)),
}


def points(name: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(300, dtype=torch.float64, generator=generator)
    scales = torch.logspace(-310, 2.8, 300, dtype=torch.float64)
    numbers = torch.cat(
        [drawn, drawn * 30, drawn.sign() * scales, torch.tensor(EXTREMES + BEYOND, dtype=torch.float64)]
    )
    numbers = torch.cat([numbers, -numbers])
    if name in POSITIVE:
        return numbers[numbers > 0]
    return numbers[numbers > -1] if name == "log1p" else numbers


@pytest.mark.parametrize("name", UNARY)
def test_elementary_functions_are_within_eight_units(name: str) -> None:
    """What is assumed of torch."""
    numbers = points(name)
    values = Rounded.exact(numbers)
    result = UNARY[name].tensor(values).expand(numbers.shape)
    plain = UNARY[name].tensor(numbers)
    assert torch.equal(result.value.nan_to_num(), plain.nan_to_num()) or name == "tan"
    with ctx.workprec(1400):
        for at, value, error in zip(numbers.tolist(), result.value.tolist(), result.error.tolist(), strict=True):
            if not math.isfinite(value) or not math.isfinite(error):
                continue
            exact = UNARY[name].ball(arb_series([arb(at)], prec=2))[0]
            assert abs(exact - arb(value)).upper() <= arb(error), (at, value, error)


def check(function: ScalarFunction, numbers: torch.Tensor, order: int = 4) -> None:
    computed = rounded_derivatives(function, Rounded.exact(numbers), order)
    with ctx.workprec(1400):
        for k, at in enumerate(numbers.tolist()):
            cell = (Fraction(at), Fraction(at))
            series, _ = evaluate(function, arb_series([arb(at), 1], prec=LENGTH), cell)
            for degree, coefficient in enumerate(computed):
                value, error = float(coefficient.value[k]), float(coefficient.error[k])
                if series[degree].is_finite() and math.isfinite(error):
                    assert (abs(series[degree] - arb(value)) - arb(error)).lower() <= 0, (at, degree, value, error)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivatives_of_activations(case: object) -> None:
    numbers = torch.cat([points("any")[::23], torch.tensor([-25.0, -10.0, 10.0, 15.0, 25.0]).double()])
    function = case.function  # type: ignore[attr-defined]
    breaks = {point for step in function.steps for point in step.parameters}
    check(function, torch.tensor([p for p in numbers.tolist() if p not in breaks], dtype=torch.float64))


@pytest.mark.parametrize("name", CANCELLING)
def test_derivatives_where_digits_cancel(name: str) -> None:
    numbers = torch.linspace(-3, 3, 41, dtype=torch.float64) + 1e-3
    check(CANCELLING[name], torch.cat([numbers, numbers * 1e-6]))


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "elu", "softplus", "silu", "gelu"])
def test_slopes_far_out_are_known_to_many_digits(name: str) -> None:
    """The derivative is small there, and its error is small against it."""
    numbers = torch.tensor([-20.0, -15.0], dtype=torch.float64)
    slope = rounded_derivatives(ScalarFunction.named(name), Rounded.exact(numbers), 1)[1]
    assert bool((slope.error <= 1e-12 * slope.value.abs()).all())


def test_a_break_that_may_lie_on_either_side() -> None:
    """The argument of the ReLU is zero but for its rounding: either slope is possible."""
    function = apply("relu", (0.1 * x) - 0.1 * 3.0)
    slope = rounded_derivatives(function, Rounded.exact(torch.tensor([3.0], dtype=torch.float64)), 1)[1]
    assert float(slope.error) >= 0.09
