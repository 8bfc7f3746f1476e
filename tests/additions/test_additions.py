"""An element-wise function, a normalisation and a loss, one short file each: every reading follows from it."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from additions import own_function, own_normalisation
from surefoot.report import render_report

MOST_LINES = 15
LIBRARY = torch.library.Library("example", "DEF")
LIBRARY.define("unit_rms(Tensor input, float eps) -> Tensor")
LIBRARY.impl("unit_rms", lambda x, eps: torch.rms_norm(x, x.shape[-1:], eps=eps), "CompositeImplicitAutograd")


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.erfcx(x)


class UnitRms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.example.unit_rms(x, 1e-2)


def case(addition: ModuleType) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    middle: nn.Module = {own_function: Scaled(), own_normalisation: UnitRms()}.get(addition, nn.Tanh())
    model = nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    return model, x, sf.Square(y)


EVERY = pytest.mark.parametrize(
    "addition", [own_function, own_normalisation], ids=lambda a: a.__name__.rpartition(".")[2]
)


@EVERY
def test_it_is_short(addition: ModuleType) -> None:
    assert len(Path(inspect.getfile(addition)).read_text().splitlines()) <= MOST_LINES


@EVERY
def test_certificate_and_step(addition: ModuleType) -> None:
    model, x, objective = case(addition)
    certificate = sf.certify(model, x, objective=objective)
    assert 0 < float(certificate.smoothness) < float("inf")
    domain = sf.Ball(0.05)
    upper, lower = (f(model, x, objective=objective, domain=domain) for f in (sf.certify, sf.estimate))
    assert float(lower.lipschitz) <= float(upper.lipschitz)
    assert float(lower.smoothness) <= float(upper.smoothness)
    before = objective(model(x)).item()
    optimizer = sf.optim.CertifiedDescent(model, objective.bound_to(None), proof="segment")
    optimizer.step(x, objective.targets)
    promised = optimizer.history[-1].proved_decrease
    assert 0 < promised <= before - objective(model(x)).item()


@EVERY
def test_cost(addition: ModuleType) -> None:
    model, x, _ = case(addition)
    cost = sf.cost(model, x)
    assert cost.forward >= 5 * (3 * 4 + 4 * 2)


@EVERY
def test_gauss_newton_is_exact(addition: ModuleType) -> None:
    model, x, objective = case(addition)
    step = sf.oracles.gauss_newton(sf.Chain(model, x), objective, kappa=0.1)
    names, values = zip(*model.named_parameters(), strict=True)
    flat = torch.cat([value.detach().reshape(-1) for value in values])

    def outputs(vector: Tensor) -> Tensor:
        parts = vector.split([value.numel() for value in values])
        shaped = [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]
        return torch.func.functional_call(model, dict(zip(names, shaped, strict=True)), (x,)).reshape(-1)

    def loss(vector: Tensor) -> Tensor:
        return objective(vector.reshape(5, 2))

    jacobian = torch.autograd.functional.jacobian(outputs, flat)
    hessian = torch.autograd.functional.hessian(loss, outputs(flat).detach())
    slope = torch.autograd.functional.jacobian(loss, outputs(flat).detach())
    matrix = jacobian.T @ hessian @ jacobian + 0.1 * torch.eye(len(flat), dtype=flat.dtype)
    expected = -torch.linalg.solve(matrix, jacobian.T @ slope)
    found = torch.cat([step.direction[name].reshape(-1) for name in names])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@EVERY
def test_report(addition: ModuleType) -> None:
    model, x, objective = case(addition)
    page = render_report([("model", sf.certify(model, x, objective=objective, domain=sf.Ball(0.01)))])
    label = {own_function: "special_erfcx", own_normalisation: "unit_rms"}[addition]
    assert label in page
