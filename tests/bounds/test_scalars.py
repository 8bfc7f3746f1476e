"""Ranges of scalar functions: turning points by ball arithmetic, values by 300 bits, kinks, infinite ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from flint import arb, arb_series, ctx

from surefoot.bounds.scalars import CURVES, HIGHEST_ORDER, bounds, enclose, pieces, turning_points
from surefoot.program.scalars import SCALARS, Scalar

INF = math.inf


def sigmoid(x: arb_series) -> arb_series:
    return (1 + (-x).exp()).inv() if x[0] > -1 else x.exp() * (1 + x.exp()).inv()


def tanh(x: arb_series) -> arb_series:
    return 1 - 2 * sigmoid(-2 * x)


JUDGES: dict[str, Callable[[arb_series], arb_series]] = {
    "exp": lambda x: x.exp(),
    "expm1": lambda x: x.exp() - 1,
    "log": lambda x: x.log(),
    "log1p": lambda x: (1 + x).log(),
    "sigmoid": sigmoid,
    "softplus": lambda x: (1 + x.exp()).log() if x[0] < 1 else x + (1 + (-x).exp()).log(),
    "tanh": tanh,
    "erf": lambda x: x.erf(),
    "gelu": lambda x: x * (x * arb(-1) * arb(2).rsqrt()).erfc() / 2,
    "silu": lambda x: x * sigmoid(x),
    "gelu_tanh": lambda x: x * sigmoid(2 * (2 / arb.pi()).sqrt() * (x + arb(0.044715) * x * x * x)),
    "mish": lambda x: (
        x - 2 * x * (x.exp() * (x.exp() + 2) + 2).inv()
        if x[0] > 0
        else x * (x.exp() * (x.exp() + 2)) * (x.exp() * (x.exp() + 2) + 2).inv()
    ),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "sinh": lambda x: (x.exp() - (-x).exp()) / 2,
    "cosh": lambda x: (x.exp() + (-x).exp()) / 2,
    "atan": lambda x: x.atan(),
    "arcsinh": lambda x: (1 + x * x).rsqrt().integral() + (x[0] + (1 + x[0] * x[0]).sqrt()).log(),
    "hardswish": lambda x: x * (x + 3) / 6,
    "softsign": lambda x: x * (1 + x).inv(),
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: x.rsqrt(),
    "reciprocal": lambda x: x.inv(),
    "square": lambda x: x * x,
    "logsigmoid": lambda x: -((1 + (-x).exp()).log()),
}
POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal", "softsign", "log1p"}


def derivative(name: str, x: arb, order: int) -> arb:
    series = JUDGES[name](arb_series([x, 1], prec=order + 1))
    return series[order] * math.factorial(order)


def has_one_sign(name: str, order: int, low: float, high: float) -> bool:
    """Whether ball arithmetic shows a derivative to have no zero on an interval."""
    waiting, signs = [(low, high)], set()
    while waiting:
        a, b = waiting.pop()
        half = arb(0, (b - a) / 2 * (1 + 1e-12))
        value = derivative(name, arb((a + b) / 2) + half, order)
        if value.contains(0):  # by the mean value theorem
            value = derivative(name, arb((a + b) / 2), order) + half * derivative(
                name, arb((a + b) / 2) + half, order + 1
            )
        if value > 0 or value < 0:
            signs.add(bool(value > 0))
        elif b - a < 1e-9:
            return False
        else:
            waiting += [(a, (a + b) / 2), ((a + b) / 2, b)]
    return len(signs) == 1


@pytest.fixture(autouse=True)
def precise() -> Iterator[None]:
    old, ctx.prec = ctx.prec, 300
    yield
    ctx.prec = old


@pytest.mark.parametrize("name", [name for name, curve in CURVES.items() if curve.spread != (0.0, 0.0)])
def test_turning_points_are_all(name: str) -> None:
    """Between them the next derivative has one sign; across each the one after has, so that there is one zero."""
    reach, near = (2.5 if name == "hardswish" else 30.0), 2.0**-9
    for order in range(2 if name == "hardswish" else HIGHEST_ORDER + 1):
        points = turning_points(name, order)
        ends = [-reach, *(end for point in points for end in (point - near, point + near)), reach]
        for a, b in zip(ends[::2], ends[1::2], strict=True):
            assert has_one_sign(name, order + 1, a, b)
        for point in points:
            assert has_one_sign(name, order + 2, point - near, point + near)


def intervals(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, narrow and wide intervals, near zero and where units are saturated."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.randn(60, generator=generator, dtype=torch.float64) * 3
    middle[::9] *= 8
    half = torch.rand(60, generator=generator, dtype=torch.float64) ** 4 * 6
    half[::4], half[1::8] = 0.0, 1e-9
    low, high = middle - half, middle + half
    if name in POSITIVE:
        low = low.abs() + 1e-3
        high = low + 2 * half
    if name == "hardswish":
        low, high = low.clamp(-2.9, 2.9), high.clamp(-2.9, 2.9)
    return low, high


@pytest.mark.parametrize("name", list(JUDGES))
@pytest.mark.parametrize("order", range(HIGHEST_ORDER + 1))
def test_ranges_are_sound_and_sharp(name: str, order: int) -> None:
    low, high = intervals(name)
    least, most = enclose(Scalar(name), order, low, high)
    spread = [*turning_points(name, order)] if name in CURVES else [0.0] if name == "square" else []
    if name == "logsigmoid":
        spread = [-point for point in turning_points("softplus", order)]
    for a, b, bottom, top in zip(*(t.tolist() for t in (low, high, least, most)), strict=True):
        inside = [a + (b - a) * k / 40 for k in range(41)] + [c for c in spread if a <= c <= b]
        values = [derivative(name, arb(min(max(x, a), b)), order) for x in inside]
        assert all(value >= bottom and value <= top for value in values), (a, b)
        scale = max(float(abs(value).upper()) for value in values)
        reached = [float(value) for value in values]
        # 41 points miss a turning point of the trigonometric functions by (b - a)²/80²
        slack = 3e-9 * (1 + scale) + (1e-3 * (b - a) ** 2 * 2 if name in ("sin", "cos", "sinh") else 0.0)
        assert bottom >= min(reached) - slack, (a, b, bottom, min(reached))
        assert top <= max(reached) + slack, (a, b, top, max(reached))


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softplus", "gelu", "silu", "gelu_tanh", "mish", "erf"])
def test_saturated_units_have_tiny_derivatives(name: str) -> None:
    """Relative precision far out, where 1 - y² would be zero or noise."""
    ctx.prec = 2000
    for x in (-15.0, -9.0, 7.0, 17.0):
        at = torch.tensor([x], dtype=torch.float64)
        for order in range(2, HIGHEST_ORDER + 1):
            least, most = enclose(Scalar(name), order, at, at)
            exact = derivative(name, arb(x), order)
            assert exact >= float(least)
            assert exact <= float(most)
            assert float(most - least) <= 1e-6 * abs(float(exact)) + 1e-290


def huber(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.huber_loss(x, 0 * x, reduction="none", delta=0.4)


KINKED = [
    (Scalar("relu"), torch.relu, 1, (0.0,)),
    (Scalar("abs"), torch.abs, 1, (0.0,)),
    (Scalar("leaky_relu", (0.3,)), lambda x: torch.nn.functional.leaky_relu(x, 0.3), 1, (0.0,)),
    (Scalar("elu", (1.0,)), torch.nn.functional.elu, 2, (0.0,)),
    (Scalar("elu", (0.7,)), lambda x: torch.nn.functional.elu(x, 0.7), 1, (0.0,)),
    (Scalar("celu", (0.7,)), lambda x: torch.where(x > 0, x, 0.7 * torch.expm1(x / 0.7)), 2, (0.0,)),
    (Scalar("selu"), torch.selu, 1, (0.0,)),
    (Scalar("hardtanh", (-0.5, 2.0)), lambda x: x.clamp(-0.5, 2.0), 1, (-0.5, 2.0)),
    (Scalar("relu6"), torch.nn.functional.relu6, 1, (0.0, 6.0)),
    (Scalar("hardswish"), torch.nn.functional.hardswish, 1, (-3.0, 3.0)),
    (Scalar("hardsigmoid"), lambda x: (x / 6 + 0.5).clamp(0, 1), 1, (-3.0, 3.0)),
    (Scalar("softsign"), torch.nn.functional.softsign, 2, (0.0,)),
    (Scalar("huber", (0.4,)), huber, 2, (-0.4, 0.4)),
    (Scalar("softplus", (2.5,)), lambda x: torch.log1p((2.5 * x).exp()) / 2.5, 99, ()),
    (Scalar("logsigmoid"), torch.nn.functional.logsigmoid, 99, ()),
    (Scalar("power", (3.0,)), lambda x: x**3, 99, ()),
    (Scalar("power", (-2.0,)), lambda x: x**-2, -1, (0.0,)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "torch_function", "smoothness", "kinks"), KINKED, ids=range(len(KINKED)))
def test_functions_in_pieces(
    function: Scalar, torch_function: Callable, smoothness: int, kinks: tuple[float, ...]
) -> None:
    """Against torch's own values and derivatives; infinite exactly where a kink that is too sharp is met."""
    generator = torch.Generator().manual_seed(3)
    low = torch.randn(200, generator=generator, dtype=torch.float64) * 4
    high = low + torch.rand(200, generator=generator, dtype=torch.float64) ** 3 * 5
    points = torch.lerp(low, high, torch.linspace(0, 1, 61, dtype=torch.float64)[:, None]).requires_grad_()
    value = torch_function(points)
    met = torch.zeros(200, dtype=torch.bool)
    for kink in kinks:
        met |= (low <= kink) & (high >= kink)
    for order in range(4):
        least, most = enclose(function, order, low, high)
        assert torch.equal(most.isinf(), met & (order > smoothness))
        finite = ~most.isinf()
        bottom, top = (value.detach().aminmax(dim=0)[k] for k in (0, 1))
        slack = 1e-9 * (1 + torch.maximum(top.abs(), bottom.abs()))
        assert ((bottom >= least - slack) & (top <= most + slack))[finite].all()
        # sharp: between two of the 61 points a function moves by its slope times half their distance
        slope = bounds(function, order + 1, low, high)
        slack = torch.where(slope.isfinite(), slack + slope * (high - low) / 100, INF)
        assert ((least >= bottom - slack) & (most <= top + slack))[finite].all()
        value = (
            torch.autograd.grad(value.sum(), points, create_graph=True)[0] if value.requires_grad else 0 * points
        )


def test_the_derivative_of_a_function_is_a_function() -> None:
    low, high = torch.tensor([-1.0, 0.3]).double(), torch.tensor([0.5, 2.0]).double()
    for name in ("tanh", "gelu", "softplus"):
        for order in range(3):
            for one, two in zip(
                enclose(Scalar(name, (), 2), order, low, high),
                enclose(Scalar(name), order + 2, low, high),
                strict=True,
            ):
                assert torch.equal(one, two)
    with pytest.raises(ValueError, match="order 7"):
        enclose(Scalar("tanh", (), 4), 3, low, high)
    with pytest.raises(NotImplementedError, match="digamma"):
        enclose(Scalar("digamma"), 0, low, high)


@pytest.mark.parametrize("name", [*CURVES, "relu", "sqrt", "reciprocal", "logsigmoid", "hardtanh"])
def test_infinite_ends_and_what_is_not_a_number(name: str) -> None:
    low = torch.tensor([-INF, 1.0, -INF, -1e200, math.nan, 1.0], dtype=torch.float64)
    high = torch.tensor([INF, INF, -1.0, 1e300, 1.0, math.nan], dtype=torch.float64)
    for order in range(5):
        least, most = enclose(Scalar(name), order, low, high)
        assert (least <= most).all()  # so neither is a NaN
        assert (torch.stack([most[4:], -least[4:]]) == INF).all()
        if name in ("tanh", "sigmoid", "erf", "atan", "sin", "cos") or (
            order and name in ("gelu", "silu", "mish")
        ):
            assert (bounds(Scalar(name), order, low, high)[:4] < 1500).all()


def test_every_scalar_function_has_its_ranges() -> None:
    for name in SCALARS:
        assert pieces(name, (0.25, 0.5))


def test_an_exact_zero_stays_exact() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert enclose(Scalar("relu"), 0, zero - 1, zero) == (0.0, 0.0)
    assert enclose(Scalar("relu"), 1, zero + 1, zero + 2) == (1.0, 1.0)
    assert float(bounds(Scalar("leaky_relu", (0.5,)), 2, zero + 1, zero + 2)) == 0.0
    assert pieces("relu").kinks == ((0.0, 1),)
