"""Lipschitz constants in the input: never below what is attained, and as sharp as LipSDP."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.lipschitz import lipsdp, random_network
from torch import nn

from surefoot.bounds.function import Function
from surefoot.bounds.input_gain import input_gain
from surefoot.domains import Ball, Domain, ProductBall


def gain(model: nn.Module, x: torch.Tensor, domain: Domain) -> float:
    return input_gain(Function.of(model, x, wrt="input").over(domain))


@pytest.mark.parametrize("seed", range(3))
def test_rectifiers_on_the_whole_space_have_the_constant_of_the_semidefinite_program(seed: int) -> None:
    model = random_network((3, 8, 6, 2), seed)
    weights = [layer.weight.detach() for layer in model if isinstance(layer, nn.Linear)]
    proved = gain(model, torch.zeros(1, 3, dtype=torch.float64), ProductBall(1e6))
    assert proved == pytest.approx(lipsdp(weights), rel=2e-3)
    assert proved < 0.95 * math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)


CASES = {
    "tanh": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        (6, 4),
    ),
    "max": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (3, 1, 6, 6)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)), (5, 4)),
    "mask": (lambda: nn.Sequential(nn.Linear(4, 6), Mask(), nn.Softplus(), nn.Linear(6, 2)), (3, 4)),
}


class Mask(nn.Module):
    """Another mask for each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.numel()).reshape(x.shape) % 3).double()


@pytest.mark.parametrize("radius", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("name", CASES)
def test_no_jacobian_is_larger(name: str, radius: float) -> None:
    torch.manual_seed(3)
    build, shape = CASES[name]
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    proved = gain(model, x, Ball(radius))
    for _ in range(10):
        step = torch.randn_like(x)
        point = x + radius * step / step.norm()
        jacobian = torch.autograd.functional.jacobian(lambda v: model(v).reshape(-1), point).flatten(1)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= proved * (1 + 1e-12)


def test_linear_models_are_exact_and_samples_share_a_matrix() -> None:
    model = nn.Linear(5, 3).double()
    norm = float(torch.linalg.matrix_norm(model.weight.detach(), 2))
    assert gain(model, torch.randn(300, 5, dtype=torch.float64), Ball(1.0)) == pytest.approx(norm, rel=1e-9)
