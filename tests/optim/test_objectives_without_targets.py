"""Optimizers on objectives that take no targets, or that may be negative."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.objectives import ModelLoss, Poisson
from surefoot.optim.base import OptimizerError


class Size(nn.Module):
    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.square().sum()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


X = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_targets_are_given_where_the_objective_takes_them() -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OptimizerError, match=r"CrossEntropy takes targets: step\(x, y\)"):
        sf.optim.CertifiedDescent(model, sf.CrossEntropy(), proof="segment").step(X)
    with pytest.raises(OptimizerError, match=r"ModelLoss has no targets: step\(x\)"):
        sf.optim.CertifiedDescent(model, ModelLoss(), proof="segment").step(X, X)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_objective_that_may_be_negative_has_no_lower_bound_unless_one_is_given() -> None:
    counts = (torch.arange(36) % 4).reshape(12, 3).double()
    for lower, known in ((None, False), (-20.0, True)):
        optimizer = sf.optim.CertifiedDescent(network(), Poisson(), lower=lower, proof="segment")
        for _ in range(3):
            optimizer.step(X, counts)
        found = optimizer.stationarity()
        assert (found.bound is not None) == known
        assert ("no number is known" in found.why) != known
    with pytest.raises(ValueError, match="finite number"):
        sf.optim.CertifiedDescent(network(), Poisson(), lower=float("nan"), proof="segment")


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = sf.optim.CertifiedDescent(network(), sf.objectives.OwnLoss(Size()), proof="segment")
    for _ in range(3):
        optimizer.step(X)
    before = optimizer.state_dict()["surefoot"]
    monkeypatch.setattr(optimizer, "write", lambda values: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(X)
    after = optimizer.state_dict()["surefoot"]
    assert (after["reach"], after["history"]) == (before["reach"], before["history"])
    for key in ("gradient", "direction"):
        assert all(torch.equal(value, after[key][name]) for name, value in before[key].items())
