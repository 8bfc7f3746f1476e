"""Taylor coefficients on tensors against ninety digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import mpmath
import pytest
import torch
from scalar_zoo import CASES, HALF_LINE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.scalar import ScalarFunction, derivatives, taylor
from surefoot.scalar.primitives import PRIMITIVES

x = ScalarFunction.variable()
apply = ScalarFunction.apply
ORDER = 4
UNIT = 2.0**-53

EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "pow": lambda a, e: a ** (int(e) if e.is_integer() else mpmath.mpf(e)),
    "reciprocal": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / mpmath.sqrt(a),
    "sigmoid": lambda a: 1 / (1 + mpmath.exp(-a)),
    "softplus": lambda a: mpmath.log1p(mpmath.exp(a)),
}

FUNCTIONS = {str(case): case.function for case in CASES}
POSITIVE = {f"{name} {parameters}": ScalarFunction.named(name, **parameters) for name, _, parameters in HALF_LINE}
WRITTEN_OUT = {
    "quotient": (1.0 + x) / (2.0 + x * x),
    "constant over": 2.0 / (1.0 + apply("exp", x)),
    "power of a sum": (1.0 + x**2.0) ** -1.5,
    "fifth power": apply("sin", x) ** 5.0,
    "log1p": apply("log1p", apply("exp", -apply("abs", x))),
    "tangent": apply("tan", 0.3 * apply("tanh", x)),
    "inner kink": apply("relu", apply("sin", x)) * x,
    "constant argument": x * apply("elu", -1.0) + apply("hardtanh", ScalarFunction.constant(0.3)),
    "nested": apply("gelu", apply("softplus", x) - 1.0) - apply("asinh", x) * apply("sigmoid", 2.0 * x),
}
POINTS = [-40.0, -7.3, -1.7, -0.4, -1e-5, 0.0, 1e-5, 0.6, 1.3, 2.9, 8.1, 40.0]


def _apply(exact: Callable[..., Any], parameters: tuple[float, ...], *arguments: Any) -> Any:
    return exact(*arguments, *parameters)


def frozen(function: ScalarFunction, centre: Any) -> tuple[Callable[[Any], Any], Any]:
    """The function in the numbers of mpmath, with the pieces at the centre; and its value there."""
    values, rules = [], []
    for step in function.steps:
        if step.op == "variable":
            rule, value = None, centre
        elif step.op == "constant":
            value = mpmath.mpf(step.parameters[0])
            rule = partial(mpmath.mpf, value)
        elif step.op == "piecewise":
            argument = values[step.operands[0]]
            rule, value = frozen(step.pieces[sum(argument > point for point in step.parameters)], argument)
        else:
            rule = partial(_apply, EXACT.get(step.op) or getattr(mpmath, step.op), step.parameters)
            value = rule(*(values[index] for index in step.operands))
        values.append(value)
        rules.append(rule)

    def evaluate(at: Any) -> Any:
        results: list[Any] = []
        for step, rule in zip(function.steps, rules, strict=True):
            results.append(at if rule is None else rule(*(results[index] for index in step.operands)))
        return results[-1]

    return evaluate, values[-1]


def powers(series: list[Any]) -> list[list[Any]]:
    """The coefficients of the powers 0, …, k of a polynomial without constant term."""
    length = len(series)
    result = [[mpmath.mpf(1)] + [mpmath.mpf(0)] * (length - 1)]
    for _ in range(length - 1):
        last = result[-1]
        result.append([sum(last[i] * series[m - i] for i in range(m)) for m in range(length)])
    return result


@lru_cache(maxsize=1024)
def coefficients_at(function: ScalarFunction, point: float, order: int) -> list[Any]:
    """Taylor coefficients by difference quotients with ninety digits."""
    with mpmath.workdps(90):
        centre = mpmath.mpf(point)
        return mpmath.taylor(frozen(function, centre)[0], centre, order)


def judge(function: ScalarFunction, p: list[float]) -> tuple[list[Any], list[Any]]:
    """The coefficients of a(p), and how much they change if p changes by one in its size, x by at least one.

    Both by the formula of Faà di Bruno, from the Taylor coefficients of a itself.
    """
    with mpmath.workdps(90):
        centre, *rest = map(mpmath.mpf, p)
        outer = coefficients_at(function, p[0], len(p))
        plain = powers([mpmath.mpf(0), *rest])
        sizes = powers([mpmath.mpf(0), *map(abs, rest)])
        exact = [sum(outer[i] * plain[i][m] for i in range(m + 1)) for m in range(len(p))]
        reach = 1 + abs(centre)
        change = [abs(outer[i]) + reach * (i + 1) * abs(outer[i + 1]) for i in range(len(p))]
        return exact, [sum(change[i] * sizes[i][m] for i in range(m + 1)) for m in range(len(p))]


def check(
    function: ScalarFunction, series: list[Tensor | None], found: list[Tensor | None], absolute: float
) -> None:
    """Every entry of every coefficient is within some units in the last place of the judge's."""
    full = [torch.zeros_like(series[0]) if c is None else c for c in series]
    shown = [torch.zeros_like(series[0]) if c is None else c for c in found]
    for index in range(len(series[0])):
        exact, size = judge(function, [float(c[index]) for c in full])
        for order, (true, scale) in enumerate(zip(exact, size, strict=True)):
            error = abs(mpmath.mpf(float(shown[order][index])) - true)
            allowed = 64 * UNIT * scale + absolute + 1e-300
            assert error <= allowed, (order, float(full[0][index]), float(error), float(allowed), float(true))


def polynomial(points: list[float], seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(points),)
    rest = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(ORDER)]
    return [torch.tensor(points, dtype=torch.float64), *rest]


@pytest.mark.parametrize("name", [*FUNCTIONS, *WRITTEN_OUT, *POSITIVE])
def test_every_function_against_many_digits(name: str) -> None:
    function = {**FUNCTIONS, **WRITTEN_OUT, **POSITIVE}[name]
    points = [1e-5, 0.3, 1.7, 40.0] if name in POSITIVE else POINTS
    absolute = 8 * UNIT if name in ("tanhshrink", "nested") else 0.0  # a difference, which cancels
    series = polynomial(points, len(name))
    check(function, series, taylor(function, series), absolute)
    line = [series[0], series[1], None, None, series[4]]
    check(function, line, taylor(function, line), absolute)
    along = [series[0], torch.ones_like(series[0]), None, None, None]
    check(function, along, derivatives(function, series[0], ORDER), absolute)


def test_every_primitive_is_met() -> None:
    every = [*FUNCTIONS.values(), *WRITTEN_OUT.values(), *POSITIVE.values()]
    assert {step.op for function in every for step in function.steps} >= set(PRIMITIVES)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softplus", "silu", "mish", "erfc", "elu", "log_sigmoid"])
def test_small_coefficients_keep_their_digits(name: str) -> None:
    """Far out the coefficients decay; none is lost in the difference of large ones."""
    function = ScalarFunction.named(name)
    for point in (-8.0, 8.0) if name == "erfc" else (-19.5, 19.5):
        found = derivatives(function, torch.tensor([point], dtype=torch.float64), ORDER)
        exact, _ = judge(function, [point, 1.0, 0.0, 0.0, 0.0])
        for order in range(ORDER + 1):
            assert abs(mpmath.mpf(float(found[order])) - exact[order]) <= 1e-12 * abs(exact[order])


def test_the_value_is_that_of_the_function() -> None:
    points = torch.linspace(-50, 50, 401, dtype=torch.float64)
    for function in FUNCTIONS.values():
        for order in (0, 1, 3):
            coefficients = taylor(function, [points, *[points.cos()] * order])
            assert len(coefficients) == order + 1
            assert coefficients[0].equal(function(points))
            assert derivatives(function, points, order)[0].equal(function(points))


def test_lower_orders_do_not_depend_on_how_many_there_are() -> None:
    series = polynomial(POINTS, 5)
    for function in [*FUNCTIONS.values(), *WRITTEN_OUT.values()]:
        longest = taylor(function, series)
        for order in range(ORDER):
            for short, long in zip(taylor(function, series[: order + 1]), longest, strict=False):
                assert (short is None) == (long is None)
                assert short is None or short.equal(long)


def test_zero_is_none_where_it_is_known() -> None:
    point, one = torch.full((3,), 0.5, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    nothing = [point, None, None]
    for function in FUNCTIONS.values():
        assert taylor(function, nothing)[1:] == [None, None]
    assert [c is None for c in taylor(x**2.0, [point, one, None, None, None])] == [False] * 3 + [True] * 2
    assert [c is None for c in taylor(apply("relu", x), [point, None, one])] == [False, True, False]
    assert [c is None for c in taylor(apply("sin", x), [point, None, one, None, None])] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert taylor(ScalarFunction.constant(2.0), [point, one])[0].tolist() == [2.0] * 3
    assert taylor(ScalarFunction.constant(2.0), [point, one])[1] is None
    assert [c.tolist() for c in derivatives(3.0 * x, point, 2)] == [[1.5] * 3, [3.0] * 3, [0.0] * 3]
    assert [c.tolist() for c in derivatives(x, point, 0)] == [[0.5] * 3]


def test_pieces_are_chosen_entry_by_entry() -> None:
    points = torch.tensor([-2.0, 0.0, 5e-324, 3.0], dtype=torch.float64)
    assert derivatives(apply("relu", x), points, 1)[1].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert derivatives(apply("abs", x), points, 1)[1].tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert derivatives(apply("hardswish", x), points, 2)[2].tolist() == pytest.approx([1 / 6] * 4)
    far = torch.tensor([-1e4, 1e4], dtype=torch.float64)  # the other piece overflows
    assert derivatives(ScalarFunction.named("elu"), far, 3)[1].tolist() == [0.0, 1.0]


def test_far_away_nothing_overflows() -> None:
    far = torch.tensor([-1e8, -800.0, 800.0, 1e8], dtype=torch.float64)
    one = torch.ones_like(far)
    for name in ("tanh", "sigmoid", "softplus", "gelu", "silu", "mish", "erf", "erfc", "atan", "asinh", "sin"):
        for coefficient in taylor(ScalarFunction.named(name), [far, one, one, one]):
            assert coefficient.isfinite().all()


def test_what_is_given_is_not_changed() -> None:
    series = polynomial(POINTS, 3)
    before = [c.clone() for c in series]
    for function in [*FUNCTIONS.values(), *WRITTEN_OUT.values()]:
        taylor(function, series)
        derivatives(function, series[0], ORDER)
        assert all(a.equal(b) for a, b in zip(series, before, strict=True))


def test_can_be_differentiated() -> None:
    """The derivative of the coefficient of order 2 with respect to x is 3 times that of order 3."""
    for name in ("tanh", "softplus", "gelu", "elu", "atan", "asinh", "cos", "mish"):
        points = torch.tensor([-1.2, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
        *_, second, third = derivatives(ScalarFunction.named(name), points, 3)
        gradient = torch.autograd.grad(second.sum(), points)[0] if second.requires_grad else 0 * points
        torch.testing.assert_close(gradient, 3 * third, rtol=1e-11, atol=1e-13)


class Counter(TorchDispatchMode):
    """Counts tensor operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "most"), [("exp", 7), ("tanh", 15), ("sigmoid", 15), ("softplus", 18), ("relu", 9)]
)
def test_few_operations(name: str, most: int) -> None:
    series = polynomial(POINTS, 1)[:4]
    with Counter() as counter:
        taylor(ScalarFunction.named(name), series)
    assert counter.count <= most


def test_shapes_and_refusals() -> None:
    series = [torch.zeros(2, 0, 3, dtype=torch.float64)] * 3
    assert all(c.shape == (2, 0, 3) for c in taylor(ScalarFunction.named("gelu"), series))
    scalar = derivatives(ScalarFunction.named("tanh"), torch.tensor(0.0, dtype=torch.float64), 3)
    assert [float(c) for c in scalar] == pytest.approx([0.0, 1.0, 0.0, -1 / 3])
    single = taylor(ScalarFunction.named("gelu"), [torch.ones(2), torch.ones(2)])
    assert all(c.dtype == torch.float32 for c in single)
    for wrong in ([], [None, torch.ones(2)]):
        with pytest.raises(ValueError, match="first coefficient"):
            taylor(x, wrong)
    assert math.isinf(float(derivatives(apply("sqrt", x), torch.zeros(1, dtype=torch.float64), 1)[1]))
