"""Enclosures on half lines contain the Taylor coefficients at every point of them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from flint import arb, arb_series, ctx
from scalar_zoo import CASES, HALF_LINE, Case

from surefoot.scalar import ScalarFunction
from surefoot.scalar.enclosure import Cell, evaluate
from surefoot.scalar.tails import LENGTH, Scale, TailSeries, ball_of

x = ScalarFunction.variable()
apply = ScalarFunction.apply

WRITTEN_OUT = [
    x / (1.0 + apply("exp", -x)),
    apply("exp", -(x**2.0)) * x**5.0,
    apply("sqrt", 1.0 + x**2.0),
    x * apply("rsqrt", 1.0 + x * x),
    apply("log", 1.0 + x**2.0),
    apply("atan", x**3.0) + apply("asinh", 2.0 * x),
    apply("tanh", apply("exp", -x)) * apply("sin", x),
    apply("softplus", -2.0 * x) ** 2.0,
    1.0 / (2.0 + apply("cos", x)),
    apply("relu", apply("sin", x)),
    apply("exp", -apply("sqrt", 1.0 + apply("abs", x))),
    apply("log1p", apply("exp", x)) * apply("sigmoid", -x),
]


def assert_contains(function: ScalarFunction, start: float, sign: int) -> None:
    """At t = start, and ever further out, each coefficient is in its scale and within its limits."""
    with ctx.workprec(80):
        far = sign * math.inf
        cell = (sign * start, far) if sign > 0 else (far, sign * start)
        series, smoothness = evaluate(function, TailSeries.variable(Fraction(start), sign), cell)
    for factor in (1.0, 1.0625, 1.5, 2.0, 5.0, 37.0, 1000.0):
        t = start * factor
        with ctx.workprec(400):
            at, _ = evaluate(function, arb_series([arb(sign * t), 1], prec=LENGTH), None)
            for order in range(min(smoothness, LENGTH - 1) + 1):
                scale, exact = series[order], at[order]
                if not scale.ball.is_finite() or not exact.is_finite():
                    continue
                low, high = scale.limits()
                assert not exact < low
                assert not exact > high
                unit = arb(t) ** ball_of(scale.power) * (-arb(t) * ball_of(scale.rate)).exp()
                assert (unit * scale.ball).overlaps(exact)


@pytest.mark.parametrize("start", [1.0, 2.5, 8.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_named_functions(case: Case, start: float) -> None:
    start = max([start, *(abs(kink) for kink in case.kinks)])
    assert_contains(case.function, start, 1)
    assert_contains(case.function, start, -1)


@pytest.mark.parametrize("start", [1.0, 8.0])
@pytest.mark.parametrize("function", WRITTEN_OUT)
def test_functions_written_out(function: ScalarFunction, start: float) -> None:
    assert_contains(function, start, 1)
    assert_contains(function, start, -1)


@pytest.mark.parametrize(("name", "_function", "parameters"), HALF_LINE)
def test_functions_of_positive_numbers(name, _function, parameters) -> None:
    for start in (1.0, 8.0):
        assert_contains(ScalarFunction.named(name, **parameters), start, 1)


def test_growth_is_cancelled_by_decay() -> None:
    """x sigmoid'(x) is small on [8, ∞), though x is not bounded there."""
    low, high = Cell(ScalarFunction.named("silu"), 8.0, math.inf).range(2)
    assert -0.01 < float(low) <= float(high) < 0.01
    low, high = Cell(apply("exp", -x) * x**7.0, 8.0, math.inf).range(0)
    assert float(high) == pytest.approx(8.0**7 * math.exp(-8.0), rel=1e-6)


def test_sums_keep_the_dominant_scale() -> None:
    start = Fraction(2)
    linear, constant = Scale(start, arb(3), Fraction(1)), Scale(start, arb(-1))
    decaying = Scale(start, arb(5), Fraction(4), Fraction(1))
    total = linear + constant + decaying
    assert (total.power, total.rate) == (1, 0)
    for t in (2.0, 4.0, 5.0, 100.0):
        value = 3 * arb(t) - 1 + 5 * arb(t) ** 4 * arb(-t).exp()
        assert (total.ball * t).contains(value)
    peak = Scale(start, arb(1), Fraction(4), Fraction(1)).limits()[1]  # t^4 exp(-t) is largest at 4
    assert float(peak) == pytest.approx(4**4 * math.exp(-4))


def test_zero_stays_zero_and_nothing_known_stays_so() -> None:
    variable = TailSeries.variable(Fraction(8), 1)
    assert (variable.unknown() * 0.0)[0].is_zero
    assert not (variable.unknown() + 1.0)[0].limits()[1].is_finite()
    assert variable.direction == 1
    assert (-variable).direction == -1
    assert (variable / variable).direction == 0
    assert (1 / variable)[0].vanishes
