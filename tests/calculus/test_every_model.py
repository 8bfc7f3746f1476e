"""Every model of the zoo, and ten and more of another library, have a full table: finite, or ∞ with its reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf
from graph.test_transformers import MODELS, build

DOMAINS = sf.ProductBall(1.0), sf.Ball(1e-3)
DEEP = ("resnet50-smooth", "resnet152", "resnet152-smooth")  # the same blocks, in greater number


def check(model: nn.Module, x: torch.Tensor) -> None:
    for domain in DOMAINS:
        certificate = sf.certify(model, x, domain=domain)
        table = str(certificate)
        assert certificate.bound.is_finite, domain
        assert certificate.lipschitz.is_finite, domain
        assert "nan" not in table.lower(), domain
        assert len(certificate.rows) > 2, domain
        assert certificate.smoothness.is_finite or all(reason in table for reason in certificate.reasons[:4])
        assert certificate.smoothness.is_finite == (not certificate.reasons), domain


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEEP else name for name in sf.zoo.names()]
)
def test_the_zoo(name: str) -> None:
    torch.manual_seed(0)
    options = sf.zoo.small_options(name)
    model = sf.zoo.build(name, **options).double()
    x = sf.zoo.example_input(name, dtype=torch.float64, **options)
    check(model, x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str) -> None:
    check(*build(name))
