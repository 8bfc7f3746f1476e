"""Clusterings against all assignments, singular values, an interior-point solver, and their own bounds."""

from __future__ import annotations

import itertools
import warnings

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.clustering import (
    ConvexClustering,
    Edges,
    KMeans,
    Spectral,
    all_pairs,
    explicit,
    matrix,
    nearest_neighbours,
)
from surefoot.objectives import ObjectiveError


def points(n: int = 12, d: int = 3, groups: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(groups, d, generator=generator, dtype=torch.float64)
    return centres[torch.arange(n) % groups] + 0.5 * torch.randn(n, d, generator=generator, dtype=torch.float64)


def with_values(shape: tuple[int, int], values: list[float]) -> Tensor:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(start, full_matrices=False)
    return (u * torch.tensor(values, dtype=torch.float64)) @ vh


def graphs(y: Tensor) -> dict[str, Edges]:
    weights = torch.rand(len(y), len(y), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights = torch.triu(weights * (weights > 0.6), 1)
    chain = torch.stack([torch.arange(len(y) - 1), torch.arange(1, len(y))], dim=1)
    return {
        "all pairs": all_pairs(len(y)),
        "neighbours": nearest_neighbours(y, 3),
        "matrix": matrix(weights + weights.mT),
        "chain": explicit(chain, torch.linspace(0.1, 2, len(y) - 1)),
    }


CLUSTERINGS = {
    "k-means": KMeans(3, restarts=30),
    "one mean": KMeans(1),
    "spectral": Spectral(2),
    "convex": ConvexClustering(penalty=0.1, tolerance=1e-12),
}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_kmeans_is_the_least_over_all_assignments(k):
    y, best = points(7, 2), float("inf")
    for labels in itertools.product(range(k), repeat=6):
        a = torch.tensor((0, *labels))
        clusters = [y[a == c] for c in range(k) if bool((a == c).any())]
        best = min(best, sum(float((c - c.mean(dim=0)).square().sum()) for c in clusters))
    assert float(KMeans(k)(y)) == pytest.approx(best / 14, rel=1e-12)
    assert 2 * float(KMeans(k, reduction="sum")(y)) == pytest.approx(best, rel=1e-12)  # the paper's


@pytest.mark.parametrize(("shape", "k"), [((9, 4), 1), ((4, 9), 2), ((6, 6), 3), ((5, 3), 3)])
def test_spectral_is_the_sum_of_the_small_singular_values_squared(shape, k):
    y = points(*shape)
    rest = np.linalg.svd(y.numpy(), compute_uv=False)[k:]
    assert 2 * float(Spectral(k, reduction="sum")(y)) == pytest.approx((rest**2).sum(), rel=1e-10, abs=1e-27)
    assert float(Spectral(k)(y)) <= float(KMeans(k)(y)) * (1 + 1e-12)


@pytest.mark.parametrize("penalty", [0.01, 0.1, 3.0])
@pytest.mark.parametrize("kind", ["all pairs", "neighbours", "matrix", "chain"])
def test_convex_clustering_agrees_with_an_interior_point_method(kind, penalty):
    y = points()
    edges = graphs(y)[kind]
    z = cvxpy.Variable(tuple(y.shape))
    pull = cvxpy.norm(z[edges.first.numpy()] - z[edges.second.numpy()], axis=1)
    total = 0.5 * cvxpy.sum_squares(z - y.numpy()) + pull @ (penalty * edges.weights.numpy())
    problem = cvxpy.Problem(cvxpy.Minimize(total))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an accuracy that was asked for and not quite reached
        problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
    objective = ConvexClustering(edges, penalty=penalty, reduction="sum", tolerance=1e-12)
    result = objective.solve(y)
    assert result.converged
    assert float(objective(y)) == pytest.approx(float(problem.value), rel=1e-9)
    assert np.abs(result.centroids.numpy() - z.value).max() < 1e-4
    assert bool((result.dual.norm(dim=1) <= penalty * edges.weights * (1 + 1e-12)).all())


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("penalty", [0.05, 1.0])
def test_a_gap_is_honest(tolerance, penalty):
    y = points(20, 2, seed=3)
    exact = ConvexClustering(penalty=penalty, tolerance=1e-13).solve(y)
    rough = ConvexClustering(penalty=penalty, tolerance=tolerance).solve(y)
    assert -1e-12 * exact.value <= rough.value - exact.value <= rough.gap + exact.gap
    assert float((rough.centroids - exact.centroids).norm()) <= rough.gradient_error + exact.gradient_error
    with pytest.warns(UserWarning, match="above the tolerance"):
        early = ConvexClustering(penalty=penalty, tolerance=1e-13, max_iterations=1).solve(y)
    assert not early.converged
    assert early.value - exact.value <= early.gap


@pytest.mark.parametrize("scale", [1e-100, 1e-8, 1.0, 1e8])
def test_any_scale_and_far_from_zero(scale):
    y = points(9, 3)
    assert ConvexClustering(penalty=5.0, tolerance=1e-12).solve(scale * y).converged
    far = ConvexClustering(penalty=0.1, tolerance=1e-8).solve(y + 1e6)
    near = ConvexClustering(penalty=0.1, tolerance=1e-8).solve(y)
    assert torch.allclose(near.centroids, far.centroids - 1e6, atol=1e-6)


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_gradient_descent_lemma_and_majoriser(name):
    y, objective, h = points(), CLUSTERINGS[name], 1e-5
    value, slope, majoriser = float(objective(y)), objective.gradient(y), objective.majoriser(y)
    assert torch.allclose(majoriser.gradient(y), slope, atol=1e-12)
    offset = value - float(majoriser(y))
    assert offset >= -1e-12
    for seed, size in enumerate((0.1, 1.0, 5.0)):
        v = size * points(seed=20 + seed)
        difference = float(objective(y + h * v) - objective(y - h * v)) / (2 * h)
        assert float((slope * v).sum()) == pytest.approx(difference, abs=1e-5)
        above = value + float((slope * v).sum()) + float(v.square().sum()) / 24
        assert float(objective(y + v)) <= above * (1 + 1e-9)
        assert float(majoriser(y + v)) + offset == pytest.approx(above, rel=1e-9)
    assert objective(y.float()).dtype == torch.float32


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_constants_are_not_exceeded(name):
    objective = CLUSTERINGS[name]
    for radius in (0.3, 10.0):
        constants = objective.constants((12, 3), radius=radius)
        for seed in range(4):
            y = points(seed=seed)
            y *= radius / y.norm()
            assert float(objective.gradient(y).norm()) <= float(constants.lipschitz) * (1 + 1e-6)
            if constants.smoothness.is_finite:
                change = float((objective.gradient(y) - objective.gradient(0.5 * y)).norm())
                assert change <= float(constants.smoothness) * 0.5 * radius * (1 + 1e-6)
    assert constants.smoothness.is_finite == (name in ("one mean", "convex"))


@pytest.mark.parametrize("kind", ["all pairs", "neighbours", "matrix", "chain"])
def test_no_gradient_of_convex_clustering_is_longer_than_the_constant(kind):
    edges = graphs(points(15, 2, seed=7))[kind]
    objective = ConvexClustering(edges, penalty=2.0, reduction="sum")
    bound, worst = float(objective.constants((15, 2)).lipschitz), 0.0
    for dim in (1, 2, 5):
        direction = torch.randn(15, dim, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        for _ in range(15):  # the longest gradient is reached far away: at c·sign of the differences
            gaps = edges.differences(direction)
            direction = edges.sums(2.0 * edges.weights[:, None] * gaps / gaps.norm(dim=1, keepdim=True))
            worst = max(worst, float(direction.norm()))
    assert 0.4 * bound <= worst <= bound * (1 + 1e-12)


def test_the_constant_of_all_pairs_is_that_of_the_errata():
    for n in (2, 3, 5, 30):
        bound = float(ConvexClustering(reduction="sum").constants((n, 4)).lipschitz)
        assert bound == pytest.approx(n * np.sqrt((n - 1) / 2), rel=1e-9)
    far = 1e6 * torch.arange(2.0, dtype=torch.float64)[:, None]
    assert float(ConvexClustering(reduction="sum").gradient(far).norm()) == pytest.approx(2**0.5, rel=1e-9)


@pytest.mark.parametrize("values", [[3.0, 2.0, 1.0], [3.0, 2.0, 1.9], [5.0, 1.0, 0.99]])
def test_the_curvature_of_spectral_clustering(values):
    y, objective, h = with_values((5, 3), values), Spectral(2, reduction="sum"), 1e-6
    units = torch.eye(15, dtype=torch.float64).reshape(15, 5, 3)
    rows = [(objective.gradient(y + h * e) - objective.gradient(y - h * e)).flatten() / (2 * h) for e in units]
    curvature = objective.solve(y).curvature
    assert float(torch.linalg.matrix_norm(torch.stack(rows), 2)) == pytest.approx(curvature, rel=1e-6)
    tie = Spectral(2, reduction="sum").solve(with_values((6, 4), [3.0, 2.0, 2.0, 1.0]))
    assert tie.curvature == float("inf")


def test_labels_of_separate_groups():
    y, truth = points(60, 4, seed=2), (torch.arange(60) % 3).tolist()
    for objective in (KMeans(3), Spectral(3), ConvexClustering(penalty=0.1, tolerance=1e-9)):
        labels = objective.solve(y).labels.tolist()
        assert len(set(zip(labels, truth, strict=True))) == 3
    same = torch.ones(5, 2, dtype=torch.float64)
    assert float(ConvexClustering()(same)) == float(ConvexClustering()(torch.ones(1, 3))) == 0
    assert torch.equal(ConvexClustering(penalty=0.0).solve(y).centroids, y)


def test_proved_steps_on_the_majoriser_descend():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(), points()
    for objective in (KMeans(3), ConvexClustering(penalty=0.1, tolerance=1e-10)):
        values = []
        for _ in range(4):
            outputs = model(x).detach()
            values.append(float(objective(outputs)))
            square = objective.majoriser(outputs)
            sf.CertifiedDescent(model, square.bound_to(None)).step(x, square.targets)
        assert all(after < before for before, after in itertools.pairwise(values))
    certificate = sf.certify(model, x, objective=objective.majoriser(model(x)), domain=sf.Ball(0.01))
    assert certificate.smoothness.is_finite
    with pytest.raises(ObjectiveError, match="majoriser"):
        sf.certify(model, x, objective=objective, domain=sf.Ball(0.01))


def test_warm_starts_and_bound_neighbours():
    y = points(80, 3, seed=9)
    objective = ConvexClustering(penalty=0.02, tolerance=1e-5)
    objective.solve(y)
    warm, fresh = objective.solve(y + 1e-4), ConvexClustering(penalty=0.02, tolerance=1e-5).solve(y + 1e-4)
    assert warm.iterations <= fresh.iterations
    assert abs(warm.value - fresh.value) <= max(warm.gap, fresh.gap)
    held, again = KMeans(4, restarts=3, warm_start=True), KMeans(4, restarts=30)
    assert float(held(points(seed=6))) >= 0
    assert float(held(y)) >= float(again(y)) - 1e-12
    by_neighbours = ConvexClustering("knn", neighbours=4)
    with pytest.raises(ObjectiveError, match="bind"):
        by_neighbours.constants((80, 3))
    assert by_neighbours.bind(y).constants((80, 3)).lipschitz.is_finite
    edges = nearest_neighbours(y, 3, bandwidth=2.0)
    distance = torch.cdist(y, y).fill_diagonal_(torch.inf)
    wanted = {tuple(sorted((i, int(j)))) for i in range(80) for j in distance.argsort(dim=1)[i, :3]}
    assert set(zip(edges.first.tolist(), edges.second.tolist(), strict=True)) == wanted


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ConvexClustering("nearest"), "weights are None"),
        (lambda: ConvexClustering(penalty=-1.0), "penalty"),
        (lambda: ConvexClustering(tolerance=0.0), "tolerance"),
        (lambda: ConvexClustering(reduction="none"), "reduction"),
        (lambda: ConvexClustering(max_iterations=0), "max_iterations"),
        (lambda: ConvexClustering("knn", neighbours=0), "neighbours"),
        (lambda: ConvexClustering(torch.tensor([[0.0, 1.0], [2.0, 0.0]])), "symmetric"),
        (lambda: ConvexClustering(-torch.ones(3, 3)), "≥ 0"),
        (lambda: explicit([[0, 1]], [float("nan")]), "≥ 0"),
        (lambda: explicit([[0, 1]], [1.0, 2.0]), "one weight per edge"),
        (lambda: explicit([[0, 5]], count=3), "out of range"),
        (lambda: explicit([[1, 1]]), "itself"),
        (lambda: explicit([[0.0, 1.0]]), "whole numbers"),
        (lambda: all_pairs(10_000), "neighbours"),
        (lambda: nearest_neighbours(points(5), 5), "more than 5"),
        (lambda: nearest_neighbours(points() * torch.nan, 2), "not finite"),
        (lambda: nearest_neighbours(points(), 2, bandwidth=0.0), "bandwidth"),
        (lambda: ConvexClustering().bind(points()), "fixed"),
        (lambda: ConvexClustering()(points() * torch.inf), "not finite"),
        (lambda: ConvexClustering()(points() * 1e200), "too large"),
        (lambda: ConvexClustering(all_pairs(5))(points()), "for 5 samples"),
        (lambda: Spectral(0), "at least 1"),
        (lambda: KMeans(1.5), "whole number"),
        (lambda: Spectral(10)(points(9, 4)), "at least 10 samples, got 9"),
        (lambda: Spectral(2)(torch.ones(3)), "samples × dimensions"),
        (lambda: KMeans(2)(points(), points()), "no targets"),
        (lambda: KMeans(2).hessian_vector_product(points(), points()), "kinks"),
    ],
)
def test_what_does_not_fit_is_refused(make, word):
    with pytest.raises(ObjectiveError, match=word):
        make()
