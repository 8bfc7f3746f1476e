"""Steps that are proved on the segment against the gradient: they descend as promised, and say what they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.segment.along import Along

D = torch.float64


def network(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, sf.CrossEntropy]:
    torch.manual_seed(0)
    batch_norm = nn.BatchNorm1d(4, track_running_stats=False)
    parts = {
        "tanh": [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)],
        "layer norm": [nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)],
        "batch norm": [nn.Linear(6, 4), batch_norm, nn.Softplus(), nn.Linear(4, 3)],
    }[name]
    return nn.Sequential(*parts).to(dtype), torch.randn(12, 6, dtype=dtype), sf.CrossEntropy(torch.arange(12) % 3)


@pytest.mark.parametrize("dtype", [pytest.param(D, marks=pytest.mark.slow), torch.float32])
@pytest.mark.parametrize("name", ["tanh", "layer norm", "batch norm"])
def test_steps_go_further_than_balls_and_descend_as_promised(name: str, dtype: torch.dtype) -> None:
    model, x, objective = network(name, dtype)
    found = sf.certify(model, x, objective=objective, effort="high")
    assert found.gradient_step is not None
    assert found.step_size == found.gradient_step > 2 * found.inverse_smoothness
    assert set(found.block_step_sizes.values()) == {found.step_size}
    judge, data = model.double(), x.double()  # the weights are the same real numbers
    weights = {path: value.detach().clone() for path, value in judge.named_parameters()}

    def value(at: dict[str, Tensor]) -> Tensor:
        out: Tensor = objective(torch.func.functional_call(judge, at, (data,)))
        return out

    slopes, start = torch.func.grad_and_value(value)(weights)
    generator = torch.Generator().manual_seed(1)
    off = 2.0**-41 if dtype is D else 2.0**-21
    size = sum(float(slope.square().sum()) for slope in slopes.values())
    noise = {path: torch.randn(slope.shape, dtype=D, generator=generator) for path, slope in slopes.items()}
    length = sum(float(part.square().sum()) for part in noise.values()) ** 0.5
    for part in (1.0, 0.6, 0.3, 0.01):
        for turned in (0.0, off * size**0.5 / length):
            step = part * found.step_size
            moved = {path: w - step * (slopes[path] + turned * noise[path]) for path, w in weights.items()}
            assert float(start - value(moved)) >= 0.5 * step * size * (1 - 1e-5) - 1e-14


def test_it_is_written_and_is_the_same_on_every_ball() -> None:
    model, x, objective = network("tanh", D)
    free = sf.certify(model, x, objective=objective, effort="high")
    ball = sf.certify(model, x, objective=objective, domain=sf.Ball(0.01), effort="high")
    assert ball.radius == 0.01
    assert free.gradient_step is not None
    assert ball.step_size == pytest.approx(free.step_size, rel=0.1)
    for certificate in (free, ball):
        restored = sf.Certificate.from_json(certificate.to_json())
        assert restored.step_size == certificate.step_size
        assert restored.gradient_step == certificate.gradient_step
        assert "one step from the weights" in str(certificate)
    assert (free.gradients or 0) > (ball.gradients or 0) > 10 * sum(p.numel() for p in model.parameters())


def test_where_nothing_is_known_of_the_segment_balls_say_what_they_say() -> None:
    model, x, objective = network("tanh", D)
    for options in ({"effort": "normal"}, {"effort": "high", "regularizer": sf.Ridge(0.1)}):
        assert sf.certify(model, x, objective=objective, **options).gradient_step is None
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    at_rest = sf.certify(model, torch.zeros_like(x), objective=objective, effort="high")
    assert at_rest.gradient_step is None
    assert at_rest.smoothness.is_finite


def test_bounds_hold_along_all_directions_nearby() -> None:
    model, x, objective = network("layer norm", D)
    weights = {path: value.detach().clone() for path, value in model.named_parameters()}

    def value(at: dict[str, Tensor]) -> Tensor:
        out: Tensor = objective(torch.func.functional_call(model, at, (x,)))
        return out

    slopes, start = torch.func.grad_and_value(value)(weights)
    down = {path: -slope for path, slope in slopes.items()}
    aside = {path: 0.05 * float(move.norm()) for path, move in down.items()}
    exact, wide = (Along(model, x, objective, aside=each).majorant(down, 0.02, 5) for each in ({}, aside))
    assert exact.curvature < wide.curvature < math.inf
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        noise = {path: torch.randn(move.shape, dtype=D, generator=generator) for path, move in down.items()}
        turned = {path: move + aside[path] * noise[path] / noise[path].norm() for path, move in down.items()}
        slope = sum(float((slopes[path] * turned[path]).sum()) for path in down)
        for step in (0.02, 0.01, 0.002):
            end = float(value({path: w + step * turned[path] for path, w in weights.items()}))
            assert end <= float(start) + slope * step + 0.5 * wide.curvature * step**2 + 1e-14
