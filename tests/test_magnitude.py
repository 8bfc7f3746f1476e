"""Every operation on magnitudes stays above the exact result, and barely so."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import flint
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.magnitude import Magnitude, maximum, minimum, stack

CHECK = settings(deadline=None, derandomize=True, max_examples=120)

ORDINARY = st.floats(min_value=1e-100, max_value=1e100)
ANY = st.one_of(st.just(0.0), st.just(math.inf), st.floats(min_value=0.0, max_value=1.7e308, allow_subnormal=True))
LOG2 = st.floats(min_value=-1e6, max_value=1e6)


def exact(magnitude: Magnitude) -> flint.arb:
    """The number a magnitude represents, to 400 bits."""
    return flint.arb(2) ** flint.arb(float(magnitude.log2))


def assert_just_above(magnitude: Magnitude, true: flint.arb, size: float = 0.0) -> None:
    """At least the true value, inflated by at most 8 roundings of its logarithm or of one of that size."""
    represented = exact(magnitude)
    judge = 1 + flint.arb(2) ** -350  # where results are exact, the judge's own error shows
    assert bool(represented * judge >= true)
    steps = 8 * (max(abs(float(magnitude.log2)), size) + 2) * 2.0**-50
    assert bool(represented <= judge * true * flint.arb(2) ** flint.arb(steps))


@pytest.fixture(autouse=True)
def _many_bits():
    with flint.ctx.workprec(400):
        yield


@CHECK
@given(ANY)
def test_of_rounds_up(value: float) -> None:
    with flint.ctx.workprec(400):
        if value in (0.0, math.inf):
            assert float(Magnitude.of(value)) == value
        else:
            assert_just_above(Magnitude.of(value), flint.arb(value))
            assert_just_above(Magnitude.of(np.array([value]))[0], flint.arb(value))


@CHECK
@given(ORDINARY, ORDINARY)
def test_sum_product_and_quotient(a: float, b: float) -> None:
    with flint.ctx.workprec(400):
        x, y = Magnitude.of(a), Magnitude.of(b)
        size = max(abs(x.log2), abs(y.log2))
        left, right = flint.arb(a), flint.arb(b)
        assert_just_above(x + y, left + right, size)
        assert_just_above(x * y, left * right, size)
        assert_just_above(x / b, left / right, size)
        arrays = Magnitude.of(np.array([a, a])), Magnitude.of(np.array([b, 2 * b]))
        assert_just_above((arrays[0] + arrays[1])[1], left + 2 * right, size)
        assert_just_above((arrays[0] * arrays[1])[1], left * 2 * right, size)


@CHECK
@given(LOG2, LOG2)
def test_represented_numbers_of_any_size_add_and_multiply(a: float, b: float) -> None:
    """Operands given by their logarithms: beyond the range of doubles, and without the rounding of ``of``."""
    with flint.ctx.workprec(400):
        for make in (Magnitude, lambda log2: Magnitude(np.array([log2]))):
            x, y = make(a), make(b)
            total, product = (x + y), (x * y)
            total, product = (total, product) if not total.shape else (total[0], product[0])
            left, right = exact(Magnitude(a)), exact(Magnitude(b))
            assert_just_above(total, left + right)
            assert_just_above(product, left * right)
            quotient = x / 3
            assert_just_above(quotient[0] if quotient.shape else quotient, left / 3)
            assert_just_above(Magnitude(a) / 1024, left / 1024)


@CHECK
@given(LOG2, st.floats(min_value=0.0, max_value=50.0))
def test_power(log2: float, exponent: float) -> None:
    with flint.ctx.workprec(400):
        true = flint.arb(2) ** (flint.arb(log2) * flint.arb(exponent))
        assert_just_above(Magnitude(log2) ** exponent, true)
        assert_just_above((Magnitude(np.array([log2])) ** exponent)[0], true)


@CHECK
@given(st.lists(st.floats(min_value=0.0, max_value=1e300), min_size=1, max_size=40))
def test_sum_norm_max_and_min_of_arrays(values: list[float]) -> None:
    with flint.ctx.workprec(400):
        array = Magnitude.of(np.array(values))
        fractions = [Fraction(value) for value in values]
        total = sum(fractions)
        squares = sum(value * value for value in fractions)
        if total == 0:
            assert array.sum().is_zero
            assert array.norm().is_zero
            return
        assert_just_above(array.sum(), flint.arb(flint.fmpq(total.numerator, total.denominator)))
        square = flint.arb(flint.fmpq(squares.numerator, squares.denominator))
        assert_just_above(array.norm(), square.sqrt())
        assert array.max() == max(values)
        assert array.min() == min(values)


@CHECK
@given(LOG2.filter(lambda log2: abs(log2) < 1000))
def test_conversion_to_double_rounds_up(log2: float) -> None:
    with flint.ctx.workprec(400):
        value = float(Magnitude(log2))
        assert bool(flint.arb(value) >= exact(Magnitude(log2)))
        assert bool(flint.arb(value) <= exact(Magnitude(log2)) * (1 + flint.arb(1e-14)))


@pytest.mark.parametrize("log2", [-1074.5, -1030.25, -1e9, 1023.9999, 1024.0, 1e9])
def test_conversion_at_the_ends_of_the_doubles(log2: float) -> None:
    value = float(Magnitude(log2))
    assert value > 0
    assert value == math.inf if log2 >= 1024 else bool(flint.arb(value) >= exact(Magnitude(log2)))


@CHECK
@given(ANY, ANY, st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_no_operation_yields_nan(a: float, b: float, exponent: float) -> None:
    for make in (Magnitude.of, lambda value: Magnitude.of(np.array([value]))):
        x, y = make(a), make(b)
        results = [x + y, x * y, x**exponent, x / 7, x.sum(), x.norm(), maximum(x, y), minimum(x, y)]
        assert not any(np.isnan(result.numpy()).any() for result in results)


def test_zero_times_infinity_is_zero() -> None:
    zero, infinity = Magnitude.zero(), Magnitude.infinity()
    assert (zero * infinity).is_zero
    assert (infinity * zero).is_zero
    assert (Magnitude.of(np.array([0.0, 1.0])) * infinity).numpy().tolist() == [0.0, math.inf]
    assert not (zero + infinity).is_finite


def test_what_should_be_exact_is_exact() -> None:
    one = Magnitude.of(1.0)
    three = Magnitude.of(3.0)
    assert float(one) == 1.0
    assert float(one + 0.0) == 1.0
    assert three * 1.0 == three
    assert three**1 == three
    assert float(Magnitude.of(4.0) / 8 * 2) == 1.0
    assert float(one**7.5) == 1.0
    assert float(Magnitude.of(2**60)) == 2.0**60
    assert Magnitude.of(np.array([1.0, 0.5])).numpy().tolist() == [1.0, 0.5]


def test_integers_beyond_doubles_are_rounded_up() -> None:
    number = 2**60 + 1
    for magnitude in (
        Magnitude.of(number),
        Magnitude.of(np.array([number]))[0],
        Magnitude.of(torch.tensor([number]))[0],
    ):
        assert bool(exact(magnitude) >= flint.arb(number))
    assert bool(exact(Magnitude.of(10**400)) >= flint.arb(10**400))
    assert bool(exact(Magnitude.of(1.0) / 10**400) >= 1 / flint.arb(10**400))


@CHECK
@given(ANY, ANY)
def test_ordering_is_that_of_the_numbers(a: float, b: float) -> None:
    x, y = Magnitude.of(a), Magnitude.of(b)
    if a < b:
        assert x <= y
        assert not x > y
    assert x == a
    assert x <= a
    assert x >= a
    assert (x < y) == (not x >= y)
    assert maximum(x, y) == max(a, b)
    assert minimum(x, y) == min(a, b)
    assert hash(x) == hash(Magnitude.of(a))


def test_equality_with_what_is_no_magnitude() -> None:
    assert Magnitude.of(1.0) != -1.0
    assert Magnitude.of(1.0) != math.nan
    assert Magnitude.of(1.0) != "one"
    assert hash(Magnitude(0.0)) == hash(Magnitude(-0.0))


@CHECK
@given(LOG2, st.integers(min_value=0, max_value=8))
def test_printed_number_is_not_below_the_exact_one(log2: float, digits: int) -> None:
    """It exceeds the exact one by at most one unit of its last digit, or is the nearest within 1e-12."""
    with flint.ctx.workprec(400):
        magnitude = Magnitude(log2)
        mantissa, exponent = magnitude.format(digits).split("e")
        assert len(mantissa) == (digits + 2 if digits else 1)
        assert 1 <= float(mantissa) < 10
        unit = flint.arb(10) ** int(exponent)
        printed = flint.arb(mantissa) * unit
        assert bool(printed >= exact(magnitude) - flint.arb("1.01e-12") * unit)
        assert bool(printed <= exact(magnitude) + flint.arb("1.01") * flint.arb(10) ** -digits * unit)


@pytest.mark.parametrize(
    ("magnitude", "text"),
    [
        (Magnitude.zero(), "0"),
        (Magnitude.infinity(), "∞"),
        (Magnitude.of(1.0), "1.000e+00"),
        (Magnitude.of(0.1) * 10, "1.000e+00"),
        (Magnitude.of(9.9999), "1.000e+01"),
        (Magnitude.of(1.0001), "1.001e+00"),
        (Magnitude.of(2.0) ** 10000, "1.996e+3010"),
        (Magnitude(1e16), "10^3.011e+15"),
        (Magnitude(-1e16), "10^-3.010e+15"),
        (Magnitude.of(np.array([1.0, 2.0])), "[1.000e+00, 2.000e+00]"),
    ],
)
def test_printing(magnitude: Magnitude, text: str) -> None:
    assert str(magnitude) == text
    assert text in repr(magnitude)
    assert f"{magnitude:>20}" == text.rjust(20)


def test_a_thousand_layers_neither_overflow_nor_vanish() -> None:
    product, tiny = Magnitude.of(1.0), Magnitude.of(1.0)
    for _ in range(1000):
        product, tiny = product * 16.5, tiny * 0.125
    assert product.is_finite
    assert float(product) == math.inf
    assert bool(exact(product) >= flint.arb(16.5) ** 1000)
    assert str(product) == "3.048e+1217"
    assert float(tiny) == sys.float_info.min
    assert not tiny.is_zero
    assert not (Magnitude(-1.7e308) * Magnitude(-1.7e308)).is_zero
    assert not (Magnitude(-1.7e308) ** 50).is_zero
    assert not (Magnitude(np.array([-1.7e308])) ** 50).is_zero


def test_arrays_behave_like_their_entries() -> None:
    values = np.array([[1.0, 2.0, 3.0], [0.0, 5.0, math.inf]])
    array = Magnitude.of(torch.from_numpy(values))
    assert array.shape == (2, 3)
    assert len(array) == 2
    assert [float(entry.max()) for entry in array] == [float(Magnitude.of(3.0)), math.inf]
    assert array.sum(axis=0).shape == (3,)
    assert array.sum(axis=1)[1] == math.inf
    assert array[0].norm() >= Magnitude.of(math.sqrt(13.99))
    assert stack([array[0], array[0]]).shape == (2, 3)
    assert array.tensor().dtype == torch.float64
    assert array.tensor().shape == (2, 3)
    assert maximum(1.0, array).shape == (2, 3)
    assert maximum().is_zero
    assert not minimum().is_finite


def test_sums_of_nothing_are_zero() -> None:
    assert Magnitude.zero((0,)).sum().is_zero
    assert Magnitude.zero((0, 2)).sum(axis=0).is_zero
    assert Magnitude.zero((3,)).sum().is_zero


def test_array_times_magnitude_is_a_magnitude() -> None:
    product = np.array([2.0, 0.0]) * Magnitude.of(4.0)
    assert isinstance(product, Magnitude)
    assert product.numpy().tolist() == [8.0, 0.0]


@pytest.mark.parametrize("value", [-1.0, math.nan, np.array([1.0, -2.0]), torch.tensor([math.nan])])
def test_what_is_negative_or_nan_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        Magnitude.of(value)  # type: ignore[arg-type]


def test_operations_that_bound_nothing_are_refused() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        Magnitude.of(2.0) - Magnitude.of(1.0)  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        2.0 - Magnitude.of(1.0)  # type: ignore[operator]
    with pytest.raises(ValueError, match="positive"):
        Magnitude.of(1.0) / 0
    with pytest.raises(ValueError, match="exponent"):
        Magnitude.of(2.0) ** -1
    with pytest.raises(ValueError, match="NaN"):
        Magnitude(math.nan)


@CHECK
@given(LOG2, LOG2, ORDINARY)
def test_quotients_of_represented_numbers_round_up(a: float, b: float, number: float) -> None:
    with flint.ctx.workprec(400):
        x, y = Magnitude(a), Magnitude(b)
        assert_just_above(x / y, exact(x) / exact(y), max(abs(a), abs(b)))
        assert_just_above(number / y, flint.arb(number) / exact(y), abs(b) + 400)
        assert_just_above(2 * x, 2 * exact(x), abs(a))
        assert_just_above((Magnitude(np.array([a])) / y)[0], exact(x) / exact(y), max(abs(a), abs(b)))


def test_quotients_at_the_ends() -> None:
    zero, one, infinity = Magnitude.zero(), Magnitude.of(1.0), Magnitude.infinity()
    assert 1 / zero == one / zero == zero / zero == infinity / infinity == infinity / one == math.inf
    assert 1 / infinity == zero / infinity == zero / one == 0
    assert (np.array([1.0, 0.0]) / one).numpy().tolist() == [1.0, 0.0]
    assert (1 / Magnitude.of(np.array([4.0, 0.0]))).numpy().tolist() == [0.25, math.inf]


def test_comparison_with_any_number() -> None:
    one, pair = Magnitude.of(1.0), Magnitude.of(np.array([0.0, 2.0]))
    assert one > -1.0
    assert one >= -math.inf
    assert not one < -1
    assert not one <= math.nan
    assert -1.0 < Magnitude.zero() < 1e-300
    assert 0.5 < one < math.inf
    assert (pair > -1.0).tolist() == [True, True]
    assert (pair > 1.0).tolist() == [False, True]
    assert math.isfinite(one)
    assert not math.isfinite(Magnitude.infinity())
    assert one
    assert not Magnitude.zero()
    assert sum([one, one, one]) >= 3.0


@pytest.mark.parametrize(
    ("magnitude", "spec", "text"),
    [
        (Magnitude.of(1.2341), ".3g", "1.24"),
        (Magnitude.of(1.0), ".3g", "1"),
        (Magnitude.of(0.1) * 10, "g", "1"),
        (Magnitude.of(1.2341), "10.3f", "     1.235"),
        (Magnitude.of(1e-20), ".2f", "0.01"),
        (Magnitude.of(0.123456), ".1%", "12.4%"),
        (Magnitude.of(123456.0), ",.0f", "123,456"),
        (Magnitude.of(9.9999), ".2e", "1.00e+01"),
        (Magnitude.of(2.0) ** 10000, ".3g", "2e+3010"),
        (Magnitude.of(2.0) ** 10000, ".4g", "1.996e+3010"),
        (Magnitude.of(2.0) ** 10000, ".2f", "2.00e+3010"),
        (Magnitude.of(0.5) ** 10000, ">12.2e", "  5.02e-3011"),
        (Magnitude(1e16), ".2g", "10^3.02e+15"),
        (Magnitude.infinity(), ".3g", "inf"),
        (Magnitude.zero(), ".1f", "0.0"),
        (Magnitude.of(3.0), "", "3.000e+00"),
        (Magnitude.of(3.0), "<11", "3.000e+00  "),
    ],
)
def test_specifications_of_numbers(magnitude: Magnitude, spec: str, text: str) -> None:
    assert format(magnitude, spec) == text


@CHECK
@given(LOG2, st.integers(min_value=1, max_value=9), st.sampled_from("eEgG"))
def test_formatted_numbers_are_not_below(log2: float, digits: int, kind: str) -> None:
    with flint.ctx.workprec(400):
        printed = flint.arb(format(Magnitude(log2), f".{digits}{kind}"))
        assert bool(printed >= exact(Magnitude(log2)) * (1 - flint.arb("1.01e-11")))
        assert bool(printed <= exact(Magnitude(log2)) * (1 + flint.arb("1.01") * flint.arb(10) ** (1 - digits)))
