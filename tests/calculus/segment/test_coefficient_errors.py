"""Constants along a segment are those of the exact function: judged with sixty digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.calculus.segment.along import Along
from surefoot.domains import DomainError
from surefoot.taylor import passed_on

D = torch.float64
CANCELLING: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any], float]] = {
    "tanhshrink": (F.tanhshrink, lambda t: t - mp.tanh(t), 1e-5),
    "exp - 1": (lambda z: torch.exp(z) - 1, mp.expm1, 1e-9),
    "shifted": (lambda z: (torch.tanh(z) + 1e7) - 1e7, mp.tanh, 0.3),
    "root - 1": (lambda z: torch.sqrt(1 + z * z) - 1, lambda t: t * t / (mp.sqrt(1 + t * t) + 1), 1e-6),
    "gelu far out": (F.gelu, lambda t: t * mp.ncdf(t), -25.0),
    "sigmoid far out": (torch.sigmoid, lambda t: 1 / (1 + mp.exp(-t)), -720.0),
}


class Applied(nn.Module):
    """A function of one weight."""

    def __init__(self, function: Callable[[Tensor], Tensor], at: float) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.full((1, 1), at, dtype=D)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(F.linear(x, self.weight))


@pytest.mark.parametrize("name", CANCELLING)
@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("distance", [0.0, 1e-3])
def test_the_constants_are_those_of_the_exact_function(name: str, order: int, distance: float) -> None:
    function, exact, at = CANCELLING[name]
    model, length = Applied(function, at), 1e-3 * abs(at)
    x = torch.ones(1, 1, dtype=D)
    target = model(x).detach() * (1 + distance)
    domain = sf.Segment({"weight": torch.ones(1, 1, dtype=D)}, length, order)
    certificate = sf.certify(model, x, objective=sf.Square(target), domain=domain)
    with mp.workdps(400):

        def value(step: Any) -> Any:
            return (exact(mp.mpf(at) + step) - mp.mpf(float(target))) ** 2 / 2

        tiny = mp.mpf(10) ** -150
        slope = (value(tiny) - value(-tiny)) / (2 * tiny)
        bound, lipschitz, smoothness = (
            mp.mpf(2) ** mp.mpf(float(claim.log2))
            for claim in (certificate.bound, certificate.lipschitz, certificate.smoothness)
        )
        for part in (1e-3, 0.3, 1.0):
            step = mp.mpf(part * length)
            change = value(step) - value(mp.mpf(0))
            assert value(step) <= bound
            assert abs(change) <= lipschitz * step
            assert 2 * (change - slope * step) <= smoothness * step**2


def test_errors_pass_on_like_power_series() -> None:
    """f(x) = x² with x = 3 + 2η: G(η) is twice that plus the error, and what comes out is within the bounds."""
    tail = torch.tensor([[0.0, 1e-3, 2e-3, 3e-3]], dtype=D)
    _, *errors = passed_on(tail, 2 * 5.02, 2 * 2.01, 2 * 0.01)[0].tolist()
    for signs in ((1, 1, 1), (1, -1, 1), (-1, -1, 1), (1, -1, -1)):
        e = [sign * float(bound) for sign, bound in zip(signs, tail[0, 1:], strict=True)]
        for eta in (0.1, 0.5, 1.0):
            x, off = 3 + 2 * eta, e[0] + e[1] * eta + e[2] * eta**2
            first = (6 + e[0]) * e[0]
            second = 6 * e[1] + 4 * e[0] + 2 * e[0] * e[1]
            rest = ((x + off) ** 2 - x**2 - first - second * eta) / eta**2
            assert abs(first) <= errors[0]
            assert abs(second) <= errors[1]
            assert abs(rest) <= errors[2]


@pytest.mark.parametrize("length", [math.inf, math.nan, -1.0])
def test_a_length_that_is_none_is_refused(length: float) -> None:
    model = nn.Linear(2, 1).double()
    along = Along(model, torch.ones(3, 2, dtype=D), sf.Square(torch.zeros(3, 1, dtype=D)))
    with pytest.raises(DomainError, match="finite"):
        along.expand(along.steepest_descent(), length, 3)


@pytest.mark.parametrize("power", [-300, -100, 100, 300])
def test_extreme_lengths_say_what_ordinary_ones_do(power: int) -> None:
    """A segment that is 2^k times as long with a direction that is 2^k times as short is the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    along = Along(model, torch.randn(5, 3, dtype=D), sf.Square(torch.zeros(5, 2, dtype=D)))
    direction = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    near = along.majorant(direction, 0.125, 3)
    far = along.majorant({name: d * 2.0**-power for name, d in direction.items()}, 0.125 * 2.0**power, 3)
    assert far.slope * 2.0**power == pytest.approx(near.slope, rel=1e-12)
    assert far.curvature * 2.0**power * 2.0**power == pytest.approx(
        near.curvature, rel=1e-7
    )  # bounds are rounded up
    assert far.value == pytest.approx(near.value, rel=1e-12)


class Shifted(nn.Module):
    """Constants in which digits cancel, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear((torch.exp(x) + 1e7) - 1e7, self.weight)


def test_what_is_computed_from_constants_has_an_error() -> None:
    (found,) = Along(Shifted(), torch.full((1, 1), 0.3, dtype=D), None).expand(
        {"weight": torch.ones(1, 1, dtype=D)}, 0.1, 2
    )
    with mp.workdps(60):
        for coefficient, error in zip(found.coefficients, found.errors[0].tolist(), strict=False):
            assert coefficient is not None
            off = abs(mp.exp(mp.mpf(0.3)) - mp.mpf(float(coefficient)))
            assert 1e-12 < off <= error < 1e-7


def test_promises_are_kept_by_weights_as_stored() -> None:
    """Near a minimum, where the rounding of a weight is a good part of the step, in exact arithmetic."""
    kept = 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(100 * torch.randn(1, 1, generator=generator, dtype=D))
        x = torch.ones(1, 1, dtype=D)
        y = model.weight.detach() * (1 + 10.0 ** -(8 + seed % 6))
        optimizer = sf.optim.CertifiedDescent(model, sf.Square(), proof="segment")
        before = Fraction(model.weight.item())
        optimizer.step(x, y)
        after, target = Fraction(model.weight.item()), Fraction(y.item())
        promise = optimizer.history[-1].proved_decrease
        assert promise is not None
        kept += promise > 0
        assert ((before - target) ** 2 - (after - target) ** 2) / 2 >= Fraction(promise)
    assert kept >= 10
