"""Projected gradient descent, with and without noise: every claim of its theorems along real runs."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.guarantees import GuaranteeError
from surefoot.magnitude import Magnitude
from surefoot.optim import OptimizerError, ProjectedGradient, ProjectedSGD, VarianceBound, VarianceEstimate

DOMAINS = {
    "product": lambda: sf.ProductBall(1.0),
    "radii": lambda: sf.ProductBall({"0": 0.5, "2": 1.5}),
    "near": lambda: sf.ProductBall(0.3, center="present"),
    "ball": lambda: sf.Ball(0.4),
}


def network(activation: type[nn.Module] = nn.Softplus, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), activation(), nn.Linear(6, 2)).to(dtype)


def data(objective: type[sf.objectives.Objective], count: int = 16, dtype: torch.dtype = torch.float64):
    torch.manual_seed(2)
    x = torch.randn(count, 3, dtype=dtype)
    return x, (x[:, 0] > 0).long() if objective is sf.CrossEntropy else torch.randn(count, 2, dtype=dtype)


def loss_by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs = model(x)
    return (
        F.mse_loss(outputs, y, reduction="sum") / 2 / len(x)
        if y.is_floating_point()
        else F.cross_entropy(outputs, y)
    )


def mapping_by_hand(model: nn.Module, x, y, step: float, optimizer) -> float:
    """The norm of the gradient mapping, from scratch."""
    model.zero_grad()
    loss_by_hand(model, x, y).backward()
    total = 0.0
    target = {n: p.detach() - step * p.grad for n, p in model.named_parameters()}
    for names, radius in optimizer.region(x).groups:
        centre = [optimizer.centre.get(name, torch.zeros_like(target[name])) for name in names]
        away = torch.cat([(target[n] - c).reshape(-1) for n, c in zip(names, centre, strict=True)])
        middle = torch.cat([c.reshape(-1) for c in centre])
        nearest = middle + away * min(1.0, radius / float(away.norm()))
        here = torch.cat([model.get_parameter(n).detach().reshape(-1) for n in names])
        total += float((here - nearest).square().sum()) / step**2
    return total**0.5


@pytest.mark.parametrize("where", DOMAINS)
@pytest.mark.parametrize("objective", [sf.CrossEntropy, sf.Square])
@pytest.mark.parametrize("activation", [nn.Softplus, nn.Tanh])
def test_every_step_keeps_its_promise_and_the_theorem_holds(where: str, objective, activation) -> None:
    model, (x, y) = network(activation), data(objective)
    optimizer = ProjectedGradient(model, objective(), domain=DOMAINS[where]())
    certificate = optimizer.prepare(x, y)
    L = float(certificate.smoothness)
    values = []
    for _ in range(25):
        values.append(optimizer.step(x, y))
        assert optimizer.region(x).contains(dict(model.named_parameters()))
        record = optimizer.history[-1]
        assert record.step_size <= 1 / L
        assert record.promised_decrease >= record.stationarity**2 / (2 * L) * (1 - 1e-6)
        after = float(loss_by_hand(model, x, y).detach())
        assert values[-1] - after >= record.promised_decrease > 0
        found = optimizer.stationarity()
        assert found.smallest <= found.bound
    assert optimizer.history[0].actual_decrease == values[0] - values[1]
    before = copy_of(model)
    optimizer.step(x, y)
    model.load_state_dict(before)
    expected = mapping_by_hand(model, x, y, optimizer.history[-1].step_size, optimizer)
    assert optimizer.history[-1].stationarity == pytest.approx(expected, rel=1e-8)
    eps = (2 * L * values[0] / 25) ** 0.5 * 1.0001
    assert optimizer.iterations(eps) <= 25
    assert min(record.stationarity for record in optimizer.history[:25]) <= eps


def copy_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_start_is_projected_and_that_is_said() -> None:
    model, (x, y) = network(), data(sf.Square)
    with torch.no_grad():
        model[0].weight.mul_(10)
    optimizer = ProjectedGradient(model, sf.Square(), domain=sf.ProductBall(0.5))
    optimizer.step(x, y)
    optimizer.step(x, y)
    assert "projected into the set" in optimizer.history[0].note
    assert optimizer.history[1].note == ""
    inside = ProjectedGradient(network(), sf.Square(), domain=sf.Ball(0.5))
    inside.step(x, y)
    assert inside.history[0].note == ""


def test_the_certificate_is_computed_once_for_the_same_data_and_anew_for_other(monkeypatch) -> None:
    model, (x, y) = network(), data(sf.Square)
    optimizer = ProjectedGradient(model, sf.Square())
    calls = []
    original = optimizer.certify
    monkeypatch.setattr(optimizer, "certify", lambda *a: calls.append(1) or original(*a))
    for _ in range(3):
        optimizer.step(x, y)
    optimizer.step(x.clone(), y.clone())
    assert len(calls) == 1
    y[0, 0] += 5.0
    optimizer.step(x, y)
    assert len(calls) == 2
    model[0].bias.requires_grad_(False)
    optimizer.step(x, y)
    assert len(calls) == 3
    model[0].bias.add_(0.1)
    optimizer.step(x, y)
    assert len(calls) == 4
    model[1] = nn.Tanh()
    optimizer.step(x, y)
    assert len(calls) == 5


def test_iterations_count_as_the_theorem_says() -> None:
    model, (x, y) = network(), data(sf.Square)
    optimizer = ProjectedGradient(model, sf.Square())
    with pytest.raises(GuaranteeError, match=r"prepare\(x, y\)"):
        optimizer.iterations(0.1)
    certificate = optimizer.prepare(x, y)
    L = float(certificate.smoothness)
    before = optimizer.iterations(0.1)
    assert before == certificate.iterations(0.1) >= 2 * L * float(certificate.bound) / 0.01
    first = optimizer.step(x, y)
    assert 0 <= optimizer.iterations(0.1) - 2 * L * first / 0.01 <= 1
    assert optimizer.iterations(0.1, gap=3.0) - 2 * L * 3 / 0.01 <= 1
    assert "smooth" in optimizer.guarantee


@pytest.mark.parametrize("kind", [ProjectedGradient, ProjectedSGD])
@pytest.mark.parametrize("where", ["product", "near", "ball"])
def test_a_resumed_run_is_the_same_to_the_last_bit(kind, where: str) -> None:
    model, (x, y) = network(), data(sf.CrossEntropy)
    parts = [(x, y)] if kind is ProjectedGradient else [(x[k : k + 4], y[k : k + 4]) for k in range(0, 16, 4)]
    optimizer = kind(model, sf.CrossEntropy(), domain=DOMAINS[where]())
    file = io.BytesIO()
    for k in range(12):
        if k == 6:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        optimizer.step(*parts[k % len(parts)])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = network()
    twin.load_state_dict(saved["model"])
    resumed = kind(twin, sf.CrossEntropy(), domain=DOMAINS[where]())
    resumed.load_state_dict(saved["optimizer"])
    for k in range(6, 12):
        resumed.step(*parts[k % len(parts)])
    assert resumed.history == optimizer.history
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(ValueError, match="run on"):
        kind(twin, sf.CrossEntropy(), domain=sf.ProductBall(7.0)).load_state_dict(saved["optimizer"])


@pytest.mark.parametrize("kind", [ProjectedGradient, ProjectedSGD])
def test_copies_go_their_own_way(kind) -> None:
    model, (x, y) = network(), data(sf.CrossEntropy)
    optimizer = kind(model, sf.CrossEntropy(), domain=sf.Ball(0.3))
    optimizer.step(x, y)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.model is not model
        before = copy_of(model)
        second, third = twin.step(x, y), twin.step(x, y)
        assert third < second < optimizer.history[0].loss
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.step(x, y) == second


@pytest.mark.parametrize("kind", [ProjectedGradient, ProjectedSGD])
def test_a_kink_is_refused_with_the_remedy_and_nothing_changes(kind) -> None:
    model, (x, y) = network(nn.ReLU), data(sf.Square)
    before = copy_of(model)
    with pytest.raises(GuaranteeError, match=r"surefoot\.smooth") as caught:
        kind(model, sf.Square()).step(x, y)
    assert "relu" in str(caught.value)
    bad = x.clone()
    bad[0, 0] = float("inf")
    with pytest.raises(sf.errors.SurefootError):
        kind(model, sf.Square()).step(bad, y)
    with pytest.raises(OptimizerError, match="pair"):
        kind(network(), sf.Square()).step(x, y, lambda: 1.0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_single_precision_stays_inside_and_says_when_steps_vanish() -> None:
    model, (x, y) = network(dtype=torch.float32), data(sf.CrossEntropy, dtype=torch.float32)
    optimizer = ProjectedGradient(model, sf.CrossEntropy())
    for _ in range(20):
        optimizer.step(x, y)
        assert optimizer.region(x).contains(dict(model.named_parameters()))
    assert model[0].weight.dtype == torch.float32
    assert optimizer.history[-1].loss < optimizer.history[0].loss
    wide = ProjectedGradient(network(dtype=torch.float32), sf.CrossEntropy(), domain=sf.ProductBall(1e5))
    wide.step(x, y)
    assert "double precision" in wide.history[0].note
    assert wide.history[0].promised_decrease == 0


def batches(x: torch.Tensor, y: torch.Tensor, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x[k : k + size], y[k : k + size]) for k in range(0, len(x), size)]


@pytest.mark.parametrize("objective", [sf.CrossEntropy, sf.Square])
def test_stochastic_steps_satisfy_the_inequality_of_the_proof_in_exact_expectation(objective) -> None:
    """E F(u⁺) ≤ F(u) − γ/2 ‖G(u)‖² + γ/2 σ², the expectation being a finite sum over the batches."""
    model, (x, y) = network(), data(objective)
    optimizer = ProjectedSGD(model, objective(), domain=sf.ProductBall(1.0))
    parts = batches(x, y)
    for k in range(20):
        optimizer.step(*parts[k % 4])
    assert len(optimizer.batches) == 4
    worst = 0.0
    for _ in range(5):
        optimizer.step(*parts[0])
        state, here = copy_of(model), float(loss_by_hand(model, x, y).detach())
        variance = optimizer.estimate_variance(parts).value * 3 / 4  # of one batch out of four
        after, steps = [], []
        for part in parts:
            model.load_state_dict(state)
            optimizer.step(*part)
            after.append(float(loss_by_hand(model, x, y).detach()))
            steps.append(optimizer.history[-1].step_size)
        model.load_state_dict(state)
        (step,) = set(steps)
        assert step <= 0.5 / max(float(Magnitude(s)) for s, _ in optimizer.batches.values())
        mapping = mapping_by_hand(model, x, y, step, optimizer)
        assert sum(after) / 4 <= here - step / 2 * mapping**2 + step / 2 * variance
        worst = max(worst, mapping)
    assert worst > 0


def test_stochastic_smoothness_covers_every_batch_and_the_whole() -> None:
    model, (x, y) = network(), data(sf.CrossEntropy)
    optimizer = ProjectedSGD(model, sf.CrossEntropy(), domain=sf.ProductBall(1.0))
    assert "0 batches" in optimizer.guarantee
    sizes = []
    for part in batches(x, y) * 2:
        optimizer.step(*part)
        sizes.append(optimizer.history[-1].step_size)
    assert sizes == sorted(sizes, reverse=True)
    on_set = [
        sf.certify(model, a, objective=sf.CrossEntropy(b), domain=optimizer.domain) for a, b in batches(x, y)
    ]
    assert float(optimizer.smoothness) == max(float(certificate.smoothness) for certificate in on_set)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert float(vector.norm()) <= 2**0.5 * (1 + 1e-9)
    assert "4 batches" in optimizer.guarantee
    assert "variance that was not given" in optimizer.guarantee


def test_a_certificate_of_the_full_objective() -> None:
    model, (x, y) = network(), data(sf.CrossEntropy)
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.ProductBall(1.0))
    optimizer = ProjectedSGD(model, sf.CrossEntropy(), domain=sf.ProductBall(1.0), smoothness=certificate)
    L = float(certificate.smoothness)
    assert optimizer.iterations(0.1, gap=1.0) == pytest.approx(400 * L, abs=1)
    assert optimizer.iterations(0.1) == pytest.approx(400 * L * float(certificate.bound), rel=1e-3)
    optimizer.step(x[:4], y[:4])
    assert 0.5 / L * (1 - 1e-12) <= optimizer.history[0].step_size <= 0.5 / L
    with pytest.raises(GuaranteeError, match="within 2 of the origin"):
        ProjectedSGD(model, sf.CrossEntropy(), domain=sf.ProductBall(2.0), smoothness=certificate)
    kinked = sf.certify(network(nn.ReLU), x, objective=sf.CrossEntropy(y), domain=sf.ProductBall(1.0))
    with pytest.raises(GuaranteeError, match=r"surefoot\.smooth"):
        ProjectedSGD(network(nn.ReLU), sf.CrossEntropy(), smoothness=kinked)
    with pytest.raises(ValueError, match="'batch' or a certificate"):
        ProjectedSGD(model, sf.CrossEntropy(), smoothness="full")


def test_variance_bound_and_estimate_are_different_things() -> None:
    model, (x, y) = network(), data(sf.CrossEntropy)
    parts = batches(x, y)
    estimate = ProjectedSGD(model, sf.CrossEntropy()).estimate_variance(parts)
    gradients = []
    for a, b in parts:
        found = torch.autograd.grad(loss_by_hand(model, a, b), list(model.parameters()))
        gradients.append(torch.cat([part.reshape(-1) for part in found]))
    assert estimate == VarianceEstimate(pytest.approx(float(torch.stack(gradients).var(dim=0).sum())), 4)
    with pytest.raises(ValueError, match="two batches"):
        ProjectedSGD(model, sf.CrossEntropy()).estimate_variance(parts[:1])

    guessed = ProjectedSGD(model, sf.CrossEntropy(), variance=estimate)
    guessed.step(*parts[0])
    assert "only an estimate" in guessed.guarantee
    with pytest.raises(GuaranteeError, match="proves nothing"):
        guessed.iterations_within(1.0)
    known = ProjectedSGD(model, sf.CrossEntropy(), variance=0.25)
    assert known.variance == VarianceBound(0.25)
    with pytest.raises(GuaranteeError, match="take a step first"):
        known.iterations_within(1.0)
    known.step(*parts[0])
    L = float(known.smoothness)
    assert 0 <= known.iterations_within(1.0, gap=2.0) - 4 * L * 2 / 0.75 <= 1 + 1e-6
    with pytest.raises(GuaranteeError, match="larger batches"):
        known.iterations_within(0.5)
    with pytest.raises(ValueError, match="variance"):
        ProjectedSGD(model, sf.CrossEntropy(), variance=-1.0)


def test_the_number_of_steps_is_drawn_uniformly() -> None:
    model, (x, y) = network(), data(sf.CrossEntropy)
    optimizer = ProjectedSGD(model, sf.CrossEntropy())
    optimizer.step(x, y)
    count = optimizer.iterations(1.0)
    drawn = [optimizer.random_iterations(1.0, seed=seed) for seed in range(400)]
    assert 0 <= min(drawn) < 0.05 * count
    assert 0.95 * count < max(drawn) < count
    assert abs(sum(drawn) / 400 - (count - 1) / 2) < 0.1 * count
    assert optimizer.random_iterations(1.0, seed=3) == drawn[3]


def test_sets_that_are_no_sets_are_refused() -> None:
    with pytest.raises(TypeError, match="ProductBall, a Ball or a Box"):
        ProjectedGradient(network(), sf.Square(), domain="everywhere")
    x, y = data(sf.Square)
    with pytest.raises(sf.errors.SurefootError, match="radii"):
        ProjectedGradient(network(), sf.Square(), domain=sf.ProductBall({"0": 1.0})).step(x, y)
