"""Noise: certified variances, and variance reduction whose rate is checked against exact expectations."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.guarantees import GuaranteeError
from surefoot.objectives import ElasticNet
from surefoot.optim import OptimizerError, ProjectedSGD, ProjectedSVRG, VarianceBound


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def batches(count: int = 3, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    return [(torch.randn(4, 2).double(), torch.randn(4, 1).double()) for _ in range(count)]


def gradients_at(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    found = []
    for x, y in data:
        loss = sf.Square()(model(x), y)
        found.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(found)


@pytest.mark.parametrize(
    "domain",
    [sf.Ball(1e-3), sf.Ball(1.0), sf.ProductBall(0.8), sf.Box(-0.6, 0.6)],
    ids=["near", "ball", "product", "box"],
)
def test_the_certified_variance_is_never_exceeded_on_the_set(domain) -> None:
    model, data = network(), batches(4)
    optimizer = ProjectedSGD(model, sf.Square(), domain=domain)
    bound = optimizer.certify_variance(data)
    assert isinstance(bound, VarianceBound)
    assert optimizer.variance is bound
    region, worst = optimizer.region(data[0][0]), 0.0
    torch.manual_seed(2)
    for _ in range(60):
        point = copy.deepcopy(model)
        wanted = {name: value.detach() + 2 * torch.randn_like(value) for name, value in model.named_parameters()}
        point.load_state_dict(region.project(wanted))
        slopes = gradients_at(point, data)
        worst = max(worst, float((slopes - slopes.mean(0)).square().sum(1).mean()))
    assert worst <= bound.value
    if isinstance(domain, sf.Ball) and domain.radius == 1e-3:
        assert bound.value <= 1.1 * worst  # near one point the gradients are known
    assert optimizer.prepare(data).is_finite
    assert optimizer.iterations_within(2 * bound.value**0.5) > 0


def test_a_variance_that_cannot_be_bounded_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)).double()
    optimizer = ProjectedSGD(model, sf.Square(), domain=sf.Ball(1e200))
    with pytest.raises(GuaranteeError, match="variance"):
        optimizer.certify_variance(batches())


class Told(ProjectedSVRG):
    """Draws what it is told, and notes the gradient mapping of the whole objective before each short step."""

    told: list[int]
    squares: list[float]
    data: list[tuple[Tensor, Tensor]]

    def drawn(self, count: int) -> list[int]:
        found = [self.value_and_gradient(x, y)[1] for x, y in self.data]
        mean = {name: torch.stack([slopes[name] for slopes in found]).mean(0) for name in found[0]}
        self.squares.append(self.project(mean, self.length, self.region(self.data[0][0]))[2] ** 2)
        return [self.told.pop(0) for _ in range(self.draws)]


@pytest.mark.parametrize("regularizer", [None, ElasticNet(0.1, 0.05)], ids=["plain", "elastic"])
@pytest.mark.parametrize(("inner", "draws"), [(1, 1), (3, 1), (2, 2)])
def test_the_rate_holds_in_exact_expectation(inner: int, draws: int, regularizer) -> None:
    """All sequences of draws are run: the expectation of the theorem is a mean of finitely many numbers."""
    data, squares, ends = batches(2), [], []
    for sequence in itertools.product(range(2), repeat=inner * draws):
        model = network()
        optimizer = Told(model, sf.Square(), sf.Ball(0.4), inner=inner, draws=draws, regularizer=regularizer)
        optimizer.told, optimizer.squares, optimizer.data = list(sequence), [], data
        first = optimizer.step(data)
        assert len(optimizer.squares) == inner
        squares += optimizer.squares
        ends.append(sum(sf.Square()(model(x), y).item() for x, y in data) / 2 + optimizer.penalty)
    gap = first - sum(ends) / len(ends)
    assert gap > 0
    bound = 2 * float(optimizer.smoothness) * gap / (optimizer.theta * inner)
    assert sum(squares) / len(squares) <= bound


def test_an_epoch_descends_resumes_and_says_what_it_is() -> None:
    data = batches(5)
    model, twin = network(3), network(3)
    optimizer = ProjectedSVRG(model, sf.Square(), sf.Ball(0.5), seed=4)
    assert "nothing yet" in optimizer.guarantee
    with pytest.raises(GuaranteeError, match="prepare"):
        optimizer.iterations(0.1)
    losses = [optimizer.step(data) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert "no noise" in optimizer.guarantee
    assert optimizer.history[0].note == "5 short steps"
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    optimizer.step(data)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    twin.load_state_dict(state["model"])
    resumed = ProjectedSVRG(twin, sf.Square(), sf.Ball(0.5))
    resumed.load_state_dict(state["optimizer"])
    resumed.step(data)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    few, many = optimizer.iterations(0.1), optimizer.iterations(0.01)
    assert 0 < few < many


@pytest.mark.parametrize("given", [(torch.ones(2, 2), torch.ones(2, 1)), [], [torch.ones(2, 2)]])
def test_an_epoch_takes_all_batches(given) -> None:
    optimizer = ProjectedSVRG(network(), sf.Square())
    with pytest.raises(OptimizerError, match=r"list\(loader\)"):
        optimizer.step(given)


def test_counts_are_counts() -> None:
    with pytest.raises(ValueError, match="draws"):
        ProjectedSVRG(network(), sf.Square(), draws=0)
    with pytest.raises(ValueError, match="inner"):
        ProjectedSVRG(network(), sf.Square(), inner=0)
