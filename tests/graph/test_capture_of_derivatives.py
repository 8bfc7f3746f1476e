"""Models that differentiate inside forward: physics-informed networks, by every way PyTorch has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import surefoot as sf
from judges import assert_upper_bound
from surefoot.errors import CaptureError
from surefoot.operations.captured import capture

X = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)[:, None]


class Curved(nn.Module):
    """A network u, of which subclasses return the second derivative in x."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def scalar(self, point: Tensor) -> Tensor:
        return self.net(point[None])[0, 0]


class ByAutograd(Curved):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.sum(), x, create_graph=True)[0]


class ByHessian(Curved):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(hessian(self.scalar))(x)[:, 0]


class ByForwardMode(Curved):
    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones_like(x)
        return jvp(lambda y: jvp(self.net, (y,), (one,))[1], (x,), (one,))[1]


class ByGradients(Curved):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(jacrev(grad(self.scalar)))(x)[:, 0]


class ByFunctionalCall(Curved):
    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def u(weights: dict[str, Tensor], point: Tensor) -> Tensor:
            return functional_call(self.net, weights, (point[None],))[0, 0]

        return vmap(grad(lambda w, p: grad(u, argnums=1)(w, p)[0], argnums=1), (None, 0))(weights, x)


class Detached(Curved):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(self.scalar))(x) * self.net(x).detach()


EVERY = [ByAutograd, ByHessian, ByForwardMode, ByGradients, ByFunctionalCall]


@pytest.mark.parametrize("kind", EVERY)
def test_the_graph_computes_the_second_derivative_and_its_gradient(kind: type[Curved]) -> None:
    model = kind()
    graph = capture(model, X)
    weights = dict(model.named_parameters())
    (found,) = graph.run(weights, (X,))
    torch.testing.assert_close(found, ByAutograd()(X), rtol=1e-12, atol=1e-12)
    costate = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)[:, None]
    slopes = [
        torch.autograd.grad((out * costate).sum(), weights.values(), allow_unused=True, materialize_grads=True)
        for out in (found, model(X))
    ]
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [ByHessian, ByForwardMode])
def test_certificates_hold(kind: type[Curved]) -> None:
    model = kind()
    certificate = sf.certify(model, X, domain=sf.Ball(1e-3))
    assert math.isfinite(float(certificate.smoothness))
    assert_upper_bound(certificate, model, X, sf.Ball(1e-3), starts=1, steps=1)


@pytest.mark.parametrize("points", [X[::2], X[2:5], X.expand(6, 3)[:, 1:2], X.clone().requires_grad_()[::2]])
def test_points_may_be_a_part_of_others(points: Tensor) -> None:
    model = ByForwardMode()
    (value,) = capture(model, points).run(dict(model.named_parameters()), [points])
    torch.testing.assert_close(value, ByAutograd()(points), rtol=1e-12, atol=1e-14)


def test_a_detached_factor_is_noticed() -> None:
    with pytest.raises(CaptureError, match="the gradient is not seen to be that of the function"):
        capture(Detached(), X)


class Normed(nn.Module):
    """A network with a normalisation, differentiated once or twice, backwards or forwards."""

    def __init__(self, norm: nn.Module, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 8), norm, nn.Tanh(), nn.Linear(8, 1)).double()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones_like(x)
        if self.way == "backwards":
            (slope,) = vjp(self.net, x)[1](x.new_ones(len(x), 1))
            return slope
        if self.way == "detached":
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        if self.way == "twice":
            return jvp(lambda y: jvp(self.net, (y,), (one,))[1], (x,), (one,))[1]
        return jvp(self.net, (x,), (one,))[1]


PLANE = torch.linspace(-1.0, 1.0, 10, dtype=torch.float64).reshape(5, 2).sin()
STATISTICS = {"affine": False, "track_running_stats": False}
NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "batch": lambda: nn.BatchNorm1d(8, **STATISTICS),
    "instance": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten()),
    "weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "root mean square": lambda: nn.RMSNorm(8),
}


@pytest.mark.parametrize("way", ["backwards", "detached"])
@pytest.mark.parametrize("norm", NORMS)
def test_normalisations_are_differentiated_backwards(norm: str, way: str) -> None:
    """The gradient of the graph is that of differences of values, and ℓ is no less."""
    model = Normed(NORMS[norm](), way)
    target = torch.linspace(0.0, 1.0, 10, dtype=torch.float64).reshape(5, 2)
    loss = sf.Square(target)
    direction = sf.oracles.gradient(sf.Chain(model, PLANE), loss).direction
    weight = model.net[0].weight
    slopes = torch.zeros_like(weight)
    for place in range(weight.numel()):
        ends = []
        for move in (1e-6, -2e-6):
            with torch.no_grad():
                weight.view(-1)[place] += move
            ends.append(float(loss(model(PLANE)).detach()))
        with torch.no_grad():
            weight.view(-1)[place] += 1e-6
            slopes.view(-1)[place] = (ends[0] - ends[1]) / 2e-6
    torch.testing.assert_close(direction["net.0.weight"], -slopes, rtol=1e-6, atol=1e-8)
    certificate = sf.certify(model, PLANE, objective=loss, domain=sf.Ball(1e-6))
    assert float(certificate.lipschitz) >= float(slopes.norm()) * (1 - 1e-6)


@pytest.mark.parametrize("way", ["forwards", "twice"])
@pytest.mark.parametrize("norm", ["layer", "batch", "instance"])
def test_forward_derivatives_of_normalisations_are_refused(norm: str, way: str) -> None:
    """PyTorch's gradient of them is another than that of the function."""
    with pytest.raises(CaptureError, match=r"take them backwards \(vjp, jacrev, grad\)"):
        capture(Normed(NORMS[norm](), way), PLANE)


class Poisson(Curved):
    """Residuals of u'' = -π² sin(πx) inside, and of u = 0 at the ends."""

    def forward(self, x: Tensor) -> Tensor:
        inside = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(inside).sum(), inside, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), inside, create_graph=True)
        ends = self.net(torch.tensor([[0.0], [1.0]], dtype=x.dtype))
        return torch.cat([second / math.pi**2 + torch.sin(math.pi * x), ends])


def test_steps_train_a_network_to_solve_an_equation() -> None:
    model, y = Poisson(), torch.zeros(8, 1, dtype=torch.float64)
    value = sf.evaluate(model, X, sf.Square(y))
    assert abs(value.value - float(0.5 * model(X).detach().square().mean())) <= value.error + 1e-15
    descent = sf.CertifiedDescent(model, sf.Square())
    losses = [float(descent.step(X, y)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    newton = sf.optim.GaussNewton(model, sf.Square())
    for _ in range(30):
        last = float(newton.step(X, y))
    assert last < 1e-3 * losses[0]
    exact = torch.sin(math.pi * X)
    assert float((model.net(X) - exact).detach().abs().max()) < 0.1
