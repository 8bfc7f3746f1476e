"""Shapes and sizes at the edge of what networks have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.errors import SurefootError


class Largest(nn.Module):
    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.flatten().max(0).values


class First(nn.Module):
    def __init__(self, pick: str) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, outputs: Tensor) -> Tensor:
        pieces = {
            "chunk": lambda: outputs.flatten().chunk(8)[0],
            "split": lambda: outputs.flatten().split(1)[2],
            "unbind": lambda: outputs.flatten().unbind(0)[3],
        }
        return pieces[self.pick]()


@pytest.mark.parametrize("objective", [Largest(), First("chunk"), First("split"), First("unbind")])
@pytest.mark.parametrize("radius", [0.0, 0.1, 10.0])
def test_an_output_picked_from_several_results(objective: nn.Module, radius: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(), torch.randn(4, 3).double()
    domain = sf.Ball(radius)
    certificate = sf.certify(model, x, objective=objective, domain=domain)
    found = sf.estimate(model, x, objective=objective, domain=domain, starts=2, budget=100)
    assert float(found.lipschitz) <= float(certificate.lipschitz) * (1 + 1e-9)
    assert float(found.smoothness) <= float(certificate.smoothness) * (1 + 1e-9)


def without_bias() -> nn.Module:
    return nn.Linear(3, 1, bias=False)


def bias_alone() -> nn.Module:
    model = nn.Linear(3, 1)
    model.weight.requires_grad_(False)
    return model


def last_layer_alone() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 1, bias=False))


@pytest.mark.parametrize("make", [without_bias, bias_alone, last_layer_alone])
def test_one_output_of_one_sample(make) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(1, 3).double()
    certificate = sf.certify(model, x, domain=sf.Ball(0.1))
    model(x).sum().backward()
    exact = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
    assert exact * (1 - 1e-12) <= float(certificate.lipschitz) <= exact * (1 + 1e-9)
    assert float(certificate.smoothness) <= 1e-12


LOSSES = [sf.CrossEntropy, sf.Square, sf.objectives.Huber]
NETWORKS = [
    lambda: nn.Linear(3, 2),
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)),
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 2)),
]


@pytest.mark.parametrize("scale", [1e160, 1e200, 1e300, 1e-200])
@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_inputs_of_extreme_size(loss, make, scale: float) -> None:
    torch.manual_seed(0)
    model, x = make().double(), scale * torch.randn(4, 3).double()
    targets = torch.tensor([0, 1, 0, 1]) if loss is sf.CrossEntropy else torch.zeros(4, 2).double()
    for domain in (sf.Ball(0.1), sf.Ball(0.0), sf.ProductBall(1.0), sf.Segment(None, 0.01)):
        try:
            certificate = sf.certify(model, x, objective=loss(targets), domain=domain)
        except SurefootError as refusal:
            assert "not finite" in str(refusal)  # noqa: PT017  other errors are faults
            continue
        objective = loss(targets)(model(x)).detach()
        if torch.isfinite(objective) and not isinstance(domain, sf.ProductBall):
            assert float(objective) <= float(certificate.bound) * (1 + 1e-9)


@pytest.mark.parametrize("effort", ["quick", "normal", "high"])
@pytest.mark.parametrize("radius", [0.0, 0.5])
def test_a_model_without_operations_has_constants(effort, radius):
    x = torch.tensor([[-700.0]], dtype=torch.float64)
    found = sf.certify(nn.Identity(), x, domain=sf.Ball(radius), wrt="input", effort=effort)
    assert 700 + radius <= float(found.bound) <= (700 + radius) * (1 + 1e-12)
    assert (float(found.lipschitz), float(found.smoothness)) == (1.0, 0.0)
