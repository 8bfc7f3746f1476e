"""Without a domain an objective is certified on the ball where the longest gradient step can be proved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf


def problem(activation: type[nn.Module]) -> tuple[nn.Module, torch.Tensor, sf.CrossEntropy]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 3)).double()
    return model, torch.randn(12, 6, dtype=torch.float64), sf.CrossEntropy(torch.arange(12) % 3)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Softplus, nn.GELU, nn.ReLU])
def test_no_other_ball_proves_a_much_longer_step(activation: type[nn.Module]) -> None:
    model, x, objective = problem(activation)
    chosen = sf.certify(model, x, objective=objective)
    assert isinstance(chosen.radius, float)
    assert chosen.step_size > 0
    for factor in (0.1, 0.3, 0.8, 1.25, 3.0, 10.0) if activation is not nn.ReLU else (0.1, 0.5):
        other = sf.certify(model, x, objective=objective, domain=sf.Ball(chosen.radius * factor))
        assert other.step_size <= chosen.step_size * 1.15


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_the_step_that_is_printed_descends(activation: type[nn.Module]) -> None:
    model, x, objective = problem(activation)
    step = sf.certify(model, x, objective=objective).step_size
    before = objective(model(x))
    slopes = torch.autograd.grad(before, list(model.parameters()))
    with torch.no_grad():
        for parameter, slope in zip(model.parameters(), slopes, strict=True):
            parameter -= step * slope
    size = sum(float(slope.square().sum()) for slope in slopes)
    assert before.item() - objective(model(x)).item() >= 0.5 * step * size * (1 - 1e-9)


def test_a_flat_function_and_a_stationary_point_have_one_too() -> None:
    model = nn.Linear(2, 2).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.ones(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    assert sf.certify(model, x, objective=sf.Square(y)).smoothness.is_finite


def test_a_domain_without_the_weights_says_so() -> None:
    model, x, objective = problem(nn.Tanh)
    outside = sf.certify(model, x, objective=objective, domain=sf.ProductBall(1e-3))
    assert outside.weights_inside is False
    assert "the present weights lie outside this domain" in str(outside)
    inside = sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))
    assert inside.weights_inside is True
    assert "outside" not in str(inside)
    assert sf.Certificate.from_json(outside.to_json()).weights_inside is False


def test_on_the_meta_device_and_for_several_outputs_the_set_is_that_of_the_paper() -> None:
    model, x, _ = problem(nn.Tanh)
    assert "each block within 1 of the origin" in sf.certify(model, x).domain
    with torch.device("meta"):
        network, images = nn.Linear(3, 1), torch.empty(1, 3)
    assert "each block within 1 of the origin" in sf.certify(network, images, input_norm=1.0).domain
