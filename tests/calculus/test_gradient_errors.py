"""Gradients are within their proved errors where backward kernels cancel: judged with sixty digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.calculus.adjoint.costates import summands
from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.operations.evaluation import run_in_double
from surefoot.optim import CertifiedDescent, GaussNewton, Newton

D = torch.float64
ONE = torch.ones(1, 1, dtype=D)


@pytest.fixture(autouse=True)
def sixty_digits() -> Any:
    with mp.workdps(60):
        yield


def linear(*weights: float) -> nn.Linear:
    layer = nn.Linear(1, len(weights), bias=False).double()
    layer.weight.data = torch.tensor(weights, dtype=D)[:, None]
    return layer


def assert_sharp(certificate: sf.Certificate, true: Any, slack: float = 1e-9) -> None:
    """The Lipschitz constant at a point is not below the truth, and not far above."""
    assert true <= mp.mpf(float(certificate.lipschitz)) <= true * (1 + slack)


SATURATED: list[tuple[nn.Module, float, Callable[[Any], Any]]] = [
    *((nn.Tanh(), at, lambda x: 1 / mp.cosh(x) ** 2) for at in (10.0, 18.0, 25.0, -25.0, 300.0)),
    *((nn.Sigmoid(), at, lambda x: mp.exp(-x) / (1 + mp.exp(-x)) ** 2) for at in (20.0, 40.0, -40.0, 600.0)),
    *((nn.ELU(), at, mp.exp) for at in (-20.0, -41.5)),
    *((nn.Softplus(), at, lambda x: 1 / (1 + mp.exp(-x))) for at in (-30.0, 50.0)),
    *(
        (nn.SiLU(), at, lambda x: abs(mp.diff(lambda t: t / (1 + mp.exp(-t)), x)))
        for at in (-40.0, -1.278464542761)
    ),
]


@pytest.mark.parametrize(
    ("module", "at", "slope"), SATURATED, ids=lambda v: str(v) if isinstance(v, float) else ""
)
def test_saturated_activations(module: nn.Module, at: float, slope: Callable[[Any], Any]) -> None:
    x = torch.tensor([[at]], dtype=D)
    certificate = sf.certify(module, x, domain=sf.Ball(0.0), wrt="input")
    true = slope(mp.mpf(at))
    assert true <= mp.mpf(float(certificate.lipschitz)) <= true * (1 + 1e-9) + mp.mpf("1e-14")


@pytest.mark.parametrize("gap", [10.0, 20.0, 30.0, 36.0])
def test_confident_classifier(gap: float) -> None:
    certificate = sf.certify(
        linear(gap, 0.0), ONE, objective=sf.CrossEntropy(torch.tensor([0])), domain=sf.Ball(0.0)
    )
    assert_sharp(certificate, mp.sqrt(2) * mp.exp(-gap) / (1 + mp.exp(-gap)), 1e-5)


@pytest.mark.parametrize("gap", [20.0, 30.0, 40.0])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_binary_cross_entropy(gap: float, label: float) -> None:
    loss = sf.objectives.from_torch(nn.BCEWithLogitsLoss(), torch.full((1, 1), label, dtype=D))
    certificate = sf.certify(linear(gap if label else -gap), ONE, objective=loss, domain=sf.Ball(0.0))
    assert_sharp(certificate, mp.exp(-gap) / (1 + mp.exp(-gap)))


class Weighed(nn.Module):
    """A fixed linear functional of what a function makes of logits."""

    def __init__(self, function: Callable[[Tensor], Tensor], weights: list[float]) -> None:
        super().__init__()
        self.function, self.weights = function, torch.tensor(weights, dtype=D)

    def forward(self, outputs: Tensor) -> Tensor:
        return (self.function(outputs) * self.weights).sum()


def softmax(z: list[Any]) -> list[Any]:
    total = mp.fsum(mp.exp(t) for t in z)
    return [mp.exp(t) / total for t in z]


@pytest.mark.parametrize("kind", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("logits", [(40.0, 0.0, 3.0), (0.1, 0.2, 0.3), (-800.0, 5.0, 4.0), (1e-9, 0.0, 1e8)])
def test_softmax_and_its_kin(kind: str, logits: tuple[float, ...]) -> None:
    """λ and ⟨p, λ⟩ cancel; the weights are such that most digits go."""
    weights = [1e6 + 1.0, 1e6, 1e6 - 1.0] if kind != "logsumexp" else [3.0]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda t: torch.softmax(t, -1),
        "log_softmax": lambda t: torch.log_softmax(t, -1),
        "logsumexp": lambda t: torch.logsumexp(t, -1, keepdim=True),
    }
    found = proved_gradient(Analysis.of(linear(*logits), ONE, Weighed(functions[kind], weights)))
    p, c = softmax([mp.mpf(t) for t in logits]), [mp.mpf(w) for w in weights]
    mean = mp.fsum(a * b for a, b in zip(p, c, strict=False))
    true = {
        "softmax": [a * (b - mean) for a, b in zip(p, c, strict=False)],
        "log_softmax": [b - a * mp.fsum(c) for a, b in zip(p, c, strict=False)],
        "logsumexp": [a * c[0] for a in p],
    }[kind]
    computed = found.slopes["weight"].flatten().tolist()
    off = mp.sqrt(mp.fsum((mp.mpf(a) - b) ** 2 for a, b in zip(computed, true, strict=True)))
    assert off <= mp.mpf(found.errors["weight"])
    assert found.errors["weight"] <= 1e-3


class Shifted(nn.Module):
    """(tanh(wx) + 1e7) - 1e7, whose value is known to 1e-9."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[weight]], dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(nn.functional.linear(x, self.w)) + 1e7) - 1e7


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "segment": lambda m: CertifiedDescent(m, sf.Square(), direction="gradient", proof="segment"),
    "Gauss-Newton": lambda m: GaussNewton(m, sf.Square(), proof="evaluation"),
    "Newton": lambda m: Newton(m, sf.Square(), proof="evaluation"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_promises_count_the_error_of_the_gradient(kind: str) -> None:
    """The computed residual has the wrong sign: a step along it goes uphill."""
    ulp = math.ulp(1e7)
    grid = round(0.5 / ulp) * ulp
    weight, target = float(mp.atanh(mp.mpf(grid + 0.4 * ulp))), grid + 0.2 * ulp

    def exact(w: float) -> Any:
        return (mp.tanh(mp.mpf(w)) - mp.mpf(target)) ** 2 / 2

    model = Shifted(weight)
    optimizer = OPTIMIZERS[kind](model)
    optimizer.step(ONE, torch.tensor([[target]], dtype=D))
    promise = optimizer.history[-1].proved_decrease
    assert exact(weight) - exact(float(model.w.detach())) >= mp.mpf(max(promise, 0.0))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_promises_far_from_round_off_are_as_good_as_before(kind: str) -> None:
    """The error of the gradient costs nothing that can be seen where nothing cancels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(5, 3, dtype=D), torch.randn(5, 1, dtype=D)
    found = proved_gradient(Analysis.of(model, x, sf.Square(y)))
    loss = sf.Square(y)(model(x))
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), slope in zip(model.named_parameters(), slopes, strict=True):
        assert float((found.slopes[name] - slope).norm()) <= 1e-11
        assert found.errors[name] <= 1e-9 * float(slope.norm())
    optimizer = OPTIMIZERS[kind](model)
    optimizer.step(x, y)
    assert optimizer.history[-1].proved_decrease > 0


@pytest.mark.parametrize("at", [10.0, 18.0, 19.0, 25.0])
def test_the_second_derivative_through_a_saturated_unit(at: float) -> None:
    """F(w) = ½(2 tanh(w) - y)²: sample by sample, what automatic differentiation computes is zero from 19 on."""
    model = nn.Sequential(linear(at), nn.Tanh(), linear(2.0))
    model[2].weight.requires_grad_(False)
    target = 0.7
    certificate = sf.certify(
        model, ONE, objective=sf.Square(torch.full((1, 1), target, dtype=D)), domain=sf.Ball(0.0)
    )
    slope = 1 / mp.cosh(mp.mpf(at)) ** 2
    residual = 2 * mp.tanh(mp.mpf(at)) - mp.mpf(target)
    bend = (2 * slope) ** 2 - residual * 4 * mp.tanh(mp.mpf(at)) * slope
    assert_sharp(certificate, abs(residual * 2 * slope), 1e-8)
    assert abs(bend) <= mp.mpf(float(certificate.smoothness)) <= abs(bend) * (1 + mp.mpf("1e-8"))


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool1d(x[None], 2)[0]


AT_KINKS: dict[str, tuple[nn.Module, Tensor]] = {
    "relu": (nn.ReLU(), torch.zeros(1, 2, dtype=D)),
    "elu": (nn.ELU(-0.5), torch.tensor([[0.0, -1.5]], dtype=D)),
    "clamp": (nn.Hardtanh(), torch.tensor([[1.0, -1.0]], dtype=D)),
    "prelu": (nn.PReLU().double().requires_grad_(False), torch.zeros(1, 2, dtype=D)),
    "tie": (Pooled(), torch.tensor([[0.5, 0.5, 0.25, -1.0]], dtype=D)),
}


@pytest.mark.parametrize("name", AT_KINKS)
def test_at_a_kink_every_one_sided_slope_counts(name: str) -> None:
    model, x = AT_KINKS[name]
    y = torch.ones_like(model(x))
    objective = sf.Square(y)
    claimed = sf.certify(model, x, objective=objective, wrt="input", domain=sf.Ball(0.0)).lipschitz
    torch.manual_seed(0)
    for _ in range(50):
        move = torch.randn_like(x)
        move = move / move.norm() * 2.0**-30
        with torch.no_grad():
            slope = abs(objective(model(x + move)) - objective(model(x))) * 2.0**30
        assert float(slope) <= float(claimed) + 1e-6


class Absolute(nn.Module):
    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.abs().sum()


def test_at_a_kink_of_a_loss_every_one_sided_slope_counts() -> None:
    x = torch.zeros(1, 2, dtype=D)
    loss = Absolute()
    claimed = sf.certify(nn.Identity(), x, loss, wrt="input", domain=sf.Ball(0.0)).lipschitz
    assert float(loss(x + 2.0**-20)) * 2.0**20 / 2**0.5 <= float(claimed)


READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda w: w[1:],
    "copies": lambda w: w.expand(5, 3, 4),
    "some twice": lambda w: w[[0, 0, 2]],
    "side by side": lambda w: torch.cat([w, w * w], 1),
    "sum": lambda w: w.sum(1, keepdim=True) + w,
    "mean": lambda w: w.mean(0),
    "shift": lambda w: w[0] - torch.ones(7, 4, dtype=D) * w[1],
    "factor": lambda w: torch.ones(7, 1, 4, dtype=D) * w,
    "layer": lambda w: F.linear(torch.ones(6, 4, dtype=D), w, w[:, 0]),
}


@pytest.mark.parametrize("name", READINGS)
def test_an_entry_enters_at_most_so_many_results(name: str) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(3, 4, dtype=D) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return READINGS[name](self.w).sum() * x

    result = Analysis.of(Read(), ONE).over(sf.Ball(0.0))
    values = {n: e.value for n, e in result.enclosures.items()}
    for step in result.steps:
        for slot, argument in step.names.items():
            if not isinstance(values[argument], Tensor):
                continue

            def run(t: Tensor, step: Any = step, argument: str = argument) -> Tensor:
                return run_in_double(step.node, {**values, argument: t})

            with torch.enable_grad():
                jacobian = torch.autograd.functional.jacobian(run, values[argument].detach())
            counts = (jacobian != 0).reshape(step.node.numel, -1).sum(0)
            several = sum(other == argument for other in step.names.values())
            assert int(counts.max()) <= several * summands(step, slot, values[argument].numel()) * (1 + 1e-9)
