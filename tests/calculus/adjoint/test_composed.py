"""Slopes at the weights through Jacobians between cuts, against derivatives formed entry by entry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.steps import DenseModel
from surefoot.calculus.adjoint.backward import backward
from surefoot.calculus.adjoint.bounds import Centre
from surefoot.calculus.adjoint.composed import Composed
from surefoot.calculus.adjoint.costates import costates
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.effort import HIGH, QUICK
from surefoot.certificate.proving import bounds_of
from surefoot.norms.matrix import largest_norm, spectral_norm

CUTS = replace(HIGH, products=0.0, directions=0, composed=1e9)


class Residual(nn.Module):
    def __init__(self, tied: bool = False, coupled: bool = False) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3, 4)
        self.norm = nn.BatchNorm2d(3).train(coupled)
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.third = self.first if tied else nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.softplus(self.norm(self.stem(x)))
        x = nn.functional.softplus(x + self.second(nn.functional.gelu(self.first(x))))
        x = nn.functional.avg_pool2d(x, 2)
        x = torch.tanh(x + self.third(x))
        out: Tensor = self.out(x.mean((2, 3)))
        return out


def deep() -> nn.Module:
    parts = [part for _ in range(5) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.Softplus())]
    return nn.Sequential(nn.Conv2d(1, 3, 3), *parts, nn.Flatten(), nn.Linear(3 * 16, 4))


def problem(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Tensor, sf.CrossEntropy]:
    return model.to(dtype), torch.randn(5, 1, 6, 6, dtype=dtype), sf.CrossEntropy(torch.arange(5) % 4)


def smoothness(model: nn.Module, x: Tensor, loss: nn.Module, centre: Centre) -> float:
    ball = sf.Ball(0.0)
    return float(bounds_of(Analysis.of(model, x, loss).over(ball), ball, "params", centre).certificate.smoothness)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["residual", "tied", "deep"])
def test_the_smoothness_is_above_the_dense_hessian_and_below_that_of_norms(kind: str, dtype: torch.dtype) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        made = deep() if kind == "deep" else Residual(tied=kind == "tied")
        model, x, loss = problem(made, dtype)
        norms, found = (smoothness(model, x, loss, c) for c in (Centre(QUICK), Centre(CUTS, alone=True)))
        truth = DenseModel(model.double(), x.double(), loss).hessian_norm
        assert truth * (1 - 1e-9) <= found
        assert found <= (0.75 if kind == "deep" else 0.95) * norms


@pytest.mark.parametrize("tied", [False, True])
def test_every_slope_is_above_the_derivative(tied: bool) -> None:
    torch.manual_seed(0)
    model, x, loss = problem(Residual(tied), torch.float64)
    result = Analysis.of(model, x, loss).over(sf.Ball(0.0))
    composed = Composed(result, 1e9)
    assert {"linear", "softplus_2"} & set(composed.rows) or len(composed.rows) >= 2
    at = backward(result)
    assert at is not None
    slopes, weighted = composed.slopes(costates(result, at))
    assert weighted
    parameters = {leaf.name: leaf.path for leaf in result.graph.parameters}  # type: ignore[union-attr]

    def logits(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).flatten()

    exact = torch.func.jacrev(logits)({n: p.detach() for n, p in model.named_parameters()})
    (output,) = result.steps[-1].names.values()
    for k, name in enumerate(result.region.variables):
        truth = float(torch.linalg.matrix_norm(exact[parameters[name]].flatten(1), 2))
        assert truth <= float(slopes[output][k]) * (1 + 1e-12)
        assert float(slopes[output][k]) <= float(result.enclosures[output].lipschitz[k])


def test_samples_that_interact_and_a_budget_of_nothing_change_nothing() -> None:
    torch.manual_seed(0)
    for model, effort in ((Residual(coupled=True), CUTS), (Residual(), replace(CUTS, composed=1e-9))):
        given = problem(model, torch.float64)
        norms, found = (smoothness(*given, c) for c in (Centre(QUICK), Centre(effort, alone=True)))
        assert found == norms


def test_the_cost_is_stated() -> None:
    torch.manual_seed(0)
    given = problem(deep(), torch.float64)
    centre = Centre(CUTS, alone=True)
    smoothness(*given, centre)
    result = Analysis.of(*given).over(sf.Ball(0.0))
    assert centre.cost >= round(Composed(result, 1e9).cost) > 0


def test_one_norm_for_many_matrices() -> None:
    torch.manual_seed(0)
    matrices = [scale * torch.randn(7, 5, dtype=torch.float64) for scale in (1.0, 0.0, 3.0, 1e-200, 2.0)]
    truth = max(float(torch.linalg.matrix_norm(each, 2)) for each in matrices)
    assert truth <= largest_norm(matrices) <= truth * (1 + 1e-9)
    assert largest_norm([]) == largest_norm(matrices[1:2]) == 0.0
    assert largest_norm([1e200 * matrices[0]]) == spectral_norm(1e200 * matrices[0])
