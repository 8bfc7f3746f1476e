"""k-means against scikit-learn and all assignments, with kinks and warm starts."""

from __future__ import annotations

import itertools
import sys

import pytest
import sklearn.cluster
import torch

from surefoot.clustering import KMeans
from surefoot.objectives import ObjectiveError


def points(n: int = 40, d: int = 3, groups: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(groups, d, generator=generator, dtype=torch.float64)
    return centres[torch.arange(n) % groups] + 0.7 * torch.randn(n, d, generator=generator, dtype=torch.float64)


def least(y: torch.Tensor, k: int) -> float:
    """The minimum of the mean over all assignments."""
    best = float("inf")
    for labels in itertools.product(range(k), repeat=len(y) - 1):
        a = torch.tensor((0, *labels))
        groups = [y[a == c] for c in range(k) if bool((a == c).any())]
        total = sum(float((group - group.mean(dim=0)).square().sum()) for group in groups)
        best = min(best, total / (2 * len(y)))
    return best


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_is_the_least_over_all_assignments(k, seed):
    y = points(7, 2, 3, seed)
    assert float(KMeans(k)(y)) == pytest.approx(least(y, k), rel=1e-12)


@pytest.mark.parametrize("k", [2, 4, 7])
def test_it_agrees_with_scikit_learn_and_with_the_trace_form(k):
    y = points()
    found = KMeans(k).solve(y)
    judge = sklearn.cluster.KMeans(k, n_init=10, random_state=0, tol=0).fit(y.numpy())
    assert found.inertia == pytest.approx(judge.inertia_, rel=1e-9)
    assert float(KMeans(k)(y)) == pytest.approx(judge.inertia_ / 80, rel=1e-9)
    one = torch.nn.functional.one_hot(found.labels, k).double()
    projection = one @ torch.linalg.inv(one.mT @ one) @ one.mT
    trace = float(torch.trace((torch.eye(40, dtype=torch.float64) - projection) @ y @ y.mT))
    assert 2 * float(KMeans(k, reduction="sum")(y)) == pytest.approx(trace, rel=1e-12)  # the paper's normalisation
    nearest = torch.cdist(y, found.centres).argmin(dim=1)
    assert torch.equal(nearest, found.labels)


def test_derivatives_by_differences():
    y, objective, h = points(), KMeans(4), 1e-5
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        v = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        difference = float(objective(y + h * v) - objective(y - h * v)) / (2 * h)
        assert float((objective.gradient(y) * v).sum()) == pytest.approx(difference, abs=1e-9)
        curved = (objective.gradient(y + h * v) - objective.gradient(y - h * v)) / (2 * h)
        assert torch.allclose(objective.hessian_vector_product(y, v), curved, atol=1e-9)


def test_it_is_a_loss_of_a_training_loop():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    objective, x = KMeans(3, warm_start=True), points().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = objective(model(x))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert "the last centres" in objective.solve(model(x).detach()).status


def test_the_value_depends_on_the_outputs_alone_unless_it_starts_warm():
    y, other = points(seed=5), points(seed=6)
    plain, warm = KMeans(4, restarts=3), KMeans(4, restarts=3, warm_start=True)
    first = float(plain(y))
    plain(other)
    assert float(plain(y)) == first
    assert float(warm(y)) == first
    warm(other)
    held = float(warm(y))
    assert held >= float(KMeans(4, restarts=30)(y)) - 1e-12
    warm.forget()
    assert float(warm(y)) == first


@pytest.mark.parametrize("seed", range(4))
def test_the_descent_lemma_holds_across_kinks(seed):
    y, objective = points(12, 2, 3, seed), KMeans(3, restarts=30)
    generator = torch.Generator().manual_seed(seed)
    majoriser = objective.majoriser(y)
    value, slope = float(objective(y)), objective.gradient(y)
    assert float(majoriser(y)) == pytest.approx(value, rel=1e-12)
    assert torch.allclose(majoriser.gradient(y), slope, atol=1e-12)
    for size in (0.1, 1.0, 5.0):
        v = size * torch.randn(y.shape, generator=generator, dtype=torch.float64)
        above = value + float((slope * v).sum()) + float(v.square().sum()) / 24
        assert float(objective(y + v)) <= above * (1 + 1e-12)
        assert float(majoriser(y + v)) == pytest.approx(above, rel=1e-12)


def test_there_is_a_kink_where_two_assignments_tie():
    objective = KMeans(2)

    def at(t: float) -> torch.Tensor:
        return torch.tensor([[-1.0], [t], [1.0]], dtype=torch.float64)

    left, right = (objective.gradient(at(t)) for t in (-1e-9, 1e-9))
    assert float((left - right).norm()) > 0.3
    assert not objective.smooth
    assert KMeans(1).smooth


def test_equal_points_need_fewer_clusters():
    y = torch.tensor([[1.0], [1.0], [2.0], [2.0]])
    found = KMeans(3).solve(y)
    assert found.inertia == 0
    assert float(KMeans(4)(y)) == 0
    assert bool(torch.isfinite(found.centres).all())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: KMeans(0), "at least 1"),
        (lambda: KMeans(-2), "at least 1"),
        (lambda: KMeans(2.0), "whole number"),
        (lambda: KMeans(True), "whole number"),
        (lambda: KMeans(2, restarts=0), "restarts"),
        (lambda: KMeans(2, reduction="max"), "reduction"),
        (lambda: KMeans(50)(points()), "at least 50 samples, got 40"),
        (lambda: KMeans(2)(points()[0]), "samples × dimensions"),
        (lambda: KMeans(2)(points() * torch.nan), "not finite"),
        (lambda: KMeans(2)(torch.ones(4, 2, dtype=torch.long)), "real outputs"),
    ],
)
def test_what_does_not_fit_is_refused(make, word):
    with pytest.raises(ObjectiveError, match=word):
        make()


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ObjectiveError, match=r"pip install scikit-learn"):
        KMeans(2)(points())
