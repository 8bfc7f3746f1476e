"""The steps that a certificate allows descend as promised, and what it assumes is said."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from additions.test_additions import UnitRms
from surefoot.calculus.segment.along import Along
from surefoot.operations.evaluation import softplus_gap

D = torch.float64
MIDDLES = {
    "tanh": lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)],
    "softplus": lambda: [nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 3)],
    "gelu": lambda: [nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)],
    "relu": lambda: [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)],
    "layer norm": lambda: [nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)],
    "batch norm": lambda: [
        nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Softplus(), nn.Linear(4, 3),
    ],
}  # fmt: skip


class Problem:
    """A network with data, and its objective as a function of named weights in double precision."""

    def __init__(self, name: str, dtype: torch.dtype = D) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*MIDDLES[name]()).to(dtype)
        self.x, self.objective = torch.randn(12, 6, dtype=dtype), sf.CrossEntropy(torch.arange(12) % 3)

    def certify(self, **options: object) -> sf.Certificate:
        return sf.certify(self.model, self.x, objective=self.objective, **options)  # type: ignore[arg-type]

    def start(self) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
        """Weights, gradient, value; the weights are the same real numbers in double precision."""
        self.model, self.x = self.model.double(), self.x.double()
        weights = {path: value.detach().clone() for path, value in self.model.named_parameters()}
        slopes, value = torch.func.grad_and_value(self.value)(weights)
        return weights, slopes, float(value)

    def value(self, weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.objective(torch.func.functional_call(self.model, weights, (self.x,)))
        return found


def size_of(vectors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in vectors.values()))


@pytest.mark.parametrize("name", ["tanh", "softplus", "gelu", "relu"])
def test_without_a_domain_no_other_ball_proves_a_much_longer_step(name: str) -> None:
    problem = Problem(name)
    chosen = problem.certify()
    assert isinstance(chosen.radius, float)
    for factor in (0.1, 0.3, 0.8, 1.25, 3.0, 10.0) if name != "relu" else (0.1, 0.5):
        assert problem.certify(domain=sf.Ball(chosen.radius * factor)).step_size <= chosen.step_size * 1.15
    weights, slopes, before = problem.start()
    moved = {path: w - chosen.step_size * slopes[path] for path, w in weights.items()}
    assert before - float(problem.value(moved)) >= 0.5 * chosen.step_size * size_of(slopes) ** 2 * (1 - 1e-9) > 0


@pytest.mark.parametrize("dtype", [pytest.param(D, marks=pytest.mark.slow), torch.float32])
@pytest.mark.parametrize("name", ["tanh", "layer norm", "batch norm"])
def test_steps_against_the_gradient_go_further_than_balls_and_descend(name: str, dtype: torch.dtype) -> None:
    problem = Problem(name, dtype)
    found = problem.certify(effort="high")
    assert found.gradient_step is not None
    assert found.step_size == found.gradient_step > 2 * found.inverse_smoothness
    assert set(found.block_step_sizes.values()) == {found.step_size}
    weights, slopes, before = problem.start()
    noise = {path: torch.randn(slope.shape, dtype=D) for path, slope in slopes.items()}
    off = (2.0**-41 if dtype is D else 2.0**-21) * size_of(slopes) / size_of(noise)
    for part in (1.0, 0.6, 0.3, 0.01):
        for turned in (0.0, off):
            step = part * found.step_size
            moved = {path: w - step * (slopes[path] + turned * noise[path]) for path, w in weights.items()}
            least = 0.5 * step * size_of(slopes) ** 2 * (1 - 1e-5) - 1e-14
            assert before - float(problem.value(moved)) >= least


def test_the_step_against_the_gradient_is_written_and_is_the_same_on_every_ball() -> None:
    problem = Problem("tanh")
    free, ball = (problem.certify(domain=domain, effort="high") for domain in (None, sf.Ball(0.01)))
    assert ball.radius == 0.01
    assert ball.step_size == pytest.approx(free.step_size, rel=0.1)
    for certificate in (free, ball):
        restored = sf.Certificate.from_json(certificate.to_json())
        assert restored.step_size == certificate.step_size
        assert restored.gradient_step == certificate.gradient_step is not None
        assert "one step from the weights" in str(certificate)
    assert (free.gradients or 0) > (ball.gradients or 0) > 10 * sum(p.numel() for p in problem.model.parameters())


def test_where_nothing_is_known_of_the_segment_balls_say_what_they_say() -> None:
    problem = Problem("tanh")
    for options in ({"effort": "normal"}, {"effort": "high", "regularizer": sf.Ridge(0.1)}):
        assert problem.certify(**options).gradient_step is None
    problem.x = torch.zeros_like(problem.x)
    for value in problem.model[2].parameters():
        nn.init.zeros_(value)
    at_rest = problem.certify(effort="high")
    assert at_rest.gradient_step is None
    assert at_rest.smoothness.is_finite
    flat = nn.Linear(2, 2).double()
    for value in flat.parameters():
        nn.init.zeros_(value)
    y = torch.zeros(3, 2, dtype=D)
    assert sf.certify(flat, torch.ones(3, 2, dtype=D), objective=sf.Square(y)).smoothness.is_finite


def test_bounds_hold_along_all_directions_nearby() -> None:
    problem = Problem("layer norm")
    weights, slopes, before = problem.start()
    down = {path: -slope for path, slope in slopes.items()}
    aside = {path: 0.05 * float(move.norm()) for path, move in down.items()}
    exact, wide = (
        Along(problem.model, problem.x, problem.objective, aside=each).majorant(down, 0.02, 5)
        for each in ({}, aside)
    )
    assert exact.curvature < wide.curvature < math.inf
    for _ in range(50):
        noise = {path: torch.randn(move.shape, dtype=D) for path, move in down.items()}
        turned = {path: move + aside[path] * noise[path] / noise[path].norm() for path, move in down.items()}
        slope = sum(float((slopes[path] * turned[path]).sum()) for path in down)
        for step in (0.02, 0.01, 0.002):
            end = float(problem.value({path: w + step * turned[path] for path, w in weights.items()}))
            assert end <= before + slope * step + 0.5 * wide.curvature * step**2 + 1e-14


def test_domains_say_what_they_are_and_whether_the_weights_lie_inside() -> None:
    problem = Problem("tanh")
    outside, inside = (problem.certify(domain=domain) for domain in (sf.ProductBall(1e-3), sf.Ball(0.1)))
    assert (outside.weights_inside, inside.weights_inside) == (False, True)
    assert "the present weights lie outside this domain" in str(outside)
    assert "outside" not in str(inside)
    assert sf.Certificate.from_json(outside.to_json()).weights_inside is False
    assert "each block within 1 of the origin" in sf.certify(problem.model, problem.x).domain
    with torch.device("meta"):
        network, images = nn.Linear(3, 1), torch.empty(1, 3)
    assert "each block within 1 of the origin" in sf.certify(network, images, input_norm=1.0).domain


def of(middle: nn.Module, size: float, domain: sf.domains.Domain | None = None) -> sf.Certificate:
    model = nn.Sequential(nn.Linear(2, 3), middle, nn.Linear(3, 1)).double()
    x, y = size * torch.randn(4, 2, dtype=D), torch.zeros(4, 1, dtype=D)
    if isinstance(domain, sf.Segment):
        domain = sf.Segment({n: torch.ones_like(p) for n, p in model.named_parameters()}, domain.length)
    return sf.certify(model, x, objective=sf.Square(y), domain=domain)


@pytest.mark.parametrize(
    "domain", [None, sf.Ball(0.01), sf.Segment(None, 0.01)], ids=["longest", "ball", "segment"]
)
def test_the_jump_of_softplus_is_said_where_it_is_within_reach(domain: sf.domains.Domain | None) -> None:
    far, near = (of(nn.Softplus(), size, domain) for size in (30.0, 1.0))
    assert not near.remarks
    (remark,) = far.remarks
    assert f"{softplus_gap():.1e}" in remark
    assert "without the jump" in str(far)
    assert sf.Certificate.from_json(far.to_json()).remarks == far.remarks


@pytest.mark.parametrize("beta", [1.0, 0.5, 4.0])
def test_values_and_slopes_of_torch_are_that_close_to_those_certified(beta: float) -> None:
    point = torch.tensor([[20.0 / beta * (1 + 2.0**-40)]], dtype=D, requires_grad=True)
    computed = F.softplus(point, beta)
    (slope,) = torch.autograd.grad(computed, point)
    smooth = math.log1p(math.exp(beta * point.item())) / beta
    claimed = sf.certify(nn.Softplus(beta), point.detach(), wrt="input", domain=sf.Ball(0.0))
    (remark,) = claimed.remarks
    said = softplus_gap(beta) * max(1.0, beta)
    assert f"{said:.1e}" in remark
    assert 0 < smooth - computed.item() <= said
    assert computed.item() <= float(claimed.bound)
    assert float(claimed.lipschitz) < slope.item() <= float(claimed.lipschitz) + said


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return UnitRms()(x) + x


def test_what_is_assumed_of_operations_of_others_is_said() -> None:
    certificate = of(Mixed(), 1.0, sf.ProductBall(0.01, center="present"))
    (remark,) = certificate.remarks
    assert remark.startswith("assumed: 'example.unit_rms', a rule of additions.own_normalisation")
    assert "assumed: 'example.unit_rms'" in str(certificate)
    assert not of(nn.Tanh(), 1.0, sf.Ball(0.01)).remarks
