"""Optimizers that go on until convergence from where they are is proved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.data import load


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    return model, torch.randn(10, 4).double(), torch.randn(10, 1).double()


def test_gauss_newton_stops_with_the_theorem_and_goes_on_where_it_does_not_hold():
    model, x, y = problem()
    optimizer = sf.optim.GaussNewton(model, sf.Square(), kappa=0.01, until="proved")
    for _ in range(12):
        optimizer.step(x, y)
    verdict, taken = optimizer.convergence, len(optimizer.history)
    assert verdict.proved
    assert taken < 12
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    plain = sf.optim.GaussNewton(model, sf.Square(), damping=1e-12)
    for _ in range(verdict.iterations(1e-20)):
        plain.step(x, y)
    moved = torch.cat([(value.detach() - start[name]).reshape(-1) for name, value in model.named_parameters()])
    assert float(moved.norm()) <= verdict.radius
    assert plain.value(x, y) < 1e-20
    with torch.no_grad():
        model[0].weight.add_(0.1)
    optimizer.step(x, y)
    assert len(optimizer.history) == taken + 1


def test_descent_looks_for_gradient_descent():
    model, x, y = problem()
    optimizer = sf.CertifiedDescent(model, sf.Square(), until="proved")
    optimizer.step(x, y)
    assert optimizer.convergence.method == "gradient"
    assert not optimizer.convergence.proved
    with pytest.raises(ValueError, match="until"):
        sf.CertifiedDescent(model, sf.Square(), until="bored")


def digits(count: int, outputs: int) -> tuple[Tensor, Tensor]:
    found = load("digits").flat()
    return found.x[:count].double(), (found.y[:count, None].double() / 9 if outputs == 1 else found.y[:count] % 2)


@pytest.mark.parametrize(
    ("kind", "activation", "width"),
    [
        ("GaussNewton", nn.Tanh, 32),
        ("GaussNewton", nn.ReLU, 64),
        pytest.param("CertifiedDescent", nn.Tanh, 32, marks=pytest.mark.slow),
        pytest.param("Newton", nn.Tanh, 2, marks=pytest.mark.slow),
    ],
)
def test_each_stops_on_digits_and_prints_its_certificate(kind: str, activation: type[nn.Module], width: int):
    torch.manual_seed(0)
    x, y = digits(5, 2 if kind == "Newton" else 1)
    if kind == "Newton":
        model = nn.Sequential(nn.Linear(64, width), activation(), nn.Linear(width, 2)).double()
        optimizer = sf.optim.Newton(model, sf.CrossEntropy(), regularizer=sf.Ridge(0.1), until="proved")
    else:
        model = nn.Sequential(nn.Linear(64, width), activation(), nn.Linear(width, 1)).double()
        options = {"direction": "gauss_newton"} if kind == "CertifiedDescent" else {}
        optimizer = getattr(sf.optim, kind)(model, sf.Square(), until="proved", **options)
    for _ in range(30):
        optimizer.step(x, y)
        if optimizer.convergence.proved:
            break
    verdict, taken = optimizer.convergence, len(optimizer.history)
    assert verdict.proved, str(verdict)
    assert verdict.method == {"GaussNewton": "gauss_newton", "CertifiedDescent": "gradient"}.get(kind, "newton")
    assert ("strict local minimum" if kind == "Newton" else "zero loss") in str(verdict)
    assert verdict.to_html() == verdict._repr_html_()
    optimizer.step(x, y)
    assert len(optimizer.history) == taken, "it stays where the theorem holds"
