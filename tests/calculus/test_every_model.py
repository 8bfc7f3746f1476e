"""Every model of the zoo, and ten and more of another library, have a full table: finite, or ∞ with its reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf
from graph.test_transformers import MODELS, build

DOMAINS = {"a-priori": sf.ProductBall(1.0), "local": sf.Ball(1e-3)}


def check(model: nn.Module, x: torch.Tensor, domain: sf.ProductBall | sf.Ball) -> sf.Certificate:
    certificate = sf.certify(model, x, domain=domain)
    table = str(certificate)
    assert certificate.bound.is_finite
    assert certificate.lipschitz.is_finite
    assert "nan" not in table.lower()
    assert len(certificate.rows) > 2
    assert certificate.smoothness.is_finite or all(reason in table for reason in certificate.reasons[:4])
    assert certificate.smoothness.is_finite == (not certificate.reasons)
    return certificate


@pytest.mark.parametrize("where", DOMAINS)
@pytest.mark.parametrize("name", sf.zoo.names())
def test_the_zoo(name: str, where: str) -> None:
    torch.manual_seed(0)
    options = sf.zoo.small_options(name)
    model = sf.zoo.build(name, **options).double()
    x = sf.zoo.example_input(name, dtype=torch.float64, **options)
    check(model, x, DOMAINS[where])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", DOMAINS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str, where: str) -> None:
    model, x = build(name)
    check(model, x, DOMAINS[where])
