"""Norms through programs: no value, Jacobian or Hessian in the domain exceeds them, whatever the network."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

from surefoot.bounds.breakdown import groups, reasons, shares, smoothness_by_tensor
from surefoot.bounds.function import Function
from surefoot.bounds.size import assemble, smoothness, terms
from surefoot.bounds.size import objective as constants_of
from surefoot.domains import Ball, ProductBall
from surefoot.objectives import BinaryCrossEntropy, CrossEntropy, Square


class Residual(nn.Module):
    """A branch beside the identity, with a scale for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(3, 4), nn.Linear(4, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.second(torch.sigmoid(self.first(x)))


class Attention(nn.Module):
    """One head, written out, behind a layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(3), nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(x)
        weights = (self.q(z) @ self.k(z).transpose(1, 2) / math.sqrt(2)).softmax(-1)
        return (weights @ self.v(z)).mean(1)


def perceptron(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2))


def convolutional(pool: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Softplus(), pool, nn.Flatten(), nn.Linear(8, 2))


VECTORS, IMAGES = (5, 3), (3, 1, 4, 4)
MODELS = {
    "tanh": (perceptron, VECTORS),
    "gelu": (lambda: perceptron(nn.GELU), VECTORS),
    "softplus": (lambda: perceptron(nn.Softplus), VECTORS),
    "residual": (Residual, VECTORS),
    "layer norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2)), VECTORS),
    "batch norm": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh(), nn.Linear(4, 2)
        ),
        VECTORS,
    ),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Tanh()), IMAGES),
    "average pooling": (lambda: convolutional(nn.AvgPool2d(2)), IMAGES),
    "strided": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten()), IMAGES),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(1, 1, 2, stride=2), nn.Sigmoid(), nn.Flatten()),
        IMAGES,
    ),
    "attention": (Attention, (2, 4, 3)),
    "recurrent": (lambda: Last(nn.GRU(3, 2, batch_first=True)), (2, 3, 3)),
}
ROUNDING = 1e-13  # of what the tests compute
DOMAINS = [ProductBall(0.8), Ball(0.05), ProductBall(0.3, center="present"), Ball(0.0)]


class Last(nn.Module):
    """The last state of a recurrent network."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0][:, -1]


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(len(name))
    build, shape = MODELS[name]
    return build().double(), torch.randn(shape, dtype=torch.float64)


def points(function: Function, domain: Ball | ProductBall, count: int = 4) -> list[dict[str, torch.Tensor]]:
    """Points of the domain, most on its boundary."""
    draws = []
    for k in range(count):
        centre = {n: function.values[n] * (domain.center == "present") for n in function.variables}
        steps = {n: torch.randn_like(value) for n, value in centre.items()}
        for names, radius in domain.groups(function.blocks):
            length = math.sqrt(sum(float(steps[n].square().sum()) for n in names))
            for n in names:
                steps[n] *= (radius if k else 0.0) / length
        draws.append({n: centre[n] + steps[n] for n in centre})
    return draws


def flat(
    function: Function, model: nn.Module, x: torch.Tensor, objective: nn.Module | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of all parameters in one vector."""
    shapes = {n: function.values[n].shape for n in function.variables}

    def value(vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split([s.numel() for s in shapes.values()])
        weights = {n: part.reshape(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        out = functional_call(model, weights, (x,))
        return out.reshape(-1) if objective is None else objective(out)

    return value


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_their_derivatives_are_bounded(name: str, domain: Ball | ProductBall) -> None:
    model, x = made(name)
    function = Function.of(model, x)
    result = function.over(domain)
    (size,) = result.outputs
    bend, slope = smoothness(assemble(terms(result), len(function.variables))), size.lipschitz.norm()
    value = flat(function, model, x, None)
    for point in points(function, domain):
        vector = torch.cat([t.reshape(-1) for t in point.values()])
        assert float(value(vector).norm()) <= float(size.bound)
        jacobian = jacrev(value)(vector)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= float(slope)
        costate = torch.nn.functional.normalize(torch.randn(size.numel, dtype=torch.float64), dim=0)
        second = hessian(lambda v, c=costate: value(v) @ c)(vector)
        assert float(torch.linalg.matrix_norm(second, 2)) <= float(bend) or math.isnan(float(second.sum()))


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
@pytest.mark.parametrize("name", ["tanh", "gelu", "residual", "layer norm", "batch norm", "attention", "strided"])
def test_objectives_are_bounded(name: str, domain: Ball | ProductBall) -> None:
    model, x = made(name)
    outputs = model(x).detach()
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    losses = [CrossEntropy(labels), Square(torch.randn_like(outputs)), BinaryCrossEntropy((outputs > 0).double())]
    for loss in losses:
        function = Function.of(model, x, loss)
        result = function.over(domain)
        value = flat(function, model, x, loss)
        bend = smoothness(assemble(terms(result), len(function.variables)))
        gradient = [result.sizes[k] for k in result.program.outputs[1:]]
        for point in points(function, domain):
            vector = torch.cat([t.reshape(-1) for t in point.values()])
            assert abs(float(value(vector))) <= float(result.outputs[0].bound) + ROUNDING
            parts = torch.func.grad(value)(vector).split([t.numel() for t in point.values()])
            for part, size in zip(parts, gradient, strict=True):
                assert float(part.norm()) <= float(size.bound) + ROUNDING
            assert float(torch.linalg.matrix_norm(hessian(value)(vector), 2)) <= float(bend)


@pytest.mark.parametrize("name", ["tanh", "residual", "average pooling", "attention", "group norm"])
def test_constants_in_the_input(name: str) -> None:
    model, x = made(name)
    function = Function.of(model, x, wrt="input")
    for domain in (Ball(0.1), Ball(1.0, center="origin")):
        result = function.over(domain)
        for point in points(function, domain):
            jacobian = (
                jacrev(lambda v: model(v).reshape(-1))(point["x"]).reshape(result.outputs[0].numel, -1).detach()
            )
            assert float(torch.linalg.matrix_norm(jacobian, 2)) <= float(result.outputs[0].lipschitz.norm())


def test_rectifiers_are_smooth_where_no_entry_changes_sign() -> None:
    model, x = made("tanh")
    model[1] = nn.ReLU()
    function = Function.of(model, x)
    margin = float(model[0](x).detach().abs().min())
    near, far = (function.over(Ball(radius)) for radius in (margin / 100, 100 * margin))
    assert smoothness(assemble(terms(near), 4)).is_finite
    assert not smoothness(assemble(terms(far), 4)).is_finite
    assert any("relu" in reason and "kink" in reason for reason in reasons(terms(far)))


def test_shares_add_up_and_tensors_have_constants() -> None:
    function = Function.of(*made("tanh"))
    result = function.over(ProductBall(1.0))
    assert sum(shares(terms(result)).values()) == pytest.approx(1.0)
    rows = groups(result)
    assert [row.label for row in rows] == ["linear", "tanh", "linear"]
    whole = smoothness(assemble(terms(result), len(function.variables)))
    assert float(smoothness_by_tensor(result)[rows[-1].last.index]) == pytest.approx(float(whole), rel=1e-9)


def test_a_linear_model_has_exact_constants() -> None:
    model = nn.Linear(3, 2).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    result = Function.of(model, x).over(ProductBall(1.0))
    exact = math.sqrt(float(torch.linalg.matrix_norm(x, 2)) ** 2 + 5)  # of [x, 1], up to their angle
    assert float(result.outputs[0].bound) == pytest.approx(exact, rel=1e-9)
    assert assemble(terms(result), 2).is_zero


def test_a_thousand_layers_do_not_overflow() -> None:
    model = nn.Sequential(*[layer for _ in range(60) for layer in (nn.Linear(2, 2), nn.Softplus())])
    result = Function.of(model, torch.ones(2, 2)).over(ProductBall(1e9))
    assert result.outputs[0].lipschitz.norm().is_finite
    assert float(result.outputs[0].lipschitz.norm().log2) > 1024


def test_rounding_at_the_centre_is_counted() -> None:
    class Cancelling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1e7) - 1e7

    x = torch.full((1, 2), 1 / 3, dtype=torch.float64)
    (size,) = Function.of(Cancelling(), x, wrt="input").over(Ball(0.0)).outputs
    assert size.value is not None
    assert float((size.value - 1 / 3).abs().max()) > 1e-10
    assert float(size.bound) >= math.sqrt(2) / 3
    assert 1e-10 < float(size.spread) < 1e-7


def test_a_saddle_is_not_flat() -> None:
    """Where all slopes are zero, the curvature of a product is not."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double(), torch.ones(4, 3, dtype=torch.float64)
    result = Function.of(model, x).over(Ball(0.0, center="origin"))
    assert float(smoothness(assemble(terms(result), 4))) >= float(torch.linalg.matrix_norm(x, 2))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Hardtanh])
def test_at_a_kink_every_one_sided_slope_counts(activation: type[nn.Module]) -> None:
    x = torch.tensor([[0.0, 1.0 if activation is nn.Hardtanh else 0.0]], dtype=torch.float64)
    loss = Square(torch.full((1, 2), 3.0, dtype=torch.float64))
    proved = constants_of(Function.of(activation(), x, loss, wrt="input").over(Ball(0.0)))
    for move in (torch.tensor([[a, b]], dtype=torch.float64) * 2.0**-30 for a in (-1, 1) for b in (-1, 1)):
        slope = abs(float(loss(activation()(x + move)) - loss(activation()(x)))) / float(move.norm())
        assert slope <= float(proved.gradients.norm()) + 1e-6
