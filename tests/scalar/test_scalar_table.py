"""Suprema over many intervals: sound, sharp, and in agreement with those over one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_zoo import CASES, HALF_LINE, Case, derivatives, off_kinks

from surefoot.scalar import ScalarFunction, range_on, sup_on, supremum

x = ScalarFunction.variable()
apply = ScalarFunction.apply
inf = math.inf


def intervals(seed: int, count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, narrow and wide intervals, around 0 and far away."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(count, generator=generator, dtype=torch.float64) * 3
    centre[::17] *= 30
    width = torch.rand(count, generator=generator, dtype=torch.float64) ** 4 * 10
    width[::5] = 0
    return centre - width / 2, centre + width / 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sound_against_samples(case: Case) -> None:
    low, high = intervals(0)
    fractions = torch.linspace(0, 1, 65, dtype=torch.float64)[:, None]
    points = low + (high - low) * fractions
    away = torch.stack([(points - kink).abs() > 1e-9 for kink in (*case.kinks, inf)]).all(dim=0)
    sampled = derivatives(case.judge, points)
    for order in range(4):
        bound = sup_on(case.function, order, low, high)
        assert bound.dtype == torch.float64
        assert not bound.isnan().any()
        largest = torch.where(away, sampled[order].abs(), 0.0).nan_to_num(nan=0.0).amax(dim=0)
        scale = torch.maximum(bound, sampled[0].abs().amax(dim=0)).clamp(max=1e30)
        assert (largest <= bound + 1e-9 * scale).all()
        reached = torch.stack([(low <= kink) & (kink <= high) for kink in (*case.kinks, inf)]).any(dim=0)
        assert (bound.isinf() == (reached & (order > case.smoothness))).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_supremum_over_one_interval(case: Case) -> None:
    low, high = intervals(1, 12)
    low, high = low.clamp(-15, 15), high.clamp(-15, 15)  # beyond, cells grow with the distance
    for order in range(4):
        bounds = sup_on(case.function, order, low, high).tolist()
        scale = supremum(case.function, order, -8.0, 8.0)
        for index, bound in enumerate(bounds):
            exact = supremum(case.function, order, float(low[index]), float(high[index]))
            assert bound >= exact * (1 - 1e-7)
            assert bound == exact or bound <= 1.01 * exact + 0.005 * (scale if scale < inf else 1.0)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(
    st.sampled_from(CASES),
    st.floats(-1e4, 1e4),
    st.one_of(st.just(0.0), st.floats(0, 1e-3), st.floats(0, 1e5)),
    st.integers(0, 3),
)
def test_random_intervals(case: Case, low: float, width: float, order: int) -> None:
    high = low + width
    ends = torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64)
    bound = float(sup_on(case.function, order, *ends))
    points = off_kinks(torch.linspace(low, high, 101, dtype=torch.float64).clamp(low, high), case.kinks)
    values = derivatives(case.judge, points)[order] if len(points) else torch.zeros(1)
    values = values[values.isfinite()].abs()
    assert not math.isnan(bound)
    assert not len(values) or float(values.max()) <= bound * (1 + 1e-9) + 1e-9
    least, most = range_on(case.function, *ends, order=order)
    assert max(-float(least), float(most)) <= bound * (1 + 1e-12) + 1e-290


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_line_and_half_lines(case: Case) -> None:
    low = torch.tensor([-inf, -inf, 1.0, 1e200, -inf], dtype=torch.float64)
    high = torch.tensor([inf, -1.0, inf, inf, -1e250], dtype=torch.float64)
    for order in range(4):
        bounds = sup_on(case.function, order, low, high)
        assert not bounds.isnan().any()
        exact = supremum(case.function, order)
        assert float(bounds[0]) >= exact * (1 - 1e-7)
        assert float(bounds[0]) <= exact * 1.005
        assert (bounds[1:] <= bounds[0]).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_enclosed(case: Case) -> None:
    low, high = intervals(2)
    least, most = range_on(case.function, low, high)
    points = low + (high - low) * torch.linspace(0, 1, 33, dtype=torch.float64)[:, None]
    values = case.torch(points)
    slack = 1e-11 * (1 + values.abs().amax(dim=0)) + math.exp(-20)
    assert (least <= values.amin(dim=0) + slack).all()
    assert (most >= values.amax(dim=0) - slack).all()


def test_signs_are_kept() -> None:
    low, high = intervals(3)
    positive = range_on(ScalarFunction.named("softplus"), low, high, order=2)[0]
    assert (positive >= -1e-15).all()
    assert (range_on(ScalarFunction.named("sigmoid"), low, high)[0] >= 0).all()
    assert (range_on(ScalarFunction.named("exp"), low, high)[0] > 0).all()
    assert (range_on(ScalarFunction.named("silu"), torch.tensor([1.0]), torch.tensor([2.0]))[0] > 0.7).all()


def test_exactly_zero_and_exactly_one() -> None:
    relu = ScalarFunction.named("relu")
    low = torch.tensor([-3.0, -3.0, 0.0, 1e-9, 5.0, 1e9])
    high = torch.tensor([-1e-9, 0.0, 0.0, 4.0, 5.0, 2e9])
    assert sup_on(relu, 1, low, high).tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert sup_on(relu, 2, low, high).tolist() == [0.0, inf, inf, 0.0, 0.0, 0.0]
    assert sup_on(ScalarFunction.constant(2.0), 0, low, high).tolist() == pytest.approx([2.0] * 6)
    assert sup_on(ScalarFunction.constant(2.0), 1, low, high).tolist() == [0.0] * 6


@pytest.mark.parametrize("threshold", [0.3, 1 / 3, 7.123, 40.7, 1e12, 1e25])
def test_kinks_between_the_cells(threshold: float) -> None:
    function = ScalarFunction.named("softshrink", lambd=threshold)
    kinks = torch.tensor([threshold, -threshold], dtype=torch.float64)
    above = torch.nextafter(kinks, torch.full_like(kinks, inf))
    below = torch.nextafter(kinks, torch.full_like(kinks, -inf))
    assert sup_on(function, 2, kinks, kinks).tolist() == [inf, inf]
    assert sup_on(function, 2, below, above).tolist() == [inf, inf]
    assert sup_on(function, 1, above, above).tolist()[0] == pytest.approx(1.0)
    if threshold < 1e18:  # beyond, the cells are half lines
        assert sup_on(function, 2, above, above).tolist() == [0.0, 0.0]
        assert sup_on(function, 1, above, above).tolist() == [1.0, 0.0]
        assert sup_on(function, 1, below, below).tolist() == [0.0, 1.0]


def test_several_kinks_in_one_cell_and_kinks_that_are_no_doubles() -> None:
    comb = apply("relu", x - 0.01) + apply("relu", 0.02 - x) + apply("relu", 3.0 * x - 0.05)
    low = torch.tensor([0.0, 0.012, 0.019, 0.021, 0.05 / 3 - 1e-12], dtype=torch.float64)
    high = torch.tensor([0.009, 0.014, 0.021, 1.0, 0.05 / 3 + 1e-12], dtype=torch.float64)
    assert sup_on(comb, 2, low, high).tolist() == [0.0, 0.0, inf, 0.0, inf]
    assert sup_on(comb, 1, low, high).tolist() == pytest.approx([1.0, 0.0, 4.0, 4.0, 3.0], abs=1e-8)


@pytest.mark.parametrize(("name", "torch_function", "parameters"), HALF_LINE)
def test_undefined_somewhere(name, torch_function, parameters) -> None:
    function = ScalarFunction.named(name, **parameters)
    low = torch.tensor([-2.0, -1.0, 0.0, 0.5, 3.0, 1e6, -inf], dtype=torch.float64)
    high = torch.tensor([-1.0, 1.0, 0.0, 2.0, 3.0, 2e6, inf], dtype=torch.float64)
    for order in range(4):
        bounds = sup_on(function, order, low, high)
        assert not bounds.isnan().any()
        assert bounds[[1, 2, 6]].isinf().all()
        for index in (3, 4, 5):
            exact = supremum(function, order, float(low[index]), float(high[index]))
            assert exact * (1 - 1e-7) <= float(bounds[index]) <= exact * 1.3


def test_huge_values_overflow_to_infinity_without_nan() -> None:
    points = torch.tensor([600.0, 709.0, 1000.0, 1e30, -1e30], dtype=torch.float64)
    for order in range(4):
        bounds = sup_on(ScalarFunction.named("exp"), order, points, points)
        assert not bounds.isnan().any()
        assert (bounds >= torch.exp(points)).all()
        assert float(bounds[0]) < inf


def test_underflow_is_not_zero() -> None:
    points = torch.tensor([-60.0, -200.0], dtype=torch.float64)
    assert (sup_on(ScalarFunction.named("gelu"), 1, points, points) > 0).all()


def test_steep_functions_have_finer_cells() -> None:
    steep = ScalarFunction.named("softplus", beta=100.0)
    points = torch.linspace(-0.2, 0.2, 41, dtype=torch.float64)
    exact = torch.tensor([supremum(steep, 2, float(p), float(p)) for p in points], dtype=torch.float64)
    assert (sup_on(steep, 2, points, points) <= exact * 1.01 + 0.05).all()


def test_shapes_and_dtypes() -> None:
    function = ScalarFunction.named("tanh")
    low = torch.zeros(2, 1, 3, dtype=torch.float32, requires_grad=True)
    high = torch.ones(4, 1, dtype=torch.float16)
    bound = sup_on(function, 1, low, high)
    assert bound.shape == (2, 4, 3)
    assert not bound.requires_grad
    assert sup_on(function, 1, torch.tensor(0.0), torch.tensor(0.0)).shape == ()
    assert sup_on(function, 1, torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_refuses_what_makes_no_sense() -> None:
    one = torch.ones(3)
    with pytest.raises(ValueError, match="low <= high"):
        sup_on(x, 1, one, -one)
    with pytest.raises(ValueError, match="low <= high"):
        range_on(x, one * math.nan, one)
    with pytest.raises(ValueError, match="order from 0 to 5"):
        sup_on(x, 6, one, one)
