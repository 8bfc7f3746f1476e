"""Expressions: what they compute on tensors, and how they are built."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from scalar_zoo import CASES, HALF_LINE, Case

from surefoot.operations.evaluation import softplus_gap
from surefoot.scalar import ScalarFunction, supremum, value_range

x = ScalarFunction.variable()
apply = ScalarFunction.apply
POINTS = torch.cat([torch.linspace(-19, 19, 2001), torch.tensor([0.0, 0.5, -0.5, 0.7, 3.0, -3.0, 6.0])]).double()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_named_activations_compute_what_torch_does(case: Case) -> None:
    slack = math.exp(-20) if case.name == "softplus" else 1e-12  # torch's threshold
    torch.testing.assert_close(case.function(POINTS), case.torch(POINTS), rtol=1e-12, atol=slack)
    single = case.function(POINTS.float())
    assert single.dtype == torch.float32
    assert single.shape == POINTS.shape


@pytest.mark.parametrize(("name", "torch_function", "parameters"), HALF_LINE)
def test_functions_of_positive_numbers_compute_what_torch_does(name, torch_function, parameters) -> None:
    points = POINTS[POINTS > 0]
    function = ScalarFunction.named(name, **parameters)
    torch.testing.assert_close(function(points), torch_function(points), rtol=1e-12, atol=1e-12)


def test_softplus_is_the_ideal_function_beyond_torchs_threshold() -> None:
    points = torch.linspace(20.001, 40, 100, dtype=torch.float64)
    difference = ScalarFunction.named("softplus")(points) - torch.nn.functional.softplus(points)
    assert float(difference.abs().max()) <= softplus_gap() <= 2.1e-9
    assert ScalarFunction.named("softplus", threshold=30.0) == ScalarFunction.named("softplus")


def test_written_out_by_hand_is_as_good_as_named() -> None:
    gelu = 0.5 * x * (1.0 + apply("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * apply("pow", x, 3.0))))
    torch.testing.assert_close(gelu(POINTS), ScalarFunction.named("gelu", approximate="tanh")(POINTS))
    erf_gelu = apply("mul", apply("mul", x, 0.5), apply("add", apply("erf", x * 0.7071067811865476), 1.0))
    silus = [apply("mul", x, apply("sigmoid", x)), x / (1.0 + apply("exp", -x)), apply("silu", x)]
    pairs = [
        (gelu, ScalarFunction.named("gelu", approximate="tanh")),
        (erf_gelu, ScalarFunction.named("gelu")),
        (x / (1.0 + apply("abs", x)), ScalarFunction.named("softsign")),
        (x * apply("relu6", x + 3.0) / 6.0, ScalarFunction.named("hardswish")),
        (apply("maximum", x, 0.0), ScalarFunction.named("relu")),
        (apply("log", 1.0 + apply("exp", x)), ScalarFunction.named("softplus")),
        *((silu, ScalarFunction.named("silu")) for silu in silus),
    ]
    for written, named in pairs:
        for order in (1, 2):
            for ends in ((-math.inf, math.inf), (-1.0, 2.0)):
                if written == pairs[5][0] and ends[1] == math.inf:
                    continue  # log(1 + exp(x)) is not rewritten: exp alone has no bound
                assert supremum(written, order, *ends) == pytest.approx(supremum(named, order, *ends), rel=1e-6)
    for written, named in (pairs[0], pairs[1], pairs[-1]):
        assert value_range(written) == pytest.approx(value_range(named), abs=1e-6)


def test_steps_are_shared_and_constants_are_not_references() -> None:
    sigmoid = apply("sigmoid", x)
    assert len((sigmoid * sigmoid).steps) == 3
    assert len((x * sigmoid + sigmoid).steps) == 4
    square, doubled = x * sigmoid, x * 1.5
    assert square != doubled
    assert (x * x) != (x * 1.0)
    assert hash(x * sigmoid) == hash(ScalarFunction.named("silu"))


def test_composition_substitutes_the_variable() -> None:
    inner = 2.0 * x + 1.0
    outer = ScalarFunction.named("gelu")
    torch.testing.assert_close(outer.compose(inner)(POINTS), outer(2 * POINTS + 1))
    assert outer.compose(x) == outer
    assert x.compose(inner) == inner
    constant = ScalarFunction.constant(3.0)
    assert constant.compose(inner)(POINTS).eq(3.0).all()
    assert apply("maximum", x, -x)(POINTS).equal(POINTS.abs())
    assert apply("minimum", x, 1.0)(POINTS).equal(POINTS.clamp(max=1.0))
    assert apply("minimum", 1.0, x)(POINTS).equal(POINTS.clamp(max=1.0))


def test_affine_steps_are_known_exactly() -> None:
    assert ((x + 3.0) / 6.0 - 2.0 * x).affine[-1] == (Fraction(1, 6) - 2, Fraction(1, 2))
    assert (-(0.1 * x)).affine[-1] == (-Fraction(0.1), Fraction(0))
    assert (x * x).affine[-1] is None
    assert (1.0 / x).affine[-1] is None
    assert apply("exp", x).affine[-1] is None


def test_infinite_breaks_are_dropped() -> None:
    assert ScalarFunction.named("clamp") == x
    assert ScalarFunction.named("hardtanh", min_val=-math.inf, max_val=2.0) == apply("minimum", x, 2.0)
    assert ScalarFunction.named("clamp", min=2.0, max=1.0)(POINTS).eq(1.0).all()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="no scalar function is named 'glu'"):
        ScalarFunction.named("glu")
    with pytest.raises(ValueError, match="cannot apply 'add' to 1"):
        apply("add", x)
    with pytest.raises(ValueError, match="finite number"):
        x * math.nan
    with pytest.raises(ValueError, match="finite number"):
        x**math.inf
    with pytest.raises(ValueError, match="increasing breaks"):
        ScalarFunction.piecewise([1.0, 0.0], [x, x, x])
    with pytest.raises(ValueError, match="increasing breaks"):
        ScalarFunction.piecewise([1.0], [x])


def test_an_activation_of_ones_own_is_a_few_lines() -> None:
    from surefoot.scalar.activations import ACTIVATIONS, register

    try:

        @register
        def snake(frequency: float = 1.0) -> ScalarFunction:
            return x + (1.0 - apply("cos", 2.0 * frequency * x)) / (2.0 * frequency)

        assert supremum(ScalarFunction.named("snake", frequency=2.0), 1) == pytest.approx(2.0, rel=1e-6)
        assert supremum(ScalarFunction.named("snake", frequency=2.0), 2) == pytest.approx(4.0, rel=1e-6)
    finally:
        ACTIVATIONS.pop("snake", None)


@pytest.mark.parametrize("at", [-1e4, -800.0, -1.0, 0.0, 1.0, 800.0, 1e4])
def test_softplus_has_derivatives_everywhere(at: float) -> None:
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    value = ScalarFunction.named("softplus")(x)
    assert float(value.detach()) == pytest.approx(float(torch.logaddexp(x.detach(), torch.zeros(()).double())))
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    sigmoid = float(torch.sigmoid(x.detach()))
    assert float(first.detach()) == pytest.approx(sigmoid, rel=1e-14)
    assert float(second) == pytest.approx(sigmoid * float(torch.sigmoid(-x.detach())), rel=1e-12)
