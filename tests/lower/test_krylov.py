"""Bounds with a probability fail no more often than they say, and are close to the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.steps import DenseModel
from surefoot.attained import ProbableBound
from surefoot.lower.krylov import krylov
from surefoot.magnitude import Magnitude


def spectra() -> dict[str, Tensor]:
    one = torch.zeros(200, dtype=torch.float64)
    one[0] = -1.0
    return {
        "one": one,  # only the component along one vector shows anything
        "two": torch.cat([torch.tensor([1.0, -0.98], dtype=torch.float64), 0.1 * torch.rand(40).double()]),
        "even": torch.linspace(-1, 0.99, 60, dtype=torch.float64),
        "half": torch.arange(1, 21, dtype=torch.float64) ** -2,
    }


@pytest.mark.parametrize("name", list(spectra()))
@pytest.mark.parametrize("products", [1, 3])
def test_they_fail_no_more_often_than_they_say(name: str, products: int) -> None:
    torch.manual_seed(0)
    values, failed, tries = spectra()[name], {0.05: 0, 0.24: 0}, 1500
    for _ in range(tries):
        found = krylov(lambda v: values * v, torch.randn(len(values), dtype=torch.float64), products)
        assert found is not None
        assert found.largest <= 1 + 1e-12
        for failure in failed:
            failed[failure] += found.most_likely(failure) < float(values.abs().max())
    for failure, times in failed.items():
        assert times <= tries * failure + 3 * np.sqrt(tries * failure)


def test_many_products_are_close_where_eigenvalues_are_apart() -> None:
    torch.manual_seed(0)
    values = torch.arange(1, 400, dtype=torch.float64) ** -1.0
    sizes = []
    for products in (5, 10, 20, 40):
        found = krylov(lambda v: values * v, torch.randn(len(values), dtype=torch.float64), products)
        assert found is not None
        sizes.append(found.most_likely(1e-12))
    assert sizes == sorted(sizes, reverse=True)
    assert 1.0 <= sizes[-1] <= 1.2


@pytest.mark.parametrize("seed", range(4))
def test_networks_against_the_dense_hessian(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, loss = torch.randn(20, 6).double(), sf.CrossEntropy(torch.arange(20) % 3)
    truth = DenseModel(model, x, loss).hessian_norm
    found = sf.estimate(model, x, objective=loss, domain=sf.Ball(0.0), seed=seed)
    assert found.at_centre is not None
    assert truth <= float(found.at_centre) <= 1.5 * truth
    assert float(found.smoothness) <= truth * (1 + 1e-9)
    assert "with probability 1 − 1e-12" in str(found)
    less = sf.estimate(model, x, objective=loss, domain=sf.Ball(0.0), seed=seed, budget=40)
    assert less.at_centre is not None
    assert truth <= float(less.at_centre)


def test_a_function_with_several_values_has_none() -> None:
    assert sf.estimate(nn.Linear(2, 3), torch.eye(2)).at_centre is None


def test_it_is_no_proof() -> None:
    bound = ProbableBound(1.0, 1e-12)
    with pytest.raises(TypeError, match="no proved bound"):
        Magnitude.of(bound)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        bound + 1.0  # type: ignore[operator]
    with pytest.raises(TypeError):
        bound < 2.0  # type: ignore[operator] # noqa: B015
