"""Lower bounds by ascent: attained, close to the truth where it is known, below every certificate."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from judges import Target, jacobian_norm, second_derivative, tensor_norm
from surefoot.attained import Contradiction
from surefoot.domains import DomainError
from surefoot.lower import Estimate, LowerBound, bracket
from surefoot.magnitude import Magnitude


def batch(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def perceptron(activation: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2))


class Remembering(nn.Module):
    """Batch statistics, frozen and trained parameters, attention: everything a search might disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.frozen(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("radius", [0.25, 1.0, 4.0])
def test_a_linear_layer_is_found_exactly(radius):
    x = batch(5, 3)
    norm = float(torch.linalg.matrix_norm(x.double(), ord=2))
    found = sf.estimate(nn.Linear(3, 2, bias=False), x, domain=sf.ProductBall(radius), budget=math.inf)
    assert float(found.bound) == pytest.approx(radius * norm, rel=1e-6)
    assert float(found.lipschitz) == pytest.approx(norm, rel=1e-6)
    assert float(found.smoothness) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("activation", [nn.Softplus(), nn.Tanh(), nn.GELU()], ids=str)
@pytest.mark.parametrize("wrt", ["params", "input"])
def test_at_a_point_it_is_the_norm_of_the_derivatives(activation, wrt):
    model, x, point = perceptron(activation), batch(2, 3), sf.Ball(0.0)
    target = Target.of(model, x, point, wrt)
    found = sf.estimate(model, x, domain=point, wrt=wrt, starts=3, steps=25)
    assert float(found.bound) == pytest.approx(float(target.value(target.center).norm()), rel=1e-12)
    assert float(found.lipschitz) == pytest.approx(jacobian_norm(target, target.center), rel=1e-3)
    assert float(found.smoothness) == pytest.approx(
        tensor_norm(second_derivative(target, target.center)), rel=1e-2
    )


def test_the_hessian_norm_of_an_objective():
    x = batch(6, 3)
    found = sf.estimate(
        nn.Linear(3, 1, bias=False), x, domain=sf.Ball(0.5), objective=lambda outputs: outputs.square().sum() / 2,
        budget=math.inf,
    )  # fmt: skip
    assert float(found.smoothness) == pytest.approx(float(torch.linalg.matrix_norm(x, ord=2)) ** 2, rel=1e-5)


def test_a_kink_shows_as_a_huge_curvature():
    x, domain = batch(4, 3), sf.Ball(0.5)
    kinked, smooth = (
        float(sf.estimate(perceptron(activation), x, domain=domain, starts=2, steps=3).smoothness)
        for activation in (nn.ReLU(), nn.Softplus())
    )
    assert smooth < 100
    assert kinked > 1e5


@pytest.mark.parametrize(
    "domain", [sf.ProductBall(1.0), sf.ProductBall(0.3, center="present"), sf.Ball(2.0)], ids=str
)
@pytest.mark.parametrize("wrt", ["params", "input"])
def test_it_is_below_the_certificate(domain, wrt):
    model, x = perceptron(nn.Tanh()), batch(3, 3)
    found = sf.estimate(model, x, domain=domain, wrt=wrt, starts=2, steps=5)
    lines = bracket(sf.certify(model, x, domain=domain, wrt=wrt), found).splitlines()
    assert [line.split()[2] for line in lines] == ["bound", "Lipschitz", "smoothness"]
    assert min(map(float, (found.bound, found.lipschitz, found.smoothness))) > 0


def test_a_contradiction_is_an_error():
    certificate = sf.Certificate(*[Magnitude.of(1.0)] * 3, {}, Magnitude.zero((0, 0)))
    one, two = LowerBound(1.0), LowerBound(2.0)
    assert "ratio 1.00" in bracket(certificate, Estimate(one, one, one))
    with pytest.raises(Contradiction, match="Lipschitz"):
        bracket(certificate, Estimate(one, two, one))


def test_ids_and_attention():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.Sequential(nn.Embedding(7, 4), layer)
    ids = torch.randint(0, 7, (2, 3))
    found = sf.estimate(model, ids, domain=sf.Ball(0.1), starts=1, steps=2)
    assert float(found.smoothness) > float(found.lipschitz) > 0


def test_an_operation_without_second_derivative_still_shows_its_curvature():
    torch.manual_seed(0)
    model, x, domain = nn.Sequential(nn.Linear(3, 4), nn.Hardsigmoid(), nn.Linear(4, 2)), batch(2, 3), sf.Ball(5.0)
    found = sf.estimate(model, x, domain=domain, starts=2, steps=2)
    assert float(found.smoothness) > 1e4
    assert bracket(sf.certify(model, x, domain=domain), found)


def test_a_slope_that_a_kernel_of_torch_gets_wrong_in_the_eighth_digit():
    x, domain = torch.zeros(1, 1), sf.Ball(0.0)
    found = sf.estimate(nn.Hardsigmoid(), x, domain=domain, wrt="input")
    assert float(found.lipschitz) == pytest.approx(1 / 6, rel=1e-14)


def test_the_model_and_the_random_state_are_untouched():
    model = Remembering()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    sf.estimate(model, batch(2, 3, 4), domain=sf.Ball(0.5), starts=2, steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(p.requires_grad for p in model.frozen.parameters())


def test_frozen_parameters_do_not_vary():
    model = nn.Linear(3, 2, bias=False).requires_grad_(False)
    wrapped = nn.Sequential(model, nn.Linear(2, 2, bias=False))
    x = batch(4, 3)
    found = sf.estimate(wrapped, x, domain=sf.ProductBall(1.0), starts=1)
    assert float(found.lipschitz) == pytest.approx(
        float(torch.linalg.matrix_norm(F.linear(x, model.weight), ord=2)), rel=1e-5
    )


def test_more_starts_never_find_less_and_a_seed_repeats():
    model, x = perceptron(nn.SiLU()), batch(2, 3)
    one, same, more = (sf.estimate(model, x, domain=sf.Ball(1.0), starts=n, steps=3) for n in (1, 1, 3))
    assert one == same
    for name in ("bound", "lipschitz", "smoothness"):
        assert getattr(one, name) <= getattr(more, name)


def test_what_has_no_values_is_refused():
    with pytest.raises(DomainError, match="meta"):
        sf.estimate(nn.Linear(2, 2, device="meta"), torch.zeros(1, 2, device="meta"), domain=sf.ProductBall(1.0))
    with pytest.raises(DomainError, match="start"):
        sf.estimate(nn.Linear(2, 2), batch(1, 2), starts=0)


@settings(deadline=None, derandomize=True)
@given(st.floats(0, 1e300, allow_subnormal=False), st.integers(0, 6))
def test_printed_figures_are_rounded_down(value, digits):
    printed = Decimal(LowerBound(value).format(digits))
    assert printed <= Decimal(value)
    assert Decimal(value) - printed <= Decimal(value) * Decimal(10) ** -digits


def test_lower_and_upper_bounds_do_not_mix():
    low, high = LowerBound(1.0), Magnitude.of(2.0)
    for combine in (
        lambda: low + low,
        lambda: low * 2.0,
        lambda: high + low,
        lambda: high * low,
        lambda: low + high,
        lambda: high < low,
        lambda: low < high,
        lambda: low < 2.0,
        lambda: Magnitude.of(low),
    ):
        with pytest.raises(TypeError):
            combine()
    assert low != high
    assert str(low) == "1.000e+00"
    assert LowerBound(1.0) == low < LowerBound(1.5)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_what_is_never_attained_is_refused(value):
    with pytest.raises(ValueError, match="finite"):
        LowerBound(value)


def test_a_budget_is_kept_and_what_was_found_is_returned():
    model, x, domain = perceptron(nn.Tanh()), batch(4, 3), sf.Ball(1.0)
    whole = sf.estimate(model, x, domain=domain, budget=math.inf)
    previous = 0.0
    for budget in (1, 20, 200, 2000):
        spent: list[float] = []
        seen: list[Estimate] = []

        def note(best: Estimate, cost: float, spent: list[float] = spent, seen: list[Estimate] = seen) -> None:
            spent.append(cost)
            seen.append(best)

        found = sf.estimate(model, x, domain=domain, budget=budget, progress=note)
        assert seen[-1] == found
        assert spent == sorted(spent)
        assert max(spent) <= budget + 3 * 40  # what was being computed when it ended
        assert 0 < float(found.lipschitz) <= float(whole.lipschitz) * (1 + 1e-9)
        assert float(found.lipschitz) >= previous
        previous = float(found.lipschitz)
    assert previous == pytest.approx(float(whole.lipschitz), rel=0.05)


def test_the_usual_budget_is_two_hundred_gradients():
    model, x = perceptron(nn.Tanh()), batch(4, 3)
    usual, limited = (sf.estimate(model, x, domain=sf.Ball(1.0), **options) for options in ({}, {"budget": 200}))
    assert usual == limited
    with pytest.raises(DomainError, match="positive budget"):
        sf.estimate(model, x, budget=0)
