"""The gradient oracle against torch.autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.objectives import Ridge
from surefoot.oracles import OracleError, gradient

X = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


@pytest.mark.parametrize("ridge", [None, Ridge(0.3), Ridge({"0": 0.7})])
def test_it_is_the_gradient_over_kappa(ridge: Ridge | None) -> None:
    model, kappa = network(), 2.5
    step = gradient(sf.Chain(model, X), sf.CrossEntropy(Y), kappa=kappa, regularizer=ridge)
    parameters = dict(model.named_parameters())
    loss = nn.functional.cross_entropy(model(X), Y)
    if ridge is not None:
        loss = loss + ridge(parameters)
    expected = torch.autograd.grad(loss, list(parameters.values()))
    square = 0.0
    for (path, _), slope in zip(parameters.items(), expected, strict=True):
        assert torch.allclose(step.direction[path], -slope / kappa, rtol=1e-12, atol=1e-15)
        square += float(slope.square().sum())
    assert step.model_decrease == pytest.approx(square / (2 * kappa), rel=1e-12)
    assert (step.calls, step.kappa, step.solved) == (1, kappa, True)


def test_it_is_taken_at_the_given_point() -> None:
    model = network()
    other = {path: torch.randn_like(value) for path, value in model.named_parameters()}
    step = gradient(sf.Chain(model, X), sf.CrossEntropy(Y), kappa=1.0, params=other)
    with torch.no_grad():
        for path, value in model.named_parameters():
            value.copy_(other[path])
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(X), Y), list(model.parameters()))
    for (path, _), slope in zip(model.named_parameters(), expected, strict=True):
        assert torch.allclose(step.direction[path], -slope, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kappa", [0.0, -1.0, float("nan"), float("inf"), "large"])
def test_kappa_is_positive(kappa: object) -> None:
    with pytest.raises(OracleError, match="positive"):
        gradient(sf.Chain(network(), X), sf.CrossEntropy(Y), kappa=kappa)  # type: ignore[arg-type]


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sqrt(self.scale)

    chain = sf.Chain(Root(), X)
    with pytest.raises(OracleError, match=r"'scale' is not finite"):
        gradient(chain, sf.Square(torch.ones_like(X)))


@pytest.mark.parametrize("scale", [1e155, 1e170])
def test_gradients_whose_squares_leave_the_range_of_doubles(scale: float) -> None:
    """Steps are as long as they are: no crash, and nothing is called solved that was not measured."""
    model, x = nn.Linear(2, 1, bias=False).double(), scale * torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    chain, weights = sf.Chain(model, x), {"weight": torch.tensor([[1.0, 0.0]], dtype=torch.float64)}
    loss = sf.objectives.Huber(torch.zeros(1, 1, dtype=torch.float64))
    step = gradient(chain, loss, params=weights)
    assert torch.allclose(step.direction["weight"], -x)
    assert step.model_decrease >= 0
    try:
        found = sf.oracles.gauss_newton(
            chain, sf.objectives.Huber(torch.zeros(1, 1, dtype=torch.float64)), params=weights
        )
    except OracleError:
        return
    assert not math.isnan(found.residual or 0.0)
    assert not math.isnan(found.model_decrease)
