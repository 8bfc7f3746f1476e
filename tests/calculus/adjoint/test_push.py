"""Derivatives along a move are within their proved errors of the exact ones, judged with 200 bits."""

from __future__ import annotations

import flint
import pytest
import torch
from torch import nn

import surefoot as sf
from judges.exact import stored, truth
from judges.exact_numbers import exactly
from surefoot.calculus.adjoint.gradient import proved_gradient, push
from surefoot.calculus.analysis import Analysis

D = torch.float64
MODELS = {
    "linear": lambda: nn.Linear(3, 2),
    "tanh": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "layer": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)),
    "batch": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Linear(4, 2)),
    "soft-max": lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 2)),
    "saturated": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("name", MODELS)
def test_pushed_derivatives(name: str, scale: float) -> None:
    torch.manual_seed(3)
    model, x, y = MODELS[name]().double(), scale * torch.randn(5, 3, dtype=D), torch.randn(5, 2, dtype=D)
    analysis = Analysis.of(model, x, sf.Square(y))
    result = analysis.over(sf.Ball(0.0))
    names = {leaf.path: leaf.name for leaf in analysis.reading.graph.parameters}
    parameters = dict(model.named_parameters())
    move = {path: torch.randn_like(value) for path, value in parameters.items()}
    found = push(result, {names[path]: value for path, value in move.items()}, result.steps[-1].names["outputs"])
    assert found is not None
    along = []
    with flint.ctx.workprec(200):
        for k in range(10):
            weights = [float(i == k) for i in range(10)]
            fact = truth(lambda: model(x), model, {p: stored(p) for p in parameters.values()}, None, weights)
            steps = [exactly(v) for path in parameters for v in move[path].reshape(-1).tolist()]
            along.append(sum((g * s for g, s in zip(fact.gradient, steps, strict=True)), flint.arb(0)))
        wrong = [a - exactly(v) for a, v in zip(along, found.value.reshape(-1).tolist(), strict=True)]
        assert sum((w * w for w in wrong), flint.arb(0)).sqrt() <= flint.arb(float(found.error))
        size = sum((a * a for a in along), flint.arb(0))
        assert flint.arb(proved_gradient(analysis).bent(move)) >= size / 5
    assert float(found.error) <= 1e-9 * float(found.value.norm())
