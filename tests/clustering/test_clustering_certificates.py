"""Certificates, segments and oracles of clustering objectives: sound, finite where they can be, with reasons."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.clustering import ConvexClustering, KMeans, Spectral, nearest_neighbours

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at its first jvp


def network(width: int = 3) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, width)).double()
    return model, torch.randn(9, 4, dtype=torch.float64)


def objectives(outputs: torch.Tensor) -> dict[str, nn.Module]:
    return {
        "k-means": KMeans(3),
        "one mean": KMeans(1),
        "spectral": Spectral(1),
        "spectral, sum": Spectral(1, reduction="sum"),
        "convex": ConvexClustering(penalty=0.02, tolerance=1e-10),
        "convex, sum": ConvexClustering(penalty=0.02, reduction="sum", tolerance=1e-10),
        "neighbours": ConvexClustering(nearest_neighbours(outputs, 3), penalty=0.1, tolerance=1e-10),
    }


NAMES = ["k-means", "one mean", "spectral", "spectral, sum", "convex", "convex, sum", "neighbours"]


@pytest.mark.parametrize("radius", [0.01, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_a_certificate_holds(name, radius):
    model, x = network()
    objective = objectives(model(x))[name]
    certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(radius))
    generator = torch.Generator().manual_seed(1)
    start = {path: value.detach().clone() for path, value in model.named_parameters()}
    centre = gradient(model, x, objective)
    for k in range(12):
        moves = {p: torch.randn(v.shape, generator=generator, dtype=torch.float64) for p, v in start.items()}
        if k % 3 == 0:
            moves = {p: (-1) ** k * g for p, g in centre.items()}
        length = math.sqrt(sum(float(v.square().sum()) for v in moves.values()))
        size = radius * (1.0 if k < 6 else 0.01)
        moves = {p: v * (size / length) for p, v in moves.items()}
        with torch.no_grad():
            for path, value in model.named_parameters():
                value.copy_(start[path] + moves[path])
        assert value_of(model, x, objective) <= float(certificate.bound) * (1 + 1e-9)
        there = gradient(model, x, objective)
        assert norm(there) <= float(certificate.lipschitz) * (1 + 1e-9)
        change = norm({p: there[p] - centre[p] for p in there})
        assert change <= float(certificate.smoothness) * size * (1 + 1e-6) + 1e-9
    smooth = name != "k-means" and (name[:8] != "spectral" or radius < 0.1)
    assert certificate.smoothness.is_finite == smooth
    if not smooth:
        assert "kink" in "".join(certificate.reasons)


def gradient(model: nn.Module, x: torch.Tensor, objective: nn.Module) -> dict[str, torch.Tensor]:
    names, values = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(objective(model(x)), values), strict=True))


@torch.no_grad()
def value_of(model: nn.Module, x: torch.Tensor, objective: nn.Module) -> float:
    return float(objective(model(x)))


def norm(parts: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts.values()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_constants_on_a_ball_of_outputs_hold(name, radius):
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    objective = objectives(y)[name]
    constants = objective.constants(y, radius=radius)
    everywhere = objective.constants(y)
    assert constants.lipschitz <= everywhere.lipschitz
    assert constants.smooth == constants.smoothness.is_finite
    for k in range(10):
        point = torch.randn(9, 3, generator=generator, dtype=torch.float64)
        if k % 2:
            point = point - point.mean(dim=0)
        point *= radius / point.norm()
        slope = objective.gradient(point)
        assert float(slope.norm()) <= float(constants.lipschitz) * (1 + 1e-9)
        other = objective.gradient(0.9 * point)
        if constants.smooth:
            assert float((slope - other).norm()) <= float(constants.smoothness) * 0.1 * radius * (1 + 1e-6)
    if not constants.smooth:
        assert "kink" in constants.flags[0]


def test_slopes_of_distances_are_reached():
    y = torch.diag(torch.tensor([1e-3, 2.0, -2.0], dtype=torch.float64))
    for objective in (KMeans(1, reduction="sum"), Spectral(1, reduction="sum")):
        certificate = sf.certify(nn.Identity(), y, objective=objective, wrt="input", domain=sf.Ball(1e-9))
        assert float(certificate.lipschitz) == pytest.approx(float(objective.gradient(y).norm()), rel=1e-6)


def test_the_curvature_of_spectral_clustering_is_reached():
    y = torch.diag(torch.tensor([3.0, 2.0, 1.6, 0.1], dtype=torch.float64))
    objective = Spectral(2, reduction="sum")
    certificate = sf.certify(nn.Identity(), y, objective=objective, wrt="input", domain=sf.Ball(1e-8))
    assert float(certificate.smoothness) == pytest.approx(4.0, rel=1e-6)
    wide = sf.certify(nn.Identity(), y, objective=objective, wrt="input", domain=sf.Ball(0.3))
    assert not wide.smoothness.is_finite


def test_the_curvature_of_convex_clustering_is_reached_at_a_point():
    y = torch.randn(9, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    objective = ConvexClustering(
        penalty=5.0, reduction="sum", tolerance=1e-12
    )  # all fused: h is half the variance
    for radius in (0.0, 1e-6, 1.0):
        certificate = sf.certify(nn.Identity(), y, objective=objective, wrt="input", domain=sf.Ball(radius))
        assert float(certificate.smoothness) == pytest.approx(1.0, rel=1e-9)


def test_without_data_or_weights():
    with torch.device("meta"):
        model, x = nn.Linear(4, 3), torch.empty(9, 4)
    for objective in (KMeans(3), Spectral(2), ConvexClustering()):
        certificate = sf.certify(model, x, objective=objective, domain=sf.ProductBall(1.0), input_norm=1.0)
        assert certificate.lipschitz.is_finite


@pytest.mark.parametrize("name", ["convex", "neighbours", "one mean", "spectral"])
def test_a_segment_bounds_the_objective(name):
    model, x = network()
    objective = objectives(model(x))[name]
    slopes = gradient(model, x, objective)
    direction = {path: -slope for path, slope in slopes.items()}
    length = 0.05
    certificate = sf.certify(model, x, objective=objective, domain=sf.Segment(direction, length))
    start, speed = value_of(model, x, objective), norm(slopes) ** 2
    before = {path: value.detach().clone() for path, value in model.named_parameters()}
    for part in (0.1, 0.5, 1.0):
        eta = part * length
        with torch.no_grad():
            for path, value in model.named_parameters():
                value.copy_(before[path] + eta * direction[path])
            found = value_of(model, x, objective)
        assert found <= start - eta * speed + float(certificate.smoothness) / 2 * eta**2 + 1e-9 * start
    assert certificate.smoothness.is_finite


def test_proved_steps_and_gauss_newton_descend_on_convex_clustering():
    model, x = network()
    objective = ConvexClustering(penalty=0.02, tolerance=1e-12)
    last = value_of(model, x, objective)
    for _ in range(4):
        slopes = gradient(model, x, objective)
        direction = {path: -slope for path, slope in slopes.items()}
        certificate = sf.certify(model, x, objective=objective, domain=sf.Segment(direction, 1.0))
        step = certificate.safe_step
        assert step > 0
        move(model, {path: step * part for path, part in direction.items()})
        value = value_of(model, x, objective)
        assert value <= last - 0.5 * step * norm(slopes) ** 2 * (1 - 1e-6)
        last = value
    model, x = network()
    last = value_of(model, x, objective)
    found = sf.oracles.gauss_newton(sf.Chain(model, x), objective, kappa=1.0, method="dynamic")
    move(model, found.direction)
    assert value_of(model, x, objective) < last


@torch.no_grad()
def move(model: nn.Module, direction: dict[str, torch.Tensor]) -> None:
    for path, value in model.named_parameters():
        value.add_(direction[path])


def test_steps_on_the_majoriser_descend_on_k_means():
    model, x = network()
    objective = KMeans(3, restarts=20)
    last = value_of(model, x, objective)
    for _ in range(5):
        majoriser = objective.majoriser(model(x).detach())
        optimizer = sf.optim.CertifiedDescent(model, sf.Square(), proof="segment")
        optimizer.step(x, majoriser.targets)
        value = value_of(model, x, objective)
        assert value <= last - optimizer.history[-1].promised_decrease + 1e-12
        last = value


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_differentiation_agree(name):
    y = torch.randn(9, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    v = torch.randn(9, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    objective = objectives(y)[name]
    _, tangent = torch.func.jvp(objective, (y,), (v,))
    assert float(tangent) == pytest.approx(float((objective.gradient(y) * v).sum()), rel=1e-10)
    assert torch.allclose(torch.func.grad(objective)(y), objective.gradient(y))
    _, curved = torch.func.jvp(torch.func.grad(objective), (y,), (v,))
    assert torch.allclose(curved, objective.hessian_vector_product(y, v), atol=1e-10)
    dense = torch.func.jacrev(torch.func.grad(objective))(y)
    assert torch.allclose(torch.einsum("abcd,cd->ab", dense, v), curved, atol=1e-10)
    leaf = y.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(leaf), leaf, create_graph=True)
    (once,) = torch.autograd.grad(slope, leaf, v, create_graph=True)
    with pytest.raises(NotImplementedError, match="third"):
        torch.autograd.grad(once.sum(), leaf)
