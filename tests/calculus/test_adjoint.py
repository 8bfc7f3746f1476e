"""The adjoint pass: costates, and the second derivative of objectives on balls around the present weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import surefoot as sf
from surefoot.calculus.adjoint.backward import backward
from surefoot.calculus.adjoint.costates import costates
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.forward import Pass
from surefoot.enclosure import Enclosure


class Twice(nn.Module):
    """One layer applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.last = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.outer(torch.sigmoid(self.inner(x))))


class Attention(nn.Module):
    """One head over three positions; the positions of a sample interact."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(2, 2) for _ in range(4))
        self.read = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(2)
        return self.read(torch.flatten(torch.softmax(scores, -1) @ self.value(x), 1))


class Gated(nn.Module):
    """A product of two branches, and a scale that is shared by the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.scale = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.value(x) * self.scale


NETWORKS = {
    "linear": (lambda: nn.Linear(3, 3), (4, 3)),
    "softplus": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 3)), (4, 3)),
    "tanh": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)),
        (5, 3),
    ),
    "silu": (lambda: nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 3, bias=False)), (4, 3)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2),
            nn.Softplus(),
            nn.Conv2d(2, 2, 2, groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(2, 3),
        ),
        (3, 1, 3, 3),
    ),
    "residual": (Residual, (4, 3)),
    "shared": (Twice, (4, 3)),
    "attention": (Attention, (3, 3, 2)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, eps=0.1), nn.Linear(4, 3)), (4, 3)),
    "batch norm": (
        lambda: nn.Sequential(
            nn.Linear(3, 3), nn.BatchNorm1d(3, eps=0.1, track_running_stats=False), nn.Tanh(), nn.Linear(3, 3)
        ),
        (5, 3),
    ),
    "gated": (Gated, (4, 3)),
}
RADII = [0.0, 0.01, 0.3, 3.0]


def setting(name: str, loss: str, seed: int = 0) -> tuple[nn.Module, Tensor, nn.Module]:
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    model, x = make().double(), torch.randn(shape).double()
    if loss == "square":
        return model, x, sf.Square(torch.randn(shape[0], 3).double())
    return model, x, sf.CrossEntropy(torch.randint(0, 3, shape[:1]))


class Judge:
    """The objective as a function of one flat vector of all parameters."""

    def __init__(self, model: nn.Module, x: Tensor, objective: nn.Module) -> None:
        self.model, self.x, self.objective = model, x, objective
        self.names = [name for name, _ in model.named_parameters()]
        self.shapes = [p.shape for p in model.parameters()]
        self.centre = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def parameters(self, u: Tensor) -> dict[str, Tensor]:
        pieces = u.split([shape.numel() for shape in self.shapes])
        return {n: p.reshape(s) for n, p, s in zip(self.names, pieces, self.shapes, strict=True)}

    def value(self, u: Tensor) -> Tensor:
        return self.objective(functional_call(self.model, self.parameters(u), (self.x,)))

    def hessian(self, u: Tensor) -> Tensor:
        return torch.autograd.functional.hessian(self.value, u)

    def gradient(self, u: Tensor) -> Tensor:
        return torch.func.grad(self.value)(u)

    def points(self, radius: float, count: int = 3) -> list[Tensor]:
        """The centre, and points on the sphere: random ones, and along the gradient."""
        directions = [*torch.randn(count, len(self.centre)).double(), self.gradient(self.centre)]
        steps = [radius * d / d.norm().clamp(min=1e-300) for d in directions]
        return [self.centre, *(self.centre + step for step in steps if radius)]

    def block(self, path: str) -> list[int]:
        inside, start = [], 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name.rpartition(".")[0] == path:
                inside += range(start, start + shape.numel())
            start += shape.numel()
        return inside


def run(model: nn.Module, x: Tensor, objective: nn.Module, domain: sf.Ball) -> Pass:
    return Analysis.of(model, x, objective).over(domain)


def costates_of(result: Pass) -> dict[str, Enclosure]:
    centre = backward(result)
    assert centre is not None
    return costates(result, centre)


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


@pytest.mark.parametrize("loss", ["square", "cross entropy"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_point_of_the_domain_exceeds_the_certificate(name: str, loss: str) -> None:
    model, x, objective = setting(name, loss)
    judge = Judge(model, x, objective)
    for radius in RADII:
        certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(radius))
        matrix = certificate.block_smoothness.numpy()
        blocks = [judge.block(path) for path in certificate.block_lipschitz]
        for u in judge.points(radius):
            hessian, gradient = judge.hessian(u), judge.gradient(u)
            assert norm(hessian) <= float(certificate.smoothness), radius
            assert float(gradient.norm()) <= float(certificate.lipschitz) * (1 + 1e-12)
            for i, rows in enumerate(blocks):
                slope = float(list(certificate.block_lipschitz.values())[i])
                assert float(gradient[rows].norm()) <= slope * (1 + 1e-12)
                for j, columns in enumerate(blocks):
                    assert norm(hessian[rows][:, columns]) <= matrix[i, j] * (1 + 1e-12), (radius, i, j)


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("name", NETWORKS)
def test_costates_are_within_their_enclosures(name: str, radius: float) -> None:
    model, x, objective = setting(name, "cross entropy", seed=1)
    judge = Judge(model, x, objective)
    enclosed = costates_of(run(model, x, objective, sf.Ball(radius)))
    for u in judge.points(radius):
        there = costates_of(run(model, x, objective, sf.Ball(0.0, center=judge.parameters(u))))
        for tensor, costate in enclosed.items():
            move = there[tensor].value - costate.value
            assert float(move.norm()) <= float(costate.spread) + 1e-12
            assert float(there[tensor].value.norm()) <= float(costate.bound) + 1e-12
            if costate.rows is not None:
                rows = move.reshape(move.shape[0], -1).norm(dim=1)
                assert bool((rows <= costate.rows.tensor() + 1e-12).all())


@pytest.mark.parametrize("name", NETWORKS)
def test_never_above_the_forward_pass(name: str) -> None:
    model, x, objective = setting(name, "cross entropy", seed=2)
    for radius in RADII:
        result = run(model, x, objective, sf.Ball(radius))
        matrix = assemble(terms(result, weighted_curvature(result)), len(result.region.variables))
        certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(radius))
        assert certificate.smoothness <= smoothness(matrix) * 1.01  # norms by other rules


def test_gradients_at_the_centre_are_those_of_autograd() -> None:
    model, x, objective = setting("residual", "cross entropy")
    certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))
    objective(model(x)).backward()
    assert certificate.block_gradients is not None
    for path, norm_there in certificate.block_gradients.items():
        grads = [p.grad.reshape(-1) for p in model.get_submodule(path).parameters(recurse=False)]
        assert norm_there == pytest.approx(float(torch.cat(grads).norm()), rel=1e-12)


def test_one_linear_layer_and_square_is_exact() -> None:
    """Without a bias the second derivative is I ⊗ XᵀX/n, at every point and whatever the radius."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3, bias=False).double(), torch.randn(6, 4).double()
    objective = sf.Square(torch.randn(6, 3).double())
    exact = norm(x) ** 2 / 6
    for radius in (0.0, 1.0):
        found = float(sf.certify(model, x, objective=objective, domain=sf.Ball(radius)).smoothness)
        assert exact <= found <= exact * (1 + 1e-9)


def test_at_a_point_the_lipschitz_constant_is_the_norm_of_the_gradient() -> None:
    model, x, objective = setting("softplus", "cross entropy")
    judge = Judge(model, x, objective)
    exact = float(judge.gradient(judge.centre).norm())
    found = float(sf.certify(model, x, objective=objective, domain=sf.Ball(0.0)).lipschitz)
    assert exact * (1 - 1e-14) <= found <= exact * (1 + 1e-8)


def test_without_a_centre_the_forward_pass_speaks() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.empty(5, 3, device="meta")
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(torch.zeros(5, dtype=torch.long)), input_norm=1.0)
    assert certificate.block_gradients is None
    assert math.isfinite(float(certificate.smoothness))


@pytest.mark.parametrize("radius", [0.0, 0.1])
def test_layers_behind_frozen_ones(radius):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    x, objective = torch.randn(5, 3).double(), sf.CrossEntropy(torch.tensor([0, 1, 1, 0, 1]))
    certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(radius))
    found = sf.estimate(model, x, objective=objective, domain=sf.Ball(radius))
    assert float(found.smoothness) <= float(certificate.smoothness) * (1 + 1e-9)
    assert list(certificate.block_lipschitz) == ["2", "4"]
