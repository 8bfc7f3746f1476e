"""With high effort: the second derivative at the weights and how far it moves, attacked by dense Hessians."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import surefoot as sf
from surefoot.calculus.adjoint.around import Around
from surefoot.calculus.adjoint.backward import backward
from surefoot.calculus.adjoint.bounds import Centre, dense_centre
from surefoot.calculus.adjoint.dense import Dense
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.effort import HIGH, NORMAL, QUICK
from surefoot.domains import DomainError

D = torch.float64


class Shared(nn.Module):
    """One layer used twice, with a residual, and one split in two."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.wide, self.out = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.twice(torch.sin(self.twice(x))))
        left, right = self.wide(x).chunk(2, dim=1)
        return self.out(left * torch.sigmoid(right))


class Attention(nn.Module):
    """One pre-norm transformer layer on three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (3,)),
    "layer": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)), (3,)),
    "batch": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)), (3,)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Softplus(), nn.Conv2d(2, 2, 2), nn.GELU(), nn.Flatten(),
            nn.Linear(2, 2)
        ),
        (1, 4, 4),
    ),
    "soft-max": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 2)), (3,)),
    "shared": (Shared, (3,)),
    "attention": (Attention, (3, 4)),
}  # fmt: skip
LOSSES: dict[str, Callable[[], sf.objectives.Objective]] = {
    "entropy": lambda: sf.CrossEntropy(torch.tensor([0, 1, 1, 0, 1])),
    "square": lambda: sf.Square(torch.linspace(-1, 1, 10, dtype=D).reshape(5, 2)),
}


class Case:
    """A small problem, its centre, and its Hessian as a function of all weights."""

    def __init__(self, name: str, loss: str, dtype: torch.dtype = D, seed: int = 0) -> None:
        torch.manual_seed(seed)
        make, shape = MODELS[name]
        self.model, self.x, self.objective = make().to(dtype), torch.randn(5, *shape, dtype=dtype), LOSSES[loss]()
        self.analysis = Analysis.of(self.model, self.x, self.objective)
        self.parameters = {key: value.detach().double() for key, value in self.model.named_parameters()}
        self.weights = torch.cat([value.reshape(-1) for value in self.parameters.values()])
        self.judge = make().double()
        self.judge.load_state_dict(self.model.state_dict())

    def value(self, weights: Tensor) -> Tensor:
        sizes = [value.numel() for value in self.parameters.values()]
        parts = zip(self.parameters.items(), weights.split(sizes), strict=True)
        named = {key: part.reshape(value.shape) for (key, value), part in parts}
        buffers = {key: value.clone() for key, value in self.judge.named_buffers()}
        return self.objective(torch.func.functional_call(self.judge, named | buffers, (self.x.double(),)))

    def hessian(self, weights: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.functional.hessian(self.value, weights)

    def dense(self) -> Dense:
        found = dense_centre(self.analysis.over(sf.Ball(0.0)), HIGH)
        assert found is not None
        return found

    def adversary(self, radius: float, start: Tensor, steps: int = 4) -> Tensor:
        """A point of the ball to which the curvature was made to grow."""
        move = start
        for _ in range(steps):
            at = self.weights + radius * move / move.norm()
            values, vectors = torch.linalg.eigh(self.hessian(at))
            k = int(values.abs().argmax())
            v, leaf = vectors[:, k], at.clone().requires_grad_()
            with sdpa_kernel(SDPBackend.MATH):
                (first,) = torch.autograd.grad(self.value(leaf), leaf, create_graph=True)
                (second,) = torch.autograd.grad(first @ v, leaf, create_graph=True)
                (third,) = torch.autograd.grad(second @ v, leaf)
            slope = third * values[k].sign()
            move = move / move.norm() + 3.0 * slope / slope.norm().clamp(min=1e-300)
        return self.weights + radius * move / move.norm()


@pytest.mark.parametrize(
    ("name", "loss"), [*((name, "entropy") for name in MODELS), ("gelu", "square"), ("batch", "square")]
)
def test_no_point_of_the_ball_is_outside(name: str, loss: str) -> None:
    case = Case(name, loss)
    here, dense = case.hessian(case.weights), case.dense()
    norm = float(torch.linalg.matrix_norm(here, 2))
    assert norm * (1 - 1e-13) <= float(dense.norm + dense.offset) <= norm * 1.001
    generator = torch.Generator().manual_seed(1)
    for radius in (1e-5, 0.05):
        result = case.analysis.over(sf.Ball(radius))
        at = backward(result)
        assert at is not None
        around = Around(result, dense, at)
        bound = min(float(around.by_changes), float(around.by_speed + dense.offset))
        start = torch.randn(len(case.weights), dtype=D, generator=generator)
        for point in (case.weights + radius * start / start.norm(), case.adversary(radius, start, 1)):
            moved = float(torch.linalg.matrix_norm(case.hessian(point) - here, 2))
            assert moved * (1 - 1e-9) - 1e-12 <= bound
            assert moved * (1 - 1e-9) - 1e-12 <= float(around.by_changes)
            assert moved * (1 - 1e-9) - 1e-12 <= float(around.by_speed + dense.offset)
        if radius == 1e-5:  # not vacuous: first order in the radius
            assert bound <= 0.2 * norm


@pytest.mark.parametrize(("layer", "effort"), [(nn.Conv1d, "normal"), (nn.Linear, "high")])
def test_weights_that_many_equal_samples_read(layer: Callable[..., nn.Module], effort: str) -> None:
    r"""The mean over equal samples is the function of one, here :math:`\frac12u^2v^2` at (1, 1): its second
    derivative at (s, s) is :math:`s^2(1\ 2;\ 2\ 1)`, of the norm 3s².
    """
    shape = (1,) if layer is nn.Linear else (1, 1)
    model = nn.Sequential(layer(1, 1, *shape[1:], bias=False), layer(1, 1, *shape[1:], bias=False)).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    for count in (1, 100):
        x = torch.ones(count, *shape, dtype=D)
        found = sf.certify(model, x, objective=sf.Square(0 * x), domain=sf.Ball(0.05), effort=effort)
        assert 3 * (1 + 0.05 / 2**0.5) ** 2 <= float(found.smoothness) <= 3.4


@pytest.mark.parametrize("name", ["layer", "batch", "shared", "attention"])
def test_shells_add_up_to_less_and_to_enough(name: str) -> None:
    case = Case(name, "entropy", seed=2)
    here, centre = case.hessian(case.weights), Centre(HIGH, case.dense())
    assert centre.dense is not None
    edge = 0.04
    for part in (0.25, 0.5, 0.75, 1.0):
        result = case.analysis.over(sf.Ball(edge * part))
        at = backward(result)
        assert at is not None
        around = centre.around(result, at)
    alone = Around(result, centre.dense, at)
    assert around.by_changes <= alone.by_changes * (1 + 1e-9)
    assert float(around.by_speed) <= 0.95 * float(alone.by_speed)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        start = torch.randn(len(case.weights), dtype=D, generator=generator)
        moved = float(torch.linalg.matrix_norm(case.hessian(case.adversary(edge, start, 1)) - here, 2))
        assert moved * (1 - 1e-9) - 1e-12 <= float(around.by_changes)
        assert moved * (1 - 1e-9) - 1e-12 <= float(around.by_speed + centre.dense.offset)


def test_one_step_is_longer_and_descends_as_promised() -> None:
    case = Case("layer", "entropy", seed=3)
    certificate = sf.certify(case.model, case.x, objective=case.objective, effort="high")
    assert certificate.one_step is not None
    assert isinstance(certificate.radius, float)
    assert certificate.step_size > 1.1 * certificate.inverse_smoothness
    assert sf.Certificate.from_json(certificate.to_json()).step_size == certificate.step_size
    value, slope = case.value(case.weights), torch.func.grad(case.value)(case.weights)
    end = case.value(case.weights - certificate.step_size * slope)
    assert value - end >= certificate.step_size / 2 * slope.square().sum()
    generator = torch.Generator().manual_seed(6)
    for start in (slope, -slope, *torch.randn(20, len(slope), dtype=D, generator=generator)):
        move = certificate.radius * start / start.norm()
        above = case.value(case.weights + move) - value - slope @ move
        assert above.abs() <= float(certificate.one_step) / 2 * move.square().sum() * (1 + 1e-9)


@pytest.mark.parametrize("name", ["layer", "convolution"])
def test_certificates_of_single_precision(name: str) -> None:
    case = Case(name, "entropy", torch.float32, seed=4)
    for radius in (0.0, 0.02):
        certificate = sf.certify(
            case.model, case.x, objective=case.objective, domain=sf.Ball(radius), effort="high"
        )
        point = case.adversary(radius, torch.ones_like(case.weights), 1) if radius else case.weights
        assert float(torch.linalg.matrix_norm(case.hessian(point), 2)) * (1 - 1e-9) <= float(
            certificate.smoothness
        )
        usual = sf.certify(case.model, case.x, objective=case.objective, domain=sf.Ball(radius))
        assert certificate.smoothness <= usual.smoothness


def test_norms_of_all_derivatives() -> None:
    """Those of a hidden tensor and of its costate, by samples and entries, against Jacobians formed whole."""
    case = Case("layer", "square")
    dense, modules = case.dense(), list(case.judge)
    sizes = [value.numel() for value in case.parameters.values()]

    def hidden(weights: Tensor) -> Tensor:
        first = weights.split(sizes)
        return nn.functional.linear(case.x, first[0].reshape(4, 3), first[1])

    def costate(weights: Tensor) -> Tensor:
        parts = [
            part.reshape(v.shape) for part, v in zip(weights.split(sizes), case.parameters.values(), strict=True)
        ]
        y = modules[2](nn.functional.layer_norm(hidden(weights), (4,), parts[2], parts[3]))
        outer = torch.func.grad(lambda z: case.objective(nn.functional.linear(z, parts[4], parts[5])))
        return outer(y)

    for sizes_of, function in ((dense.first["linear"], hidden), (dense.second["gelu"], costate)):
        matrix = torch.autograd.functional.jacobian(function, case.weights)
        true = torch.linalg.matrix_norm(matrix, 2)  # one for each sample
        assert sizes_of.samples is not None
        assert sizes_of.entries is not None
        bounds = torch.as_tensor(sizes_of.samples.numpy())
        assert bool((true * (1 - 1e-12) <= bounds).all())
        assert bool((bounds <= true * 1.001 + 1e-9).all())
        assert torch.allclose(sizes_of.entries, matrix.norm(dim=-1), rtol=1e-6, atol=1e-9)


def test_efforts() -> None:
    """More effort proves no less, says what it costs, and others are refused."""
    case = Case("gelu", "entropy")
    found = [
        sf.certify(case.model, case.x, objective=case.objective, domain=sf.Ball(0.01), effort=effort.name)
        for effort in (QUICK, NORMAL, HIGH)
    ]
    assert found[0].smoothness >= found[1].smoothness >= found[2].smoothness
    costs = [certificate.gradients or 0 for certificate in found]
    assert 0 < costs[0] < costs[1] < costs[2]
    assert costs[2] - costs[1] >= 10 * len(case.weights)
    assert f"effort high: about {costs[2]:,} gradients" in str(found[2])
    assert "effort" not in str(found[1])
    assert sf.Certificate.from_json(found[2].to_json()) == found[2]
    with pytest.raises(DomainError, match="effort is 'quick', 'normal' or 'high', got 'low'"):
        sf.certify(case.model, case.x, objective=case.objective, effort="low")  # type: ignore[arg-type]


class Inverted(nn.Module):
    """Inverses, of which no derivative is proved."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x.reshape(-1, 2, 2) + 9.0 * torch.eye(2, dtype=x.dtype)).flatten(1)


def test_what_has_no_proved_derivative_falls_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Inverted(), nn.Linear(4, 2)).double()
    x, objective = torch.randn(5, 3, dtype=D), LOSSES["square"]()
    high, normal = (
        sf.certify(model, x, objective=objective, domain=sf.Ball(0.01), effort=effort)
        for effort in ("high", "normal")
    )
    assert high.smoothness == normal.smoothness
    assert high.gradients is not None
    assert normal.gradients is not None
    spent = high.gradients - normal.gradients  # on the segment against the gradient
    assert 0 < spent < 10 * sum(parameter.numel() for parameter in model.parameters()) + 1000


def test_layers_wider_than_those_of_normal_effort() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 136), nn.Tanh(), nn.Linear(136, 2)).double(), torch.randn(3, 4, dtype=D)
    objective = sf.CrossEntropy(torch.tensor([0, 1, 1]))
    high, normal = (
        sf.certify(model, x, objective=objective, domain=sf.Ball(0.01), effort=effort)
        for effort in ("high", "normal")
    )
    assert high.smoothness < normal.smoothness


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_small_gated_networks_are_sharp_at_the_weights(kind: type[nn.Module]) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated, self.head = kind(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gated(x)[0][:, -1])

    torch.manual_seed(0)
    model, x, objective = (
        Last().double(),
        torch.randn(4, 7, 2, dtype=D),
        sf.CrossEntropy(torch.tensor([0, 1, 1, 0])),
    )
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(point: Tensor) -> Tensor:
        parts = point.split([value.numel() for value in values])
        given = {name: part.view_as(value) for name, part, value in zip(names, parts, values, strict=True)}
        found: Tensor = objective(torch.func.functional_call(model, given, (x,)))
        return found

    here = nn.utils.parameters_to_vector(values).detach()
    exact = float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, here, vectorize=True)).abs().max())
    found = float(sf.certify(model, x, objective=objective, domain=sf.Ball(0.0)).smoothness)
    assert exact * (1 - 1e-9) <= found <= 1.01 * exact
