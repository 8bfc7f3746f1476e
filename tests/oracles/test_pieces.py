"""Data in pieces mean the objective of all of it: oracles, optimizers, certificates and verdicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from judges.dense import jacobian, jacobian_norm, second_derivative, tensor_norm
from judges.verdicts import assert_same_verdict
from surefoot.domains import DomainError
from surefoot.errors import CaptureError, ChainError, EvaluationError, ObjectiveError
from surefoot.objectives import Huber
from surefoot.optim import GaussNewton, Newton, OptimizerError
from surefoot.oracles import OracleError, gauss_newton, gradient, newton

SIZES = (7, 1, 12, 10)  # of the batches


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(30, 4).double()


CLASSES, NUMBERS = torch.arange(30) % 3, torch.linspace(-1, 1, 90).double().reshape(30, 3)
LOSSES: dict[str, tuple[Any, Tensor]] = {
    "classes": (sf.CrossEntropy(), CLASSES),
    "weighted": (sf.CrossEntropy(weight=[1.0, 2.0, 0.3], ignore_index=1), CLASSES),
    "sum": (sf.CrossEntropy(reduction="sum"), CLASSES),
    "square": (sf.Square(), NUMBERS),
    "entries": (sf.Square(reduction="entries"), NUMBERS),
    "row": (Huber(reduction="row"), NUMBERS),
}
ORACLES: dict[str, Callable[..., Any]] = {
    "gradient": lambda *given: gradient(*given, kappa=2.0),
    "dual": lambda *given: gauss_newton(*given, method="dual"),
    "auto": lambda *given: gauss_newton(*given, regularizer=sf.Ridge(0.1)),
    "newton": lambda *given: newton(*given, kappa=2.0, method="cg", tolerance=1e-13),
}


def _pieces(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("name", LOSSES)
def test_directions_are_those_of_the_joined_batch(oracle: str, name: str) -> None:
    model, x, (loss, y) = _model(), _inputs(), LOSSES[name]
    whole = ORACLES[oracle](sf.Chain(model, x), loss.bound_to(y))
    parts = ORACLES[oracle](sf.Chain(model, _pieces(x, y)), loss)
    assert parts.kappa == whole.kappa
    assert parts.model_decrease == pytest.approx(whole.model_decrease, rel=1e-10)
    for path, direction in whole.direction.items():
        assert torch.allclose(parts.direction[path], direction, rtol=0, atol=1e-10)


class _Named(nn.Module):
    """Reads its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()

    def forward(self, *, features: Tensor, scale: Tensor) -> Tensor:
        return self.inner(features) * scale


def test_inputs_by_name_a_loader_that_shuffles_and_values() -> None:
    x, y = _inputs(), CLASSES
    named = [({"features": part, "scale": part[:, :1]}, marks) for part, marks in _pieces(x, y)]
    model = _Named()
    whole = gradient(sf.Chain(model, {"features": x, "scale": x[:, :1]}), sf.CrossEntropy(y))
    parts = gradient(sf.Chain(model, named), sf.CrossEntropy())
    for path, direction in whole.direction.items():
        assert torch.allclose(parts.direction[path], direction, rtol=0, atol=1e-12)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    chain, joined = sf.Chain(model.inner, loader), sf.Chain(model.inner, x)
    assert torch.allclose(chain.value(), joined.value(), rtol=0, atol=1e-14)
    other = {path: 2 * value.detach() for path, value in model.inner.named_parameters()}
    assert torch.allclose(chain.value(other), joined.value(other), rtol=0, atol=1e-14)
    for step in (gauss_newton(chain, sf.CrossEntropy(), params=other),):
        expected = gauss_newton(joined, sf.CrossEntropy(y), params=other)
        assert step.model_decrease == pytest.approx(expected.model_decrease, rel=1e-10)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "dual": lambda model: GaussNewton(model, sf.CrossEntropy(), solver="dual", adapt=False),
    "newton": lambda model: Newton(model, sf.CrossEntropy(), solver="cg", adapt=False, weight_decay=0.01),
    "proved": lambda model: sf.CertifiedDescent(model, sf.CrossEntropy(), direction="gauss_newton"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_the_joined_batch(name: str) -> None:
    x, y = _inputs(), CLASSES
    model, other = _model(), _model()
    whole, parts = OPTIMIZERS[name](model), OPTIMIZERS[name](other)
    batches = _pieces(x, y)
    expected, losses = [whole.step(x, y) for _ in range(4)], [parts.step(batches) for _ in range(4)]
    if name == "proved":  # which solves inexactly, by other methods
        assert losses[-1] < 0.95 * losses[0]
        return
    assert losses == pytest.approx(expected, abs=1e-10)
    assert parts.value(batches) == pytest.approx(whole.value(x, y), abs=1e-10)
    assert {record.run for record in parts.history} == {0}
    for value, other_value in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(value, other_value, rtol=0, atol=1e-9)


def _of_vector(
    model: nn.Module, function: Callable[[Tensor], Tensor]
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function of the outputs as one of all parameters in a vector, and the vector."""
    named = {path: value.detach() for path, value in model.named_parameters()}
    sizes, x = [value.numel() for value in named.values()], _inputs()

    def of(vector: Tensor) -> Tensor:
        parts = zip(named.items(), vector.split(sizes), strict=True)
        weights = {path: part.view(value.shape) for (path, value), part in parts}
        return function(torch.func.functional_call(model, weights, (x,)))

    return of, torch.cat([value.reshape(-1) for value in named.values()])


@pytest.mark.parametrize("name", ["weighted", "entries", "row"])
def test_certificates_hold_for_the_joined_batch(name: str) -> None:
    """Value, gradient and second derivative, written out at points of the ball, are below the constants."""
    model, x, (loss, y) = _model(), _inputs(), LOSSES[name]
    ridge = sf.Ridge(0.3) if name == "entries" else None
    found = sf.certify(model, _pieces(x, y), objective=loss, domain=sf.Ball(0.2), regularizer=ridge)
    whole = sf.certify(model, x, objective=loss.bound_to(y), domain=sf.Ball(0.2), regularizer=ridge)
    of, centre = _of_vector(model, lambda outputs: loss(outputs, y))
    weight = 0.0 if ridge is None else 0.3
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        step = torch.randn(centre.shape, generator=generator).double()
        point = centre + 0.2 * step / step.norm()
        assert float(of(point)) + weight / 2 * float(point @ point) <= found.bound
        assert float((jacobian(of, point) + weight * point).norm()) <= found.lipschitz
        curved = second_derivative(of, point) + weight * torch.eye(len(point)).double()
        assert tensor_norm(curved) <= found.smoothness
        assert found.one_step is not None
        assert found.one_step < found.smoothness
        move, slope = point - centre, jacobian(of, centre) + weight * centre
        rise = float(of(point) - of(centre) + weight / 2 * (point @ point - centre @ centre) - slope @ move)
        assert rise <= float(found.one_step) / 2 * float(move @ move)
    assert found.smoothness < 3 * whole.smoothness
    assert found.lipschitz < 3 * whole.lipschitz
    if ridge is None:
        slope = jacobian(of, centre)
        assert found.block_gradients is not None
        size = torch.tensor(list(found.block_gradients.values())).norm()
        assert float(slope.norm()) <= size * (1 + 1e-12) <= float(slope.norm()) * (1 + 1e-7) + 1e-12
        assert found.step_size == pytest.approx(whole.step_size, rel=0.5)
        assert (found.radius, found.domain, found.scalar) == (whole.radius, whole.domain, True)


@pytest.mark.parametrize("effort", ["quick", "normal", "high"])
@pytest.mark.parametrize("name", ["weighted", "entries"])
def test_what_is_the_same_number_as_for_the_joined_batch(name: str, effort: Any) -> None:
    model, x, (loss, y) = _model(), _inputs(), LOSSES[name]
    found = sf.certify(model, _pieces(x, y), objective=loss, domain=sf.Ball(0.0), effort=effort)
    whole = sf.certify(model, x, objective=loss.bound_to(y), domain=sf.Ball(0.0), effort=effort)
    assert float(found.bound) == pytest.approx(float(whole.bound), rel=1e-10)
    assert float(found.lipschitz) == pytest.approx(float(whole.lipschitz), rel=1e-10)
    assert found.block_gradients == pytest.approx(whole.block_gradients, rel=1e-10)


def test_certificates_of_outputs() -> None:
    model, x = _model(), _inputs()
    pieces = _pieces(x, NUMBERS)
    found = sf.certify(model, pieces, domain=sf.Ball(0.1))
    of, centre = _of_vector(model, lambda outputs: outputs.reshape(-1))
    step = torch.ones_like(centre)
    for point in (centre, centre + 0.1 * step / step.norm()):
        assert float(of(point).norm()) <= found.bound
        assert jacobian_norm(of, point) <= found.lipschitz
        assert tensor_norm(second_derivative(of, point)) <= found.smoothness
    assert not found.scalar


@pytest.mark.parametrize("effort", ["normal", "high"])
def test_the_longest_step_of_pieces_is_about_that_of_the_joined_batch(effort: Any) -> None:
    model, x = _model(), _inputs()
    pieces = _pieces(x, NUMBERS)
    longest = sf.certify(model, pieces, objective=sf.Square(), effort=effort)
    whole = sf.certify(model, x, objective=sf.Square(NUMBERS), effort=effort)
    assert longest.step_size == pytest.approx(whole.step_size, rel=0.15)
    assert longest.step_size > 1.1 * longest.inverse_smoothness
    assert longest.damping > 0
    moved = copy.deepcopy(model)
    slopes = gradient(sf.Chain(model, pieces), sf.Square()).direction
    with torch.no_grad():
        for path, value in moved.named_parameters():
            value += longest.step_size * slopes[path]
    promised = longest.step_size / 2 * sum(float(slope.square().sum()) for slope in slopes.values())
    before, after = (sf.evaluate(network, x, sf.Square(NUMBERS)) for network in (model, moved))
    assert after.lower < before.upper - promised
    assert "steps" in str(longest).lower()


def test_convergence_is_that_of_the_joined_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    x = _inputs()[:6]
    with torch.no_grad():
        y = model(x) + 1e-3
    parts = sf.convergence(model, list(zip(x.split(4), y.split(4), strict=True)), sf.Square())
    whole = sf.convergence(model, x, sf.Square(y))
    assert parts.proved
    assert_same_verdict(parts, whole)


def _changing(x: Tensor, y: Tensor) -> Any:
    class Changing:
        """Gives other numbers at each pass."""

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield x + torch.rand(()), y

    return Changing()


def test_what_is_refused() -> None:
    model, x, y = _model(), _inputs(), CLASSES
    batches = _pieces(x, y)
    spoilt = [batches[0], (batches[1][0] * torch.nan, batches[1][1])]
    normal = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (CaptureError, "In batch 1 of the loader", lambda: gradient(sf.Chain(model, spoilt), sf.CrossEntropy())),
        (CaptureError, "In batch 1 of the loader", lambda: sf.certify(model, spoilt, objective=sf.CrossEntropy())),
        (CaptureError, "In batch 1 of the loader", lambda: GaussNewton(model, sf.CrossEntropy()).step(spoilt)),
        (EvaluationError, "statistics from each batch", lambda: sf.Chain(normal, batches)),
        (EvaluationError, "statistics from each batch", lambda: sf.certify(normal, batches)),
        (EvaluationError, "only once", lambda: sf.Chain(model, iter(batches))),
        (OracleError, "there are no batches", lambda: gradient(sf.Chain(model, []), sf.CrossEntropy())),
        (OracleError, "bring their own", lambda: gradient(sf.Chain(model, batches), sf.CrossEntropy(y))),
        (OracleError, "another one than", lambda: gradient(sf.Chain(model, _changing(x, y)), sf.CrossEntropy())),
        (OracleError, "one batch", lambda: newton(sf.Chain(model, batches), sf.CrossEntropy(), 1.0, "dynamic")),
        (
            OracleError,
            "pieces",
            lambda: gauss_newton(sf.Chain(model, batches), sf.CrossEntropy(), method="dynamic"),
        ),
        (ChainError, "one batch", lambda: sf.Chain(model, batches).states()),
        (ChainError, "loaders", lambda: sf.Chain(model, batches) >> sf.Chain(model, x)),
        (DomainError, "one batch", lambda: sf.certify(model, batches, wrt="input")),
        (DomainError, "segment", lambda: sf.certify(model, batches, domain=sf.Segment({}, 1.0))),
        (ObjectiveError, "mean over samples", lambda: sf.certify(model, batches, objective=nn.Identity())),
        (OptimizerError, "brings its targets", lambda: Newton(model, sf.CrossEntropy()).step(batches, y)),
    ]
    for kind, words, action in cases:
        with pytest.raises(kind, match=words):
            action()
    for value, expected in zip(model.parameters(), _model().parameters(), strict=True):
        assert torch.equal(value, expected)
