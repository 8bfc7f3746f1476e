"""The paper's projected methods: steps stay in the set, descend as the theorem says, and count as it counts."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import flint
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.exact import run, stored, value_of
from surefoot.errors import SurefootError
from surefoot.guarantees import GuaranteeError
from surefoot.optim import OptimizerError, ProjectedGradient, ProjectedSGD, ProjectedSVRG

KINDS = [ProjectedGradient, ProjectedSGD, ProjectedSVRG]


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return [(x[:8], y[:8]), (x[8:12], y[8:12]), (x[12:], y[12:])]


def mean(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    return float(sf.CrossEntropy(y)(copy.deepcopy(model).double()(x.double())).detach())


def sizes(model: nn.Module, start: dict[str, Tensor] | None = None) -> list[float]:
    """The exact distance of each layer from the origin, or of all weights from the start."""
    away = {
        n: p.detach().double() - (0 if start is None else start[n].double()) for n, p in model.named_parameters()
    }
    if start is not None:
        return [math.sqrt(math.fsum(float(v) ** 2 for part in away.values() for v in part.flatten()))]
    blocks = {name.rpartition(".")[0] for name in away}
    entries = {
        b: [float(v) for n, p in away.items() if n.startswith(b + ".") for v in p.flatten()] for b in blocks
    }
    return [math.sqrt(math.fsum(v * v for v in each)) for each in entries.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("domain", [sf.Ball(0.3), sf.ProductBall(0.9)])
def test_steps_stay_in_the_set_and_lower_the_objective(kind: Any, dtype: torch.dtype, domain: Any) -> None:
    model, data = network(dtype), batches(dtype)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = kind(model, sf.CrossEntropy(), data, domain)
    losses = []
    for _ in range(25):
        losses.append(optimizer.step())
        ball = isinstance(domain, sf.Ball)
        assert max(sizes(model, start if ball else None)) <= domain.radius * (1 + 1e-15)
        assert all(value.dtype == dtype for value in model.parameters())
    assert losses[0] == pytest.approx(mean(model, data) + sum(r.decrease for r in optimizer.history), rel=1e-6)
    assert mean(model, data) < losses[0]
    assert [record.proved for record in optimizer.history] == 25 * [kind is ProjectedGradient]


def test_every_step_descends_by_what_the_theorem_says_in_exact_arithmetic() -> None:
    model, (x, y) = network(), batches()[0]
    optimizer = ProjectedGradient(model, sf.CrossEntropy(), (x, y), sf.ProductBall(0.8), regularizer=None)
    optimizer.step()  # which projects the start into the set
    objective = sf.CrossEntropy(y)
    for _ in range(4):
        before = {parameter: stored(parameter) for parameter in model.parameters()}
        optimizer.step()
        after = {parameter: stored(parameter) for parameter in model.parameters()}
        record = optimizer.history[-1]
        with flint.ctx.workprec(200):
            high, low = (value_of(run(lambda: objective(model(x)), model, p)[0]) for p in (before, after))
            assert high - low >= record.proved_decrease
        promised = record.gradient_norm**2 / (2 * float(optimizer.smoothness))
        assert record.proved_decrease >= promised * (1 - 1e-6) > 0
        assert record.step_size == pytest.approx(1 / float(optimizer.smoothness))
    found = sf.optim.Stationarity(0, min(r.gradient_norm for r in optimizer.history), None, "")
    gap = optimizer.history[0].loss
    assert found.smallest <= math.sqrt(2 * float(optimizer.smoothness) * gap / len(optimizer.history))


def test_constants_are_those_of_the_theorems() -> None:
    data, domain = batches(), sf.Ball(0.3)
    made = {kind: kind(network(), sf.CrossEntropy(), data, domain) for kind in KINDS}
    model = network()
    largest = max(
        float(sf.certify(model, x, objective=sf.CrossEntropy(y), domain=domain).smoothness) for x, y in data
    )
    theta = 2 / (1 + math.sqrt(1 + 2 * 3 * 2))
    for kind, step, factor in ((ProjectedGradient, 1.0, 2.0), (ProjectedSGD, 0.5, 4.0),
                               (ProjectedSVRG, theta, 2 / theta)):  # fmt: skip
        assert float(made[kind].smoothness) == largest
        assert made[kind].length == pytest.approx(step / largest, rel=1e-12)
        assert made[kind].length <= step / largest
        assert made[kind].iterations(0.1, gap=1.0) == pytest.approx(factor * largest / 0.01, abs=1)
    assert made[ProjectedGradient].iterations(0.1) > made[ProjectedGradient].iterations(0.1, gap=0.5)


def test_stochastic_steps_use_batches_by_their_sizes_and_the_seed() -> None:
    def run_of(kind: Any, seed: int) -> list[float]:
        optimizer = kind(network(), sf.CrossEntropy(), batches(), sf.Ball(0.3), seed=seed)
        return [optimizer.step() for _ in range(6)]

    for kind in (ProjectedSGD, ProjectedSVRG):
        assert run_of(kind, 0) == run_of(kind, 0) != run_of(kind, 1)
    # one of equal batches is the whole, with half of the step, or with all of it
    x, y = batches()[0]
    whole = ProjectedGradient(network(), sf.CrossEntropy(), (x, y), sf.Ball(0.3))
    reduced = ProjectedSVRG(network(), sf.CrossEntropy(), [(x, y)], sf.Ball(0.3))
    assert [whole.step() for _ in range(4)] == pytest.approx([reduced.step() for _ in range(4)], rel=1e-9)


def test_a_ridge_is_part_of_the_objective() -> None:
    model, data = network(), batches()
    optimizer = ProjectedGradient(model, sf.CrossEntropy(), data, sf.Ball(0.3), regularizer=sf.Ridge(0.5))
    plain = ProjectedGradient(network(), sf.CrossEntropy(), data, sf.Ball(0.3))
    assert float(plain.smoothness) < float(optimizer.smoothness) <= float(plain.smoothness) + 0.5 * (1 + 1e-9)
    square = sum(float(value.detach().square().sum()) for value in model.parameters())
    assert optimizer.step() == pytest.approx(plain.step() + 0.25 * square)


def test_weights_that_are_moved_are_projected_and_other_functions_refused() -> None:
    model, data = network(), batches()
    optimizer = ProjectedGradient(model, sf.CrossEntropy(), data, sf.ProductBall(0.8))
    losses = [optimizer.step() for _ in range(5)]
    assert all(after < before for before, after in pairwise(losses))
    with torch.no_grad():
        model[0].weight.mul_(10.0)
    optimizer.step()
    assert max(sizes(model)) <= 0.8 * (1 + 1e-15)
    model[1] = nn.Softplus()
    with pytest.raises(OptimizerError, match="make another"):
        optimizer.step()


def test_refusals() -> None:
    data = batches()
    relu = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with pytest.raises(GuaranteeError, match=r"surefoot\.smooth"):
        ProjectedGradient(relu, sf.CrossEntropy(), data, sf.Ball(1.0))
    for options in ({"domain": sf.Box(-1.0, 1.0)}, {"regularizer": sf.objectives.ElasticNet(0.1, 0.1)}):
        with pytest.raises(TypeError, match="ProductBall"):
            ProjectedGradient(network(), sf.CrossEntropy(), data, **options)
    with pytest.raises(SurefootError, match="radii"):
        ProjectedGradient(network(), sf.CrossEntropy(), data, sf.ProductBall({"9": 1.0}))
