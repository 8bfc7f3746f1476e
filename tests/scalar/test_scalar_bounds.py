"""Suprema over one interval: never below what is sampled, and attained."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_zoo import CASES, HALF_LINE, Case, derivatives, off_kinks

from surefoot.scalar import ScalarFunction, supremum, value_range

x = ScalarFunction.variable()
apply = ScalarFunction.apply
inf = math.inf
GLOBAL_POINTS = torch.cat([torch.linspace(-30, 30, 60001), torch.tensor([-1e6, -1e3, 1e3, 1e6])]).double()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_global_constants(case: Case) -> None:
    """Sound and, where finite, within 1e-4 of the sampled supremum; infinite exactly where they should be."""
    near = [kink + side for kink in case.kinks for side in (-1e-7, 1e-7)]
    points = torch.cat([off_kinks(GLOBAL_POINTS, case.kinks), torch.tensor(near, dtype=torch.float64)])
    sampled = derivatives(case.judge, points)
    for order in range(4):
        bound = supremum(case.function, order)
        if str(order) not in case.finite:
            assert bound == inf
            continue
        largest = float(sampled[order][sampled[order].isfinite()].abs().max())
        assert largest <= bound * (1 + 1e-12) + 1e-9
        assert bound <= largest * (1 + 1e-4)


@pytest.mark.parametrize(
    ("name", "order", "value"),
    [
        ("gelu", 1, 1.1289041451),
        ("gelu", 2, 2 / math.sqrt(2 * math.pi)),
        ("silu", 1, 1.0998393201),
        ("silu", 2, 0.5),
        ("tanh", 1, 1.0),
        ("tanh", 2, 4 / (3 * math.sqrt(3))),
        ("sigmoid", 1, 0.25),
        ("sigmoid", 2, math.sqrt(3) / 18),
        ("softplus", 1, 1.0),
        ("softplus", 2, 0.25),
        ("elu", 2, 1.0),
        ("softsign", 2, 2.0),
        ("hardswish", 1, 1.5),
        ("erf", 1, 2 / math.sqrt(math.pi)),
    ],
)
def test_known_constants(name: str, order: int, value: float) -> None:
    bound = supremum(ScalarFunction.named(name), order)
    assert value * (1 - 1e-10) <= bound <= value * (1 + 1e-7)


def test_softplus_curvature_is_a_quarter_of_beta() -> None:
    for beta in (0.1, 3.0, 100.0):
        assert supremum(ScalarFunction.named("softplus", beta=beta), 2) == pytest.approx(beta / 4, rel=1e-7)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.sampled_from(CASES),
    st.floats(-12, 12),
    st.one_of(st.just(0.0), st.floats(0, 0.1), st.floats(0, 20)),
    st.integers(0, 3),
)
def test_random_intervals(case: Case, low: float, width: float, order: int) -> None:
    high = low + width
    bound = supremum(case.function, order, low, high)
    assert not math.isnan(bound)
    reached = any(low <= kink <= high for kink in case.kinks)
    assert (bound == inf) == (reached and order > case.smoothness)
    points = off_kinks(torch.linspace(low, high, 301, dtype=torch.float64), case.kinks, 1e-12)
    if bound == inf or not len(points):
        return
    largest = float(derivatives(case.judge, points)[order].abs().max())
    assert largest <= bound * (1 + 1e-10) + 1e-10
    if not reached:
        slope = supremum(case.function, order + 1, low, high) if order < 3 else 10.0 * max(1.0, bound)
        assert bound <= largest * (1 + 1e-6) + slope * width / 300 + 1e-9


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.sampled_from(
        [
            ("gelu", lambda t: t * mpmath.ncdf(t)),
            ("silu", lambda t: t / (1 + mpmath.exp(-t))),
            ("mish", lambda t: t * mpmath.tanh(mpmath.log1p(mpmath.exp(t)))),
            ("softplus", lambda t: mpmath.log1p(mpmath.exp(t))),
            ("tanh", mpmath.tanh),
            ("asinh", mpmath.asinh),
            ("erfc", mpmath.erfc),
        ]
    ),
    st.floats(-6, 6),
    st.integers(0, 3),
)
def test_single_points_against_forty_digits(pair, point: float, order: int) -> None:
    """No tolerance downwards but that of the judge, whose differences are not zero where a derivative is."""
    name, judge = pair
    with mpmath.workdps(60):
        exact = abs(mpmath.diff(judge, mpmath.mpf(point), order))
        bound = supremum(ScalarFunction.named(name), order, point, point)
        assert mpmath.mpf(bound) >= exact * (1 - mpmath.mpf(10) ** -25) - mpmath.mpf(10) ** -40
        assert mpmath.mpf(bound) <= exact * (1 + mpmath.mpf(10) ** -12) + mpmath.mpf(10) ** -18


@pytest.mark.parametrize(("name", "torch_function", "parameters"), HALF_LINE)
def test_undefined_somewhere(name, torch_function, parameters) -> None:
    function = ScalarFunction.named(name, **parameters)
    for order in range(4):
        for low, high in ((-1.0, 1.0), (0.0, 1.0), (-inf, inf), (-inf, 1.0)):
            assert supremum(function, order, low, high) == inf
        largest = float(derivatives(torch_function, torch.linspace(0.5, 3, 501).double())[order].abs().max())
        assert supremum(function, order, 0.5, 3.0) == pytest.approx(largest, rel=1e-9)
    assert supremum(function, 3, 0.5, inf) == pytest.approx(supremum(function, 3, 0.5, 3.0), rel=1e-7)


def test_undefined_on_both_sides() -> None:
    assert supremum(ScalarFunction.named("log"), 0, -3.0, -2.0) == inf
    assert supremum(ScalarFunction.named("log"), 0, 0.0, 0.0) == inf
    assert supremum(ScalarFunction.named("sqrt"), 1, 0.0, 0.0) == inf
    assert value_range(ScalarFunction.named("sqrt"), -3.0, -2.0) == (-inf, inf)
    assert supremum(ScalarFunction.named("tan"), 1, 1.0, 2.0) == inf
    assert supremum(ScalarFunction.named("tan"), 1, -1.0, 1.0) == pytest.approx(1 / math.cos(1.0) ** 2)
    assert supremum(ScalarFunction.named("reciprocal"), 1, -3.0, -0.5) == 4.0
    assert supremum(ScalarFunction.named("pow", exponent=-2.0), 1, -inf, -1.0) == pytest.approx(2.0)


def test_kinks_count_only_if_reached() -> None:
    relu = ScalarFunction.named("relu")
    assert supremum(relu, 2, -1.0, 1.0) == inf
    assert supremum(relu, 2, 0.0, 0.0) == inf
    assert supremum(relu, 2, 0.0, 1.0) == inf  # the end of an interval belongs to it
    assert supremum(relu, 2, 5e-324, 1.0) == 0.0
    assert supremum(relu, 1, -1.0, -5e-324) == 0.0
    assert supremum(relu, 1, -1.0, 0.0) == 1.0
    assert supremum(ScalarFunction.named("hardswish"), 2, -2.999, 2.999) == pytest.approx(1 / 3)
    assert supremum(apply("relu", 3.0 * x - 1.0), 2, 1 / 3 + 1e-15, 1.0) == 0.0  # a kink that is not a double
    assert supremum(apply("relu", 3.0 * x - 1.0), 2, 0.0, 1.0) == inf


def test_kinks_of_nonlinear_arguments() -> None:
    folded = apply("relu", x**2.0 - 1.0)
    assert supremum(folded, 2, -0.999, 0.999) == 0.0
    assert supremum(folded, 2, -0.999, 1.001) == inf
    assert supremum(folded, 2, 1.001, 3.0) == pytest.approx(2.0)
    assert supremum(folded, 1, -2.0, 3.0) == pytest.approx(6.0)
    assert supremum(apply("abs", apply("sin", x)), 1) == pytest.approx(1.0, rel=1e-6)
    assert supremum(apply("abs", apply("sin", x)), 2) == inf
    assert supremum(apply("abs", apply("sin", x)), 2, 0.5, 3.0) == pytest.approx(1.0, rel=1e-6)
    assert supremum(apply("relu", 1.5 + apply("tanh", x)), 3) == pytest.approx(2.0, rel=1e-6)  # never reached


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ScalarFunction.named("elu"), 1.0),
        (ScalarFunction.named("celu", alpha=0.7), 1 / 0.7),
        (ScalarFunction.named("celu", alpha=49.0), 1 / 49),
        (apply("relu", x) ** 2.0, 2.0),
        (x * apply("abs", x), 2.0),
        (x * apply("sign", x) * x, 2.0),
        (x / (1.0 + apply("abs", x)), 2.0),
        (apply("relu", x - 0.3) ** 2.0 * 0.1, 0.2),
        (2.0 * apply("elu", 3.0 * x + 1.0), 18.0),
        (apply("relu", x) ** 2.0 - apply("relu", -x) ** 2.0, 2.0),
    ],
)
def test_once_but_not_twice_differentiable(function: ScalarFunction, expected: float) -> None:
    """Where only the second derivative jumps, the first is Lipschitz continuous: the bound is finite."""
    assert supremum(function, 2) == pytest.approx(expected, rel=1e-7)
    assert supremum(function, 3) == inf


def test_what_is_not_differentiable_by_a_little_is_not() -> None:
    almost = ScalarFunction.named("elu", alpha=1.0 + 2**-52)
    assert supremum(almost, 2) == inf
    assert supremum(ScalarFunction.named("selu"), 2) == inf
    broken = ScalarFunction.piecewise([1.0], [x, x + 2.0**-52])
    assert supremum(broken, 1) == inf
    assert supremum(broken, 0, 0.0, 1.0) == pytest.approx(1.0)


def test_nested_pieces() -> None:
    hat = ScalarFunction.piecewise([0.5], [ScalarFunction.named("relu"), 1.0 - x])
    assert supremum(hat, 1, -1.0, 2.0) == 1.0
    assert supremum(hat, 2, 0.1, 0.4) == 0.0
    assert supremum(hat, 2, -0.1, 0.4) == inf
    assert supremum(hat, 2, 0.1, 0.5) == inf
    assert value_range(hat, -1.0, 1.0) == pytest.approx((0.0, 0.5), abs=1e-8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_range(case: Case) -> None:
    for low, high in ((-2.0, 1.5), (0.25, 0.25), (-30.0, 30.0)):
        least, most = value_range(case.function, low, high)
        values = case.torch(torch.linspace(low, high, 4001, dtype=torch.float64))
        step = supremum(case.function, 1, low, high) * (high - low) / 4000
        assert least <= float(values.min()) + 1e-12
        assert most >= float(values.max()) - 1e-12
        if step < inf:
            assert least >= float(values.min()) - step - 1e-9 * abs(least) - 1e-11
            assert most <= float(values.max()) + step + 1e-9 * abs(most) + 1e-11


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("gelu", -0.1699712075, inf),
        ("silu", -0.2784645428, inf),
        ("mish", -0.3088434132, inf),
        ("softplus", 0.0, inf),
        ("sigmoid", 0.0, 1.0),
        ("elu", -1.0, inf),
        ("exp", 0.0, inf),
        ("log_sigmoid", -inf, 0.0),
        ("atan", -math.pi / 2, math.pi / 2),
        ("identity", -inf, inf),
        ("relu6", 0.0, 6.0),
    ],
)
def test_global_value_range(name: str, least: float, most: float) -> None:
    assert value_range(ScalarFunction.named(name)) == pytest.approx((least, most), abs=1e-7)


def test_far_away_and_very_wide() -> None:
    silu = ScalarFunction.named("silu")
    assert supremum(silu, 1, -1e300, 1e300) == pytest.approx(1.0998393201, rel=1e-7)
    assert supremum(silu, 1, 50.0, 1e300) == pytest.approx(1.0, rel=1e-9)
    assert 0.0 < supremum(silu, 1, -inf, -100.0) < 1e-40
    assert supremum(ScalarFunction.named("square"), 1, 1e10, 1e11) == pytest.approx(2e11)
    assert supremum(ScalarFunction.named("sin"), 1, 1e6, 1e6 + 1.0) <= 1.0 + 1e-6
    assert supremum(apply("sigmoid", 1e-9 * x), 1) == pytest.approx(0.25e-9, rel=1e-6)
    assert supremum(apply("sigmoid", 1e9 * x), 1) == pytest.approx(0.25e9, rel=1e-6)


def test_refuses_what_makes_no_sense() -> None:
    for order, low, high in ((6, 0.0, 1.0), (-1, 0.0, 1.0), (1, 1.0, 0.0), (1, math.nan, 1.0), (1, inf, inf)):
        with pytest.raises(ValueError, match="order from 0 to 5"):
            supremum(x, order, low, high)
