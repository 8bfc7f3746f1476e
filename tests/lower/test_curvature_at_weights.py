"""The estimate of the curvature at the weights, against the dense Hessian, and what a certificate says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.steps import DenseModel
from surefoot.lower import LowerBound, curvature_at_weights


def problem(activation: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3)).to(dtype)
    return model, torch.randn(20, 6, dtype=dtype), sf.CrossEntropy(torch.arange(20) % 3)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.GELU()], ids=["tanh", "relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_below_the_norm_of_the_hessian_and_close(activation: nn.Module, dtype: torch.dtype) -> None:
    model, x, objective = problem(activation, dtype)
    estimates = [curvature_at_weights(model, x, objective, products) for products in (1, 3, 8, 80)]
    truth = DenseModel(model.double(), x.double(), objective).hessian_norm
    sizes = [float(estimate) for estimate in estimates if estimate is not None]
    assert len(sizes) == 4
    assert sizes == sorted(sizes)
    assert sizes[-1] <= truth * (1 + 1e-9)
    assert sizes[1] >= 0.5 * truth
    assert sizes[2] >= 0.95 * truth


def test_a_certificate_says_what_the_curvature_would_allow() -> None:
    model, x, objective = problem(nn.Tanh())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    certificate = sf.certify(model, x, objective=objective, effort="quick")
    assert isinstance(certificate.curvature, LowerBound)
    assert float(certificate.curvature) <= DenseModel(model.double(), x.double(), objective).hessian_norm * (
        1 + 1e-9
    )
    assert float(certificate.curvature) <= float(certificate.smoothness)
    said = " ".join(str(certificate).split()).split("; the curvature at these weights would allow ")[1].split()[0]
    assert float(said) >= 1 / float(certificate.curvature) >= certificate.step_size
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_nothing_is_estimated_where_no_step_from_the_weights_is_certified() -> None:
    model, x, objective = problem(nn.Tanh())
    assert sf.certify(model, x, objective=objective, domain=sf.ProductBall(1.0)).curvature is None
    assert sf.certify(model, x, domain=sf.Ball(0.1)).curvature is None
    kinked, x, objective = problem(nn.ReLU())
    assert sf.certify(kinked, x, objective=objective, domain=sf.Ball(1.0)).curvature is None
