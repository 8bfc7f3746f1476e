"""Computed numbers lie within their error bounds: judged by ball arithmetic at 300 bits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
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


def hard(name: str) -> torch.Tensor:
    """Next to multiples of π/2 up to the largest double, next to one and minus one, at the ends of the range."""
    with ctx.workprec(1200):
        counts = [*range(1, 40), *(3**k for k in range(4, 36)), *(2**k + 1 for k in range(10, 1022, 53))]
        turns = [float(arb.pi() / 2 * k) for k in counts]
    turns += [6381956970095103.0 * 2.0**797, 5319372648326541.0 * 2.0**30]  # the worst of all doubles, and another
    ones = [1.0 + sign * 2.0**-k for k in range(1, 54, 4) for sign in (1, -1)]
    ends = [math.log(2.0) * k for k in (-1074, -1022, -1021, 1023)] + [26.5, 27.2, 5.9, 1e308, 1.7e308, 2.0**-1074]
    found = torch.tensor([math.nextafter(n, to) for n in turns + ones + ends for to in (-math.inf, n, math.inf)])
    found = torch.cat([found, -found]).double()
    if name in POSITIVE:
        return found[found > 0]
    return found[found > -1] if name == "log1p" else found


def laid_out(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers for the vectorised kernel, for the one that walks in steps, and one by one."""
    apart = torch.zeros(len(numbers), 3, dtype=torch.float64)
    apart[:, 1] = numbers
    return {"together": numbers, "apart": apart[:, 1], "turned": torch.stack([numbers, numbers]).T}


@pytest.mark.parametrize("name", UNARY)
def test_elementary_functions_on_hard_arguments_in_every_layout(name: str) -> None:
    """What is assumed of torch, continued."""
    numbers = hard(name)
    with ctx.workprec(2400):
        exact = [UNARY[name].ball(arb_series([arb(at)], prec=2))[0] for at in numbers.tolist()]
        for layout, laid in laid_out(numbers).items():
            found = UNARY[name].tensor(Rounded.exact(laid)).expand(laid.shape)
            value, error = (part.reshape(len(numbers), -1)[:, -1].tolist() for part in (found.value, found.error))
            judge(name, numbers, value, error, exact, layout)
        for at, fact in zip(numbers[::7], exact[::7], strict=True):
            one = UNARY[name].tensor(Rounded.exact(at)).expand(())
            judge(name, at.reshape(1), [one.value.item()], [one.error.item()], [fact], "alone")


def judge(name: str, numbers: torch.Tensor, values: list, errors: list, exact: list, layout: str) -> None:
    for at, value, error, fact in zip(numbers.tolist(), values, errors, exact, strict=True):
        if math.isfinite(value) and math.isfinite(error) and fact.is_finite():
            assert abs(fact - arb(value)).upper() <= arb(error), (name, layout, at, value, error)


@pytest.mark.parametrize("exponent", [0.5, 1.5, -0.7, 1e-10, 3.3, -0.5, 17.25])
def test_powers_are_within_eight_units(exponent: float) -> None:
    numbers = torch.cat([points("log")[::3], hard("log")])
    found = torch.pow(Rounded.exact(numbers), exponent).expand(numbers.shape)
    with ctx.workprec(400):
        exact = [arb(at) ** arb(exponent) for at in numbers.tolist()]
        judge("pow", numbers, found.value.tolist(), found.error.tolist(), exact, "together")


@pytest.mark.parametrize("name", ["log2", "exp2"])
def test_logarithms_and_powers_of_numpy_are_within_four_units(name: str) -> None:
    """What magnitudes rest on."""
    numbers = hard("log").numpy()
    numbers = numbers if name == "log2" else np.concatenate([np.log2(numbers), np.linspace(-1021, 1023, 777)])
    with ctx.workprec(400):
        for at, value in zip(numbers.tolist(), getattr(np, name)(numbers).tolist(), strict=True):
            if 2.0**-1021 < abs(value) < math.inf:
                exact = arb(at).log() / arb(2).log() if name == "log2" else arb(2) ** arb(at)
                assert abs(exact - arb(value)).upper() <= 4 * arb(math.ulp(value)), (at, value)


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
