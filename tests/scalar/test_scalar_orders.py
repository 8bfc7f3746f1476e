"""Suprema of the fourth and fifth derivatives: never exceeded, sharp, and infinite only where they are."""

from __future__ import annotations

import math

import pytest
import torch
from flint import arb, arb_series, ctx
from scalar_zoo import CASES, Case

from surefoot.scalar import ScalarFunction, derivatives, range_on, sup_on, supremum
from surefoot.scalar.enclosure import evaluate
from surefoot.scalar.tails import LENGTH

x = ScalarFunction.variable()
inf = math.inf
SMOOTH = [case for case in CASES if not case.kinks and case.name not in ("exp", "expm1", "sinh", "cosh")]
UNBOUNDED = [case for case in CASES if case not in SMOOTH]


def sampled(function: ScalarFunction, points: list[float]) -> list[arb_series]:
    """The Taylor series at the points, in balls of 200 bits."""
    with ctx.workprec(200):
        variables = [(point, arb_series([arb(point), 1], prec=LENGTH)) for point in points]
        return [evaluate(function, variable, (point, point))[0] for point, variable in variables]


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_global_suprema_are_finite_and_sharp(case: Case) -> None:
    """Every sample is below the bound, without any tolerance, and the largest one within 1 per cent."""
    points = [n / 64 for n in range(-400, 401)] + [-1e3, -100.0, 30.0, 1e3]
    series = sampled(case.function, points)
    for order in (4, 5):
        bound = supremum(case.function, order)
        table = float(sup_on(case.function, order, torch.tensor([-inf]), torch.tensor([inf])))
        values = [abs(at[order] * math.factorial(order)) for at in series]
        assert bound < inf
        assert not any(value > bound for value in values)
        largest = max(float(value) for value in values)
        assert bound <= 1.01 * largest
        assert bound * (1 - 1e-7) <= table <= 1.006 * bound


@pytest.mark.parametrize(
    ("name", "order", "value"),
    [
        ("tanh", 5, 16.0),  # tanh = x - x^3/3 + 2 x^5/15
        ("sigmoid", 5, 0.25),
        ("softplus", 4, 0.125),
        ("silu", 4, 0.5),
        ("sin", 4, 1.0),
        ("cos", 5, 1.0),
        ("erf", 5, 24 / math.sqrt(math.pi)),
        ("atan", 5, 24.0),
        ("asinh", 5, 9.0),
        ("gelu", 4, 4 / math.sqrt(2 * math.pi)),
    ],
)
def test_known_constants(name: str, order: int, value: float) -> None:
    """Attained at 0, but for sin and cos; from the Taylor series there."""
    assert value * (1 - 1e-12) <= supremum(ScalarFunction.named(name), order) <= value * (1 + 1e-7)


@pytest.mark.parametrize("case", UNBOUNDED, ids=str)
def test_infinite_where_they_are(case: Case) -> None:
    """Exponentials on the line; kinks exactly where they are reached."""
    for order in (4, 5):
        assert supremum(case.function, order) == inf
        for kink in case.kinks:
            point = torch.tensor([kink], dtype=torch.float64)
            assert supremum(case.function, order, kink - 0.1, kink + 0.1) == inf
            assert sup_on(case.function, order, point, point + 0.1).tolist() == [inf]
            assert sup_on(case.function, order, point + 1e-3, point + 0.1).isfinite().all()
            assert supremum(case.function, order, kink + 1e-9, kink + 0.1) < inf


@pytest.mark.parametrize("case", CASES, ids=str)
def test_intervals(case: Case) -> None:
    """Tables contain the samples, agree with branch and bound, and contain the signed range."""
    generator = torch.Generator().manual_seed(7)
    centre = torch.randn(400, generator=generator, dtype=torch.float64) * 4
    width = torch.rand(400, generator=generator, dtype=torch.float64) ** 3 * 3
    low, high = centre - width, centre + width
    points = low + (high - low) * torch.linspace(0, 1, 65, dtype=torch.float64)[:, None]
    coefficients = derivatives(case.function, points, 5)
    for order in (4, 5):
        bound = sup_on(case.function, order, low, high)
        assert not bound.isnan().any()
        reached = torch.stack([(low <= kink) & (kink <= high) for kink in (*case.kinks, inf)]).any(dim=0)
        assert (bound.isinf() == (reached & (order > case.smoothness))).all()
        values = (coefficients[order] * math.factorial(order)).abs().amax(dim=0)
        noise = 1e-12 * (1 + values + coefficients[0].abs().amax(dim=0))
        assert (values <= bound + noise).all()
        least, most = range_on(case.function, low, high, order=order)
        assert (torch.maximum(-least, most) <= bound * (1 + 1e-12) + 1e-290).all()
        scale = supremum(case.function, order, -8.0, 8.0)
        for index in range(6):
            exact = supremum(case.function, order, float(low[index]), float(high[index]))
            assert float(bound[index]) >= exact * (1 - 1e-7)
            if exact < inf:
                assert float(bound[index]) <= 1.01 * exact + 0.01 * (scale if scale < inf else max(1.0, exact))


def test_a_kink_of_higher_order() -> None:
    """relu(x)^5 has four continuous derivatives, and a fifth that jumps from 0 to 120."""
    spline = ScalarFunction.apply("relu", x) ** 5.0
    assert supremum(spline, 5, -1.0, 1.0) == pytest.approx(120.0, rel=1e-7)
    assert supremum(spline, 4, -1.0, 1.0) == pytest.approx(120.0, rel=1e-7)
    cubic = ScalarFunction.apply("relu", x) ** 3.0
    assert supremum(cubic, 3, -1.0, 1.0) == pytest.approx(6.0, rel=1e-7)
    assert supremum(cubic, 4, -1.0, 1.0) == inf
    ends = torch.tensor([-1.0, 0.01]), torch.tensor([1.0, 1.0])
    assert sup_on(spline, 5, *ends).tolist() == pytest.approx([120.0, 120.0], rel=1e-6)
    assert sup_on(cubic, 4, *ends).tolist()[0] == inf
