"""Lower bounds by ascent: attained, close to the truth where it is known, below every certificate."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges import Target, jacobian_norm, second_derivative, tensor_norm
from judges.steps import DenseModel
from surefoot.attained import Contradiction
from surefoot.domains import DomainError
from surefoot.lower import Estimate, LowerBound, bracket, curvature_at_weights
from surefoot.magnitude import Magnitude


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


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

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.frozen(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("radius", [0.25, 4.0])
def test_a_linear_layer_is_solved_exactly(radius: float) -> None:
    frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
    x = batch(5, 3)
    size = float(torch.linalg.matrix_norm(frozen(x).double(), ord=2))
    model = nn.Sequential(frozen, nn.Linear(3, 2, bias=False))
    attained = sf.estimate(model, x, domain=sf.ProductBall(radius), budget=math.inf)
    assert float(attained.bound) == pytest.approx(radius * size, rel=1e-6)
    assert float(attained.lipschitz) == pytest.approx(size, rel=1e-6)
    assert float(attained.smoothness) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("activation", [nn.Softplus(), nn.Tanh(), nn.GELU()], ids=str)
@pytest.mark.parametrize("wrt", ["params", "input"])
def test_at_a_point_it_is_the_norm_of_the_derivatives(activation: nn.Module, wrt: Any) -> None:
    model, x, point = perceptron(activation), batch(2, 3), sf.Ball(0.0)
    target = Target.of(model, x, point, wrt)
    attained = sf.estimate(model, x, domain=point, wrt=wrt, starts=3)
    assert float(attained.bound) == pytest.approx(float(target.value(target.center).norm()), rel=1e-12)
    assert float(attained.lipschitz) == pytest.approx(jacobian_norm(target, target.center), rel=1e-3)
    truth = tensor_norm(second_derivative(target, target.center))
    assert float(attained.smoothness) == pytest.approx(truth, rel=1e-2)


def test_the_hessian_norm_of_an_objective() -> None:
    model, x = nn.Linear(3, 1, bias=False), batch(6, 3)
    attained = sf.estimate(
        model, x, domain=sf.Ball(0.5), objective=lambda y: y.square().sum() / 2, budget=math.inf
    )
    truth = float(torch.linalg.matrix_norm(x, ord=2)) ** 2
    assert float(attained.smoothness) == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize(
    ("activation", "radius", "least", "most"),
    [(nn.ReLU(), 0.5, 1e5, math.inf), (nn.Softplus(), 0.5, 0.1, 100), (nn.Hardsigmoid(), 5.0, 1e4, math.inf)],
    ids=["kink", "smooth", "kernel without second derivative"],
)
def test_kinks_show_as_huge_curvature(activation: nn.Module, radius: float, least: float, most: float) -> None:
    model, x, domain = perceptron(activation), batch(4, 3), sf.Ball(radius)
    attained = sf.estimate(model, x, domain=domain, starts=2)
    assert least < float(attained.smoothness) < most
    assert bracket(sf.certify(model, x, domain=domain), attained)


def test_a_slope_that_a_kernel_of_torch_gets_wrong_in_the_eighth_digit() -> None:
    attained = sf.estimate(nn.Hardsigmoid(), torch.zeros(1, 1), domain=sf.Ball(0.0), wrt="input")
    assert float(attained.lipschitz) == pytest.approx(1 / 6, rel=1e-14)


@pytest.mark.parametrize(
    "domain", [sf.ProductBall(1.0), sf.ProductBall(0.3, center="present"), sf.Ball(2.0)], ids=str
)
@pytest.mark.parametrize("wrt", ["params", "input"])
def test_it_is_below_the_certificate(domain: Any, wrt: Any) -> None:
    model, x = perceptron(nn.Tanh()), batch(3, 3)
    one, same, more = (sf.estimate(model, x, domain=domain, wrt=wrt, starts=n) for n in (2, 2, 3))
    assert one == same
    lines = bracket(sf.certify(model, x, domain=domain, wrt=wrt), more).splitlines()
    assert [line.split()[2] for line in lines] == ["bound", "Lipschitz", "smoothness"]
    for name in ("bound", "lipschitz", "smoothness"):
        assert 0 < float(getattr(one, name)) <= float(getattr(more, name))


def test_a_budget_is_respected_and_a_larger_one_brings_more() -> None:
    model, x, domain = perceptron(nn.Tanh()), batch(4, 3), sf.Ball(1.0)
    slopes = [
        float(sf.estimate(model, x, domain=domain, budget=b).lipschitz) for b in (1, 20, 200, 2000, math.inf)
    ]
    assert 0 < slopes[0] < slopes[2]
    assert slopes == sorted(slopes)
    assert slopes[2] == float(sf.estimate(model, x, domain=domain).lipschitz)
    assert slopes[3] == pytest.approx(slopes[4], rel=0.05)


def test_the_model_and_the_random_state_are_untouched() -> None:
    model = Remembering()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    attained = sf.estimate(model, batch(2, 3, 4), domain=sf.Ball(0.5), budget=100)
    assert float(attained.smoothness) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(p.requires_grad for p in model.frozen.parameters())


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: sf.estimate(nn.Linear(2, 2, device="meta"), torch.zeros(1, 2, device="meta")), "meta"),
        (lambda: sf.estimate(nn.Linear(2, 2), batch(1, 2), starts=0), "start"),
        (lambda: sf.estimate(nn.Linear(2, 2), batch(1, 2), budget=0), "positive budget"),
    ],
)
def test_what_has_no_search_is_refused(call: Callable[[], Any], word: str) -> None:
    with pytest.raises(DomainError, match=word):
        call()


def test_a_contradiction_is_an_error() -> None:
    certificate = sf.Certificate(*[Magnitude.of(1.0)] * 3, {}, Magnitude.zero((0, 0)))
    one, two = LowerBound(1.0), LowerBound(2.0)
    assert "ratio 1.00" in bracket(certificate, Estimate(one, one, one))
    with pytest.raises(Contradiction, match="Lipschitz"):
        bracket(certificate, Estimate(one, two, one))


@pytest.mark.parametrize("value", [0.0, 5e-324, 1.9999, 9.99999, 123456.0, 1e300])
def test_printed_figures_are_rounded_down(value: float) -> None:
    printed = Decimal(str(LowerBound(value)))
    assert Decimal(value) * Decimal("0.999") <= printed <= Decimal(value)


def test_lower_and_upper_bounds_do_not_mix() -> None:
    low, high = LowerBound(1.0), Magnitude.of(2.0)
    mixtures: list[Callable[[], Any]] = [
        lambda: low + low, lambda: low * 2.0, lambda: high + low, lambda: high * low, lambda: low + high,
        lambda: high < low, lambda: low < high, lambda: low < 2.0, lambda: Magnitude.of(low),
    ]  # type: ignore[operator,list-item,arg-type]  # fmt: skip
    for mixture in mixtures:
        with pytest.raises(TypeError):
            mixture()
    assert low != high
    assert LowerBound(1.0) == low < LowerBound(1.5)
    for never in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite"):
            LowerBound(never)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_curvature_at_the_weights(activation: nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3)).to(dtype)
    x, objective = torch.randn(20, 6, dtype=dtype), sf.CrossEntropy(torch.arange(20) % 3)
    sizes = [float(curvature_at_weights(model, x, objective, k) or math.nan) for k in (1, 3, 8, 80)]
    certificate = sf.certify(model, x, objective=objective, effort="quick")
    truth = DenseModel(model.double(), x.double(), objective).hessian_norm
    assert sizes == sorted(sizes)
    assert 0.5 * truth <= sizes[1]
    assert 0.95 * truth <= sizes[2] <= sizes[3] <= truth * (1 + 1e-9)
    assert float(certificate.curvature or math.nan) <= truth * (1 + 1e-9)
    assert "the curvature at these weights would allow" in " ".join(str(certificate).split())


def test_no_curvature_where_no_step_from_the_weights_is_certified() -> None:
    model, x, objective = perceptron(nn.ReLU()), batch(4, 3), sf.CrossEntropy(torch.arange(4) % 2)
    assert sf.certify(model, x, objective=objective, domain=sf.ProductBall(1.0)).curvature is None
    assert sf.certify(model, x, domain=sf.Ball(0.1)).curvature is None
    assert sf.certify(model, x, objective=objective, domain=sf.Ball(1.0)).curvature is None
