"""Networks with a layer that minimises: graphs, oracles, certificates, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

import surefoot as sf
from implicit.inner_problems import MU, RidgeOfSample, Soft, numbers
from surefoot.implicit import ArgMin, Constants, ImplicitError
from surefoot.operations.captured import capture

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
X, Y = numbers(4, 3), numbers(4, 2, seed=2)


class Fitted(nn.Module):
    """Features, ridge regression on them as a layer, and its predictions: ζ = ½‖Φβ − Y‖² + (μ/2)‖β‖²."""

    class Loss(nn.Module):
        def forward(self, features: Tensor, targets: Tensor, beta: Tensor) -> Tensor:
            return 0.5 * (features @ beta - targets).square().sum() + 0.5 * MU * beta.square().sum()

        def constants(self, sizes: dict[str, float]) -> Constants:
            a, y = sizes["features"], sizes["targets"]
            b = y / (2 * MU**0.5)
            slopes = {"features": y + a * b, "targets": a, "beta": a * a + MU}
            bends = {("features", "features"): 2 * b, ("features", "beta"): 2 * a, ("features", "targets"): 1.0}
            return Constants(MU, slopes, bends)

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(3, 2)
        self.fit = ArgMin(self.Loss(), (2, 2), batched=False)
        self.register_buffer("targets", Y)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.features(x))
        return features @ self.fit(features, self.targets)


def network(layer: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layer = ArgMin(Soft(3, 2, 0.5), 2) if layer is None else layer
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), layer, nn.Linear(2, 2)).double()


def tied() -> nn.Module:
    """Two layers with the parameters of one."""
    zeta = Soft(2, 2, 0.5)
    return nn.Sequential(nn.Linear(3, 2), ArgMin(zeta, 2), ArgMin(zeta, 2)).double()


def proximal() -> nn.Module:
    """A layer without parameters: samples are separate."""

    def zeta(x: Tensor, beta: Tensor) -> Tensor:
        return nn.functional.softplus(3 * beta).sum() + 0.5 * (beta - x).square().sum()

    slopes, bends = {"x": 1.0, "beta": 1 + 9 / 4}, {("beta", "beta"): 27 * 3**-1.5 / 2}
    return nn.Sequential(nn.Linear(3, 2), ArgMin(zeta, 2, constants=Constants(1.0, slopes, bends))).double()


MODELS = {
    "soft-plus": network,
    "ridge": lambda: network(ArgMin(RidgeOfSample(3, 2), 2)),
    "of the batch": lambda: Fitted().double(),
    "without parameters": proximal,
    "tied": tied,
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def flattened(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The output of a model as a function of one vector, and the present vector."""
    model = copy.deepcopy(
        model
    )  # torch's functional_call does not restore the weights of a module that stands twice
    names, values = zip(*((name, value.detach()) for name, value in model.named_parameters()), strict=True)

    def function(flat: Tensor) -> Tensor:
        parts = flat.split([value.numel() for value in values])
        shaped = {n: p.reshape(v.shape) for n, p, v in zip(names, parts, values, strict=True)}
        return functional_call(model, shaped, (X,))

    return function, torch.cat([value.reshape(-1) for value in values])


@each_model
@pytest.mark.parametrize("radius", [0.0, 0.2])
def test_certificates_hold(make: Callable[[], nn.Module], radius: float) -> None:
    """Values, Jacobians and second derivatives, ascended on the sphere, are below what is claimed."""
    model, objective = make(), sf.Square(Y)
    outputs, centre = flattened(model)
    generator = torch.Generator().manual_seed(5)
    for function, loss in ((outputs, None), (lambda p: objective(outputs(p))[None], objective)):
        certificate = sf.certify(model, X, objective=loss, domain=sf.Ball(radius))
        for k in range(3):
            move = torch.randn(centre.shape, dtype=torch.float64, generator=generator)
            point = centre + (radius * move / move.norm() * (1 - 1e-12) if k else 0.0)
            assert function(point).norm() <= float(certificate.bound)
            jacobian = jacrev(function)(point).reshape(-1, len(point))
            assert torch.linalg.matrix_norm(jacobian, 2) <= float(certificate.lipschitz)
            second = hessian(lambda p, function=function: function(p).reshape(-1))(point)
            direction = move
            for _ in range(20):  # a stationary point of ‖D²z[v, v]‖ on the sphere, by powers
                direction = direction / direction.norm()
                bent = torch.einsum("kij,i,j->k", second, direction, direction)
                direction = torch.einsum("kij,k,j->i", second, bent, direction)
            assert bent.norm() <= float(certificate.smoothness)


@each_model
def test_oracles_are_those_of_dense_matrices(make: Callable[[], nn.Module]) -> None:
    model, objective = make(), sf.Square(Y)
    function, point = flattened(model)
    slope = grad(lambda p: objective(function(p)))(point)
    curvature = hessian(lambda p: objective(function(p)))(point)
    jacobian = jacrev(function)(point).reshape(Y.numel(), -1)
    eye = torch.eye(len(point), dtype=torch.float64)
    chain = sf.Chain(model, X)
    for oracle, method, matrix in (
        ("newton", "cg", curvature),
        ("newton", "dynamic", curvature),
        ("gauss_newton", "dual", jacobian.mT @ jacobian / len(X)),
        ("gauss_newton", "dynamic", jacobian.mT @ jacobian / len(X)),
    ):
        step = getattr(sf.oracles, oracle)(chain, objective, kappa=3.0, method=method)
        direction = torch.cat([step.direction[name].reshape(-1) for name, _ in model.named_parameters()])
        expected = -torch.linalg.solve(matrix + step.kappa * eye, slope)
        assert torch.allclose(direction, expected, atol=1e-8), (oracle, method)


def test_certificates_in_the_input_and_without_numbers() -> None:
    model = network()
    certificate = sf.certify(model, X, wrt="input", domain=sf.Ball(0.2))
    jacobian = jacrev(model)(X).reshape(8, 12)
    assert torch.linalg.matrix_norm(jacobian, 2) <= float(certificate.lipschitz)


@each_model
def test_training_without_a_learning_rate_descends(make: Callable[[], nn.Module]) -> None:
    model = make()
    optimizer = sf.CertifiedDescent(model, sf.Square())
    losses = [float(optimizer.step(X, Y)) for _ in range(4)]
    losses.append(float(optimizer.value(X, Y)))
    assert all(after < before for before, after in pairwise(losses))
    second = sf.optim.GaussNewton(model, sf.Square())
    second.step(X, Y)
    assert float(second.value(X, Y)) < losses[-1]


def test_a_failing_inner_problem_leaves_the_model_as_it_was() -> None:
    model = network(ArgMin(Soft(3, 2), 2, max_iterations=1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ImplicitError, match="did not reach the tolerance"):
        sf.CertifiedDescent(model, sf.Square()).step(X, Y)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_layer_is_one_operation_of_the_graph_and_can_be_exported() -> None:
    model = network()
    graph = capture(model, X)
    assert [node.op for node in graph.nodes] == ["aten.linear", "aten.tanh", "surefoot.argmin", "aten.linear"]
    assert list(graph.blocks) == ["0", "2.zeta", "3"]
    assert torch.equal(graph.run(dict(model.named_parameters()), [X])[0], model(X))
    assert capture(model, X) is graph
    program = torch.export.export(model, (X,), strict=False).module()
    assert torch.equal(program(X), model(X))
    assert torch.equal(copy.deepcopy(model)(X), model(X))
