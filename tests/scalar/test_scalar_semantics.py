"""What torch computes at breaks and for unusual parameters is what is bounded."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from surefoot.operations.evaluation import softplus_gap
from surefoot.scalar import ScalarFunction, range_on, sup_on, supremum, value_range

x = ScalarFunction.variable()
apply, named = ScalarFunction.apply, ScalarFunction.named
POINTS = torch.cat([torch.linspace(-4, 4, 1601), torch.tensor([0.5, -0.5, 0.25])]).double()
ENDS = torch.tensor([-1.0]).double(), torch.tensor([1.0]).double()
sign = named("sign")
step = ScalarFunction.piecewise([0.0], [0.0, 1.0])

# 1 everywhere but at 0, where it is 0: both one-sided limits agree, the value does not
ISOLATED = {
    "abs(sign)": apply("abs", sign),
    "sign^2": sign**2.0,
    "sign*sign": sign * sign,
    "even": apply("tanh", sign) ** 2.0,
    "two steps": step + step.compose(-x),
    "in a piece": ScalarFunction.piecewise([0.0], [step.compose(-x), 1.0]),
    "shifted": (sign**2.0).compose(2.0 * x - 1.0),
    "between doubles": (sign**2.0).compose(3.0 * x - 1.0),
    "of a nonlinear function": (sign**2.0).compose(apply("sin", x)),
}


@pytest.mark.parametrize("name", ISOLATED)
def test_the_value_at_a_break_counts(name: str) -> None:
    function = ISOLATED[name]
    for order in (1, 2, 3):
        assert supremum(function, order, -1.0, 1.0) == supremum(function, order) == math.inf
        assert sup_on(function, order, *ENDS).item() == math.inf
        assert supremum(function, order, 0.75, 1.0) == 0.0  # out of reach of the break
    assert value_range(function, -1.0, 1.0)[0] <= 0.0 + 1e-9
    assert float(range_on(function, *ENDS)[0]) <= 0.0 + 1e-9


def test_a_jump_that_a_zero_takes_away_is_none() -> None:
    assert supremum(x * sign, 1) == 1.0  # |x|
    assert supremum(x * sign, 2) == math.inf
    assert supremum(x * x * sign, 2, -1.0, 1.0) == pytest.approx(2.0)
    assert supremum(sign + step, 1, -1.0, 1.0) == math.inf


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 0.5), (3.0, 0.5), (-2.0, 1.0), (1.0, -1.0), (0.5, 19.9)])
def test_softplus_jumps_at_a_low_threshold(beta: float, threshold: float) -> None:
    function, at = named("softplus", beta=beta, threshold=threshold), threshold / beta
    points = torch.cat([POINTS, POINTS + at])
    torch.testing.assert_close(function(points), F.softplus(points, beta, threshold), rtol=1e-12, atol=1e-12)
    for order in (1, 2):
        assert supremum(function, order, at - 0.1, at + 0.1) == math.inf
        assert supremum(function, order, at + 0.1, at + 0.2) < 2.0
        assert supremum(function, order, at - 0.2, at - 0.1) < 2.0
    assert softplus_gap(beta, threshold) == 0.0


def test_softplus_with_the_default_threshold_is_smooth_and_says_what_torch_leaves_out() -> None:
    points = torch.linspace(19.0, 25.0, 100_001, dtype=torch.float64)
    for beta in (1.0, 4.0):
        function = named("softplus", beta=beta)
        assert supremum(function, 1) == pytest.approx(1.0, rel=1e-6)
        assert supremum(function, 2) == pytest.approx(beta / 4, rel=1e-6)
        gap = (function(points / beta) - F.softplus(points / beta, beta)).abs().max()
        assert softplus_gap(beta) / 2 < float(gap) <= softplus_gap(beta) + 1e-14


@pytest.mark.parametrize("alpha", [-1.0, -0.3, 0.3, 7.0])
def test_celu_of_either_sign(alpha: float) -> None:
    function = named("celu", alpha=alpha)
    torch.testing.assert_close(function(POINTS), F.celu(POINTS, alpha), rtol=1e-12, atol=1e-12)
    slope, bend = max(1.0, math.exp(-2 / alpha)), max(1.0, math.exp(-2 / alpha)) / abs(alpha)
    assert supremum(function, 1, -2.0, 2.0) == pytest.approx(slope, rel=1e-6)
    assert supremum(function, 2, -2.0, 2.0) == pytest.approx(bend, rel=1e-6)
    assert (supremum(function, 1) == math.inf) == (alpha < 0)
    assert supremum(named("celu", alpha=0.0), 0, -1.0, 1.0) == math.inf


@pytest.mark.parametrize(
    ("alpha", "scale", "inner"), [(-1.0, 1.0, 1.0), (2.0, -0.5, 1.0), (1.0, 1.0, -1.0), (0.0, 1, 1)]
)
def test_elu_with_unusual_parameters(alpha: float, scale: float, inner: float) -> None:
    function = named("elu", alpha=alpha, scale=scale, input_scale=inner)
    torch.testing.assert_close(function(POINTS), torch.ops.aten.elu(POINTS, alpha, scale, inner))
    ends = [abs(scale * alpha * inner) * math.exp(inner * end) for end in (-2.0, 0.0)]
    assert supremum(function, 1, -2.0, 2.0) == pytest.approx(max(abs(scale), *ends), rel=1e-6)
    assert supremum(function, 2, -2.0, 2.0) == math.inf


def test_hardshrink_of_a_negative_width_is_the_identity() -> None:
    assert named("hardshrink", lambd=-1.0)(POINTS).equal(F.hardshrink(POINTS, -1.0))
    assert named("hardshrink", lambd=0.5)(POINTS).equal(F.hardshrink(POINTS, 0.5))
    assert supremum(named("hardshrink", lambd=-1.0), 1) == 1.0
    assert supremum(named("hardshrink"), 1, 0.5, 1.0) == math.inf  # 0 at 0.5 itself


def test_clamp_with_exchanged_limits_and_powers_at_zero() -> None:
    assert named("clamp", min=2.0, max=-1.0)(POINTS).equal(torch.clamp(POINTS, 2.0, -1.0))
    assert supremum(named("clamp", min=2.0, max=-1.0), 0) == 1.0
    for exponent in (-1.0, -0.5, 0.5):
        assert supremum(x**exponent, 1, 0.0, 1.0) == supremum(x**exponent, 1, -1.0, 1.0) == math.inf
    for exponent in (-1.0, -0.5):
        assert supremum(x**exponent, 0, 0.0, 1.0) == math.inf


@pytest.mark.parametrize(
    "outer", [0.0 * x, named("clamp", min=2.0, max=1.0), named("hardtanh"), step, sign * sign]
)
def test_no_function_is_defined_where_its_argument_is_not(outer: ScalarFunction) -> None:
    for inner in (apply("log", x), apply("sqrt", x) + 1.0, 1.0 / apply("log", x)):
        function = outer.compose(inner)
        assert function(torch.tensor([-1.0])).isnan().all()
        for low, high in ((-1.0, 1.0), (-1.0, -1.0), (-math.inf, 2.0)):
            assert supremum(function, 0, low, high) == supremum(function, 1, low, high) == math.inf
        assert supremum(function, 0, 2.0, 3.0) <= 2.0
    assert supremum(0.0 * (1.0 / x), 0, 0.0, 1.0) == math.inf
    for constant in ((x - x) ** -0.5, apply("log", x - x), apply("sqrt", 0.0 * x - 1.0)):
        assert supremum(constant, 0, 0.0, 1.0) == supremum(constant, 1, 2.0, math.inf) == math.inf


def test_breaks_beyond_the_range_of_doubles() -> None:
    far = apply("relu", 1e-200 * x - 1e200)
    assert supremum(far, 1, -10.0, 10.0) == supremum(far, 2, -10.0, 10.0) == 0.0
    assert supremum(far, 1) >= 1e-200
    assert supremum(far, 2) == math.inf
    assert sup_on(far, 1, *ENDS).item() == 0.0
    steep = apply("relu", 1e200 * apply("relu", 1e200 * x) - 1.0)
    assert supremum(steep, 1, -1.0, 1e10) == math.inf  # 1e400
    assert supremum(steep, 1, -1.0, 0.0) == 0.0
    close = apply("relu", 1e200 * x - 1e-200)
    assert supremum(close, 2, -1.0, 0.0) == 0.0
    assert supremum(close, 2, 0.0, 1.0) == math.inf
    with pytest.raises(ValueError, match="increasing breaks"):
        ScalarFunction.piecewise([math.nan], [x, 0.0])


@pytest.mark.parametrize("exponent", [2.0, 5.0, 1e6])
def test_large_natural_powers_are_found_by_squaring(exponent: float) -> None:
    power = apply("sin", x) ** exponent
    assert 1.0 <= supremum(power, 0) <= 1.01
    assert supremum(power, 0, 0.25, 0.5) == pytest.approx(math.sin(0.5) ** exponent, abs=1e-9)
