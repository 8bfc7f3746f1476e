"""Networks with a layer that minimises: graphs, chains, oracles, certificates, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev
from torch.nn import functional as F

import surefoot as sf
from implicit.inner_problems import numbers
from surefoot.errors import UnsupportedOperation
from surefoot.implicit import ArgMin, Constants, Energy, ImplicitError
from surefoot.operations.captured import capture

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
X, Y = numbers(4, 3), numbers(4, 2, seed=2)


def network(potential: str = "softplus", seed: int = 0, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    layer = ArgMin(Energy(2, 2, 3, potential, 0.8), 2, **options)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), layer, nn.Linear(2, 2)).double()


class Fitted(nn.Module):
    """Features, ridge regression on them as a layer, and its predictions."""

    class Loss(nn.Module):
        def forward(self, features: Tensor, targets: Tensor, beta: Tensor) -> Tensor:
            return 0.5 * (features @ beta - targets).square().sum() + 0.4 * beta.square().sum()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.features = nn.Linear(3, 2)
        self.fit = ArgMin(self.Loss(), (2, 2), batched=False, constants=Constants(0.8))
        self.register_buffer("targets", Y)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.features(x))
        return features @ self.fit(features, self.targets)


def flattened(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The output of a model as a function of one vector, and the present vector."""
    names, values = zip(*((name, value.detach()) for name, value in model.named_parameters()), strict=True)

    def function(flat: Tensor) -> Tensor:
        parts = flat.split([value.numel() for value in values])
        shaped = {n: p.reshape(v.shape) for n, p, v in zip(names, parts, values, strict=True)}
        return functional_call(model, shaped, (X,))

    return function, torch.cat([value.reshape(-1) for value in values])


def test_the_layer_is_one_operation_of_the_graph() -> None:
    model = network()
    graph = capture(model, X)
    assert [node.op for node in graph.nodes] == ["aten.linear", "aten.tanh", "surefoot.argmin", "aten.linear"]
    assert list(graph.blocks) == ["0", "2.zeta.own", "2.zeta.given", "3"]
    assert torch.equal(graph.run(dict(model.named_parameters()), [X])[0], model(X))
    assert capture(model, X) is graph
    other = copy.deepcopy(model)
    other[2].zeta.potential = "square"
    found = capture(other, X)
    assert torch.equal(found.run(dict(other.named_parameters()), [X])[0], other(X))
    assert torch.equal(graph.run(dict(model.named_parameters()), [X])[0], model(X))
    assert not torch.allclose(model(X), other(X))
    unrolled = network(differentiate="unroll", order=1)
    target = capture(unrolled, X).nodes[2].target
    settings = target.problem.settings
    assert (settings.differentiate, settings.order) == ("implicit", 2)


def test_an_exported_program_runs_as_long_as_the_layer_is_there() -> None:
    model = network()
    program = torch.export.export(model, (X,), strict=False).module()
    assert torch.equal(program(X), model(X))
    expected = model(X)
    assert torch.equal(copy.deepcopy(model)(X), expected)


@pytest.mark.parametrize("model", [network(), Fitted().double()], ids=["per sample", "of the batch"])
def test_oracles_are_those_of_dense_matrices(model: nn.Module) -> None:
    function, point = flattened(model)
    chain, objective = sf.Chain(model, X), sf.Square(Y)

    def loss(flat: Tensor) -> Tensor:
        return objective(function(flat))

    slope, curvature = grad(loss)(point), hessian(loss)(point)
    jacobian = jacrev(function)(point).reshape(Y.numel(), -1)
    eye = torch.eye(len(point), dtype=torch.float64)
    steps = {
        ("newton", "cg"): curvature,
        ("newton", "dynamic"): curvature,
        ("gauss_newton", "dual"): jacobian.mT @ jacobian / len(X),
        ("gauss_newton", "dynamic"): jacobian.mT @ jacobian / len(X),
    }
    for (oracle, method), matrix in steps.items():
        step = getattr(sf.oracles, oracle)(chain, objective, kappa=3.0, method=method)
        found = torch.cat([step.direction[name].reshape(-1) for name, _ in model.named_parameters()])
        expected = -torch.linalg.solve(matrix + step.kappa * eye, slope)
        assert torch.allclose(found, expected, atol=1e-8), (oracle, method)
    gradient = sf.oracles.gradient(chain, objective, kappa=1.0).direction
    assert torch.allclose(torch.cat([value.reshape(-1) for value in gradient.values()]).norm(), slope.norm())


def attacked(
    function: Callable[[Tensor], Tensor], centre: Tensor, radius: float, certificate: sf.Certificate
) -> float:
    """The largest ratio of what is found to the smoothness that is claimed; all claims are checked."""
    generator = torch.Generator().manual_seed(5)
    worst = 0.0
    for k in range(3):
        move = torch.randn(centre.shape, dtype=torch.float64, generator=generator)
        point = centre + (radius * move / move.norm() if k else 0.0)
        jacobian = jacrev(function)(point).reshape(-1, len(point))
        assert function(point).norm() <= float(certificate.bound)
        assert torch.linalg.matrix_norm(jacobian, 2) <= float(certificate.lipschitz)
        second = hessian(lambda p: function(p).reshape(-1))(point)
        direction = torch.randn(len(point), dtype=torch.float64, generator=generator)
        for _ in range(20):  # a stationary point of ‖D²z[v, v]‖ on the sphere, by powers
            direction = direction / direction.norm()
            value = torch.einsum("kij,i,j->k", second, direction, direction)
            direction = torch.einsum("kij,k,j->i", second, value, direction)
        ratio = float(value.norm()) / float(certificate.smoothness)
        assert ratio <= 1.0
        worst = max(worst, ratio)
    return worst


@pytest.mark.parametrize(
    ("potential", "radius"), [("softplus", 0.0), ("softplus", 0.3), ("log-cosh", 0.05), ("square", 0.3)]
)
def test_derived_constants_hold(potential: str, radius: float) -> None:
    model = network(potential)
    function, centre = flattened(model)
    objective = sf.Square(Y)
    certificate = sf.certify(model, X, domain=sf.Ball(radius))
    attacked(function, centre, radius, certificate)
    certificate = sf.certify(model, X, objective=objective, domain=sf.Ball(radius))
    ratio = attacked(lambda p: objective(function(p))[None], centre, radius, certificate)
    assert ratio > 0.2 or radius > 0  # and they are of use


def test_constants_of_a_layer_without_parameters_hold() -> None:
    """A proximal step: samples are separate, so second derivatives at the centre are exact."""

    def zeta(x: Tensor, beta: Tensor) -> Tensor:
        return F.softplus(3 * beta).sum() + 0.5 * (beta - x).square().sum()

    torch.manual_seed(2)
    layer = ArgMin(zeta, 2, constants=Constants(1.0))
    model = nn.Sequential(nn.Linear(3, 2), layer, nn.Linear(2, 2)).double()
    function, centre = flattened(model)
    objective = sf.Square(Y)
    for radius, useful in ((0.0, 0.5), (0.2, 0.0)):
        certificate = sf.certify(model, X, objective=objective, domain=sf.Ball(radius))
        assert attacked(lambda p: objective(function(p))[None], centre, radius, certificate) > useful


def test_constants_of_a_minimiser_of_the_batch_hold() -> None:
    model = Fitted().double()
    function, centre = flattened(model)
    for radius in (0.0, 0.02):
        attacked(function, centre, radius, sf.certify(model, X, domain=sf.Ball(radius)))


def test_declared_constants_hold() -> None:
    r"""ζ = ½‖Aβ − x‖² + (μ/2)‖β‖² over ‖A‖ ≤ a, ‖x‖ ≤ m: ‖β‖ ≤ m/(2√μ) = b and ‖Aβ − x‖ ≤ m."""

    class Ridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(0.5 * numbers(3, 2))

        def forward(self, x: Tensor, beta: Tensor) -> Tensor:
            return 0.5 * (self.a @ beta - x).square().sum() + 0.4 * beta.square().sum()

        def constants(self, sizes: dict[str, float]) -> Constants:
            a, m = sizes["a"], sizes["x"]
            b = m / (2 * 0.8**0.5)
            slopes = {"x": a, "a": m + a * b, "beta": a * a + 0.8}
            return Constants(0.8, slopes, {("x", "a"): 1.0, ("a", "a"): 2 * b, ("a", "beta"): 2 * a})

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), ArgMin(Ridge(), 2)).double()
    function, centre = flattened(model)
    for radius in (0.0, 0.3):
        attacked(function, centre, radius, sf.certify(model, X, domain=sf.Ball(radius)))
    attacked(function, torch.zeros_like(centre), 1.0, sf.certify(model, X, domain=sf.ProductBall(1.0)))
    somewhere = sf.certify(model.to("meta"), X.to("meta"), domain=sf.ProductBall(1.0), input_norm=2.0)
    assert somewhere.smoothness.is_finite


def test_certificates_in_the_input() -> None:
    model = network()
    certificate = sf.certify(model, X, wrt="input", domain=sf.Ball(0.2))
    model.requires_grad_(False)
    attacked(lambda flat: model(flat.reshape(X.shape)), X.reshape(-1), 0.2, certificate)


def test_what_a_certificate_needs_to_know() -> None:
    plain = nn.Sequential(nn.Linear(3, 2), ArgMin(lambda x, b: ((b - x) ** 2).sum(), 2)).double()
    with pytest.raises(UnsupportedOperation, match=r"module '1'.*Constants\(strong_convexity=mu\)"):
        sf.certify(plain, X)
    strange = ArgMin(lambda x, b: ((b - x) ** 2).sum() + torch.lgamma(b + 9).sum(), 2, constants=Constants(0.5))
    with pytest.raises(UnsupportedOperation, match=r"cannot be proved.*'aten.digamma'.*operations with rules"):
        sf.certify(nn.Sequential(nn.Linear(3, 2), strange).double(), X)
    with torch.device("meta"):
        empty, nowhere = nn.Sequential(nn.Linear(3, 2), strange).double(), torch.empty(X.shape, dtype=X.dtype)
    with pytest.raises(UnsupportedOperation, match=r"cannot be derived.*Or declare them"):
        sf.certify(empty, nowhere, domain=sf.ProductBall(1.0), input_norm=1.0)
    strange.constants = Constants(0.5, 3.0, 1.0)
    assert sf.certify(empty, nowhere, domain=sf.ProductBall(1.0), input_norm=1.0).lipschitz.is_finite
    overstated = nn.Sequential(nn.Linear(3, 2), ArgMin(lambda x, b: F.softplus(b - x).sum() + (b**2).sum(), 2))
    overstated[1].constants = Constants(5.0)
    with pytest.raises(ImplicitError, match="strong convexity of 5 was declared"):
        sf.certify(overstated.double(), X, domain=sf.Ball(0.1))
    with pytest.raises(ImplicitError, match="depends on the data"):
        sf.cost(network(), X)


@pytest.mark.parametrize("model", [network(), Fitted().double()], ids=["per sample", "of the batch"])
def test_training_without_a_learning_rate_descends(model: nn.Module) -> None:
    model = copy.deepcopy(model)
    optimizer = sf.optim.CertifiedDescent(model, sf.Square(), proof="segment")
    losses = [float(optimizer.step(X, Y)) for _ in range(4)]
    losses.append(float(optimizer.value(X, Y)))
    assert all(after < before for before, after in pairwise(losses))
    second = sf.optim.GaussNewton(model, sf.Square())
    second.step(X, Y)
    assert float(second.value(X, Y)) < losses[-1]


def test_a_failing_inner_problem_leaves_the_model_as_it_was() -> None:
    model = network(solver="gradient", max_iterations=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ImplicitError, match="did not reach the tolerance"):
        sf.optim.CertifiedDescent(model, sf.Square(), proof="segment").step(X, Y)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("twice", [True, False])
def test_layers_that_share_their_inner_problem(twice: bool):
    """The same layer two times, or two layers with the parameters of one: both have a certificate that holds."""
    torch.manual_seed(3)
    energy = Energy(2, 2)
    first = ArgMin(energy, 2)
    model = nn.Sequential(first, first if twice else ArgMin(energy, 2)).double()
    x, objective = numbers(3, 2), sf.Square(numbers(3, 2, seed=5))
    certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))
    paths = [path for path, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]

    def value(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        named = {path: part.reshape(shape) for path, part, shape in zip(paths, parts, shapes, strict=True)}
        return objective(functional_call(model, named, (x,)))

    centre = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for seed in range(3):
        move = numbers(len(centre), seed=seed)
        point = centre + 0.1 * move / move.norm() * (1 - 1e-12)
        assert float(grad(value)(point).norm()) <= float(certificate.lipschitz) * (1 + 1e-9)
        norm = torch.linalg.matrix_norm(hessian(value)(point), 2)
        assert float(norm) <= float(certificate.smoothness) * (1 + 1e-9)
