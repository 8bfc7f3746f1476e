"""Convex clustering against an interior-point solver, and what its gap proves."""

from __future__ import annotations

import copy
import pickle
import warnings

import cvxpy
import numpy as np
import pytest
import torch

import surefoot as sf
from surefoot.clustering import (
    ConvexClustering,
    Edges,
    all_pairs,
    explicit,
    matrix,
    nearest_neighbours,
    reduced,
)
from surefoot.clustering.convex import slope
from surefoot.clustering.weights import Incidence, components
from surefoot.objectives import ObjectiveError

SOLVER = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}


def points(n: int = 12, d: int = 3, groups: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(groups, d, generator=generator, dtype=torch.float64)
    return centres[torch.arange(n) % groups] + 0.5 * torch.randn(n, d, generator=generator, dtype=torch.float64)


def judged(y: torch.Tensor, edges: Edges, penalty: float) -> tuple[float, np.ndarray]:
    """The minimum and the minimiser by cvxpy and Clarabel."""
    z = cvxpy.Variable(tuple(y.shape))
    first, second = edges.first.numpy(), edges.second.numpy()
    pull = cvxpy.norm(z[first] - z[second], axis=1) @ (penalty * edges.weights.numpy())
    problem = cvxpy.Problem(cvxpy.Minimize(0.5 * cvxpy.sum_squares(z - y.numpy()) + pull))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an accuracy that was asked for and not quite reached
        problem.solve(solver=cvxpy.CLARABEL, **SOLVER)
    return float(problem.value), z.value


def graphs(y: torch.Tensor) -> dict[str, Edges]:
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(len(y), len(y), generator=generator, dtype=torch.float64)
    weights = torch.triu(weights * (weights > 0.6), 1)
    chain = torch.stack([torch.arange(len(y) - 1), torch.arange(1, len(y))], dim=1)
    return {
        "all pairs": all_pairs(len(y)),
        "neighbours": nearest_neighbours(y, 3),
        "matrix": matrix(weights + weights.mT),
        "chain": explicit(chain, torch.linspace(0.1, 2, len(y) - 1)),
    }


@pytest.mark.parametrize("penalty", [0.01, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("kind", ["all pairs", "neighbours", "matrix", "chain"])
def test_it_agrees_with_an_interior_point_method(kind, penalty):
    y = points()
    edges = graphs(y)[kind]
    value, z = judged(y, edges, penalty)
    objective = ConvexClustering(edges, penalty=penalty, reduction="sum", tolerance=1e-12)
    found = objective.solve(y)
    assert found.converged
    assert found.gap <= 1e-12 * found.value
    assert float(objective(y)) == pytest.approx(value, rel=1e-9)
    assert np.abs(found.centroids.numpy() - z).max() < 1e-5
    assert found.value == pytest.approx(float(objective(y)), rel=1e-12)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("penalty", [0.05, 0.2, 1.0])
def test_a_gap_is_honest(tolerance, penalty):
    y = points(20, 2, seed=3)
    edges = all_pairs(20)
    exact = ConvexClustering(edges, penalty=penalty, tolerance=1e-13).solve(y)
    rough = ConvexClustering(edges, penalty=penalty, tolerance=tolerance).solve(y)
    assert exact.gap <= 1e-12 * exact.value
    assert -1e-12 * exact.value <= rough.value - exact.value <= rough.gap + exact.gap
    assert float((rough.centroids - exact.centroids).norm()) <= rough.gradient_error + exact.gradient_error
    assert bool((rough.dual.norm(dim=1) <= penalty * edges.weights * (1 + 1e-12)).all())


@pytest.mark.parametrize("scale", [1e-100, 1e-15, 1e-8, 1e-3, 1e3, 1e8])
def test_any_scale(scale):
    y = points(9, 3)
    found = ConvexClustering(penalty=5.0, tolerance=1e-12).solve(scale * y)
    assert found.converged
    assert found.gap <= 1e-12 * found.value
    if scale <= 1e-3:  # all fused
        half = 0.5 * float((y - y.mean(dim=0)).square().sum())
        assert found.value == pytest.approx(half * scale**2, rel=1e-10)


def test_what_stops_early_says_so():
    y = points(40, 3, seed=1)
    objective = ConvexClustering(penalty=0.01, tolerance=1e-13, max_iterations=2)
    with pytest.warns(UserWarning, match="above the tolerance"):
        rough = objective.solve(y)
    exact = ConvexClustering(penalty=0.01, tolerance=1e-13).solve(y)
    assert not rough.converged
    assert rough.value - exact.value <= rough.gap
    assert float((rough.centroids - exact.centroids).norm()) <= rough.gradient_error + exact.gradient_error


def test_far_from_zero_and_in_single_precision():
    y = points()
    near = ConvexClustering(penalty=0.1, tolerance=1e-8).solve(y)
    far = ConvexClustering(penalty=0.1, tolerance=1e-8).solve(y + 1e6)
    assert torch.allclose(near.centroids, far.centroids - 1e6, atol=1e-7)
    single = y.float().requires_grad_()
    loss = ConvexClustering(penalty=0.1)(single)
    loss.backward()
    assert loss.dtype == single.grad.dtype == torch.float32
    assert single.grad.numpy() == pytest.approx(((y - near.centroids) / len(y)).numpy(), abs=1e-3)


def test_clusters_are_found():
    y = points(60, 4, groups=3, seed=2)
    found = ConvexClustering(penalty=0.1, tolerance=1e-9).solve(y)
    truth = torch.arange(60) % 3
    assert len(set(zip(found.labels.tolist(), truth.tolist(), strict=True))) == 3 == int(found.labels.max()) + 1
    assert "3 clusters" in found.status
    for k in range(3):
        assert float(found.centroids[truth == k].std(dim=0).max()) < 1e-8


@pytest.mark.parametrize(("kind", "penalty"), [("all pairs", 0.05), ("neighbours", 0.4), ("chain", 0.7)])
def test_derivatives_by_differences(kind, penalty):
    y = points()
    objective = ConvexClustering(graphs(y)[kind], penalty=penalty, tolerance=1e-12)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        v = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        v /= v.norm()
        h = 1e-4
        slope_found = float((objective.gradient(y) * v).sum())
        assert slope_found == pytest.approx(float(objective(y + h * v) - objective(y - h * v)) / (2 * h), abs=1e-7)
        curved = objective.hessian_vector_product(y, v)
        difference = (objective.gradient(y + h * v) - objective.gradient(y - h * v)) / (2 * h)
        assert float((curved - difference).norm()) < 1e-6 * float(curved.norm())
    w = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    left, right = (objective.hessian_vector_product(y, a) * b for a, b in ((v, w), (w, v)))
    assert float(left.sum()) == pytest.approx(float(right.sum()), rel=1e-9)


@pytest.mark.parametrize("kind", ["all pairs", "neighbours"])
def test_several_directions_share_their_products_and_agree_with_a_dense_solve(kind, monkeypatch):
    y = points()
    objective = ConvexClustering(graphs(y)[kind], penalty=0.05, reduction="sum", tolerance=1e-12)
    directions = torch.randn(7, *y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    products = []
    counted = reduced.conjugate

    def counting(*arguments):
        found = counted(*arguments)
        products.append(found[1])
        return found

    monkeypatch.setattr(reduced, "conjugate", counting)
    objective.gradient(y)  # which solves, and is kept
    del products[:]
    single = torch.stack([objective.hessian_vector_product(y, v) for v in directions])
    longest = max(products)
    del products[:]
    _, pull = torch.func.vjp(torch.func.grad(objective), y)
    together = torch.vmap(pull)(directions)[0]
    assert torch.allclose(together, single, rtol=1e-10, atol=1e-12)
    assert len(products) == 1
    assert products[0] <= longest + 2
    found, edges = objective.solve(y), graphs(y)[kind]
    places, sizes = found.labels, torch.bincount(found.labels).double()
    across = places[edges.first] != places[edges.second]

    def smooth(centres):  # the objective with the clusters known, written out
        gaps = (centres[places[edges.first]] - centres[places[edges.second]])[across]
        pull = 0.05 * (edges.weights[across] * gaps.norm(dim=1)).sum()
        return 0.5 * (sizes[:, None] * centres.square()).sum() + pull

    copies = torch.nn.functional.one_hot(places).double()
    centres = copies.T @ found.centroids / sizes[:, None]
    dense = torch.func.hessian(smooth)(centres).reshape(centres.numel(), -1)
    summed = (copies.T @ directions).reshape(7, -1)
    moved = copies @ torch.linalg.solve(dense, summed.T).T.reshape(7, *centres.shape)
    assert torch.allclose(together, directions - moved, atol=1e-9)


def test_a_finished_solution_is_exact_up_to_round_off():
    y = points()
    found = ConvexClustering(penalty=0.02, reduction="sum", tolerance=1e-12).solve(y)
    assert "Newton" in found.status
    assert found.gradient_error <= 1e-12 * float(y.norm())
    edges = all_pairs(12)
    for e, (i, j) in enumerate(zip(edges.first, edges.second, strict=True)):  # the conditions of optimality
        gap = found.centroids[i] - found.centroids[j]
        if bool(gap.any()):
            assert torch.allclose(found.dual[e], 0.02 * gap / gap.norm(), atol=1e-12)
        assert float(found.dual[e].norm()) <= 0.02 * (1 + 1e-12)
    assert torch.allclose(edges.incidence.sums(found.dual), y - found.centroids, atol=1e-11)


def test_fused_clusters_have_the_derivative_of_a_mean():
    y = points(8, 2, groups=1)
    objective = ConvexClustering(penalty=50.0, reduction="sum", tolerance=1e-12)
    v = torch.randn(8, 2, dtype=torch.float64)
    assert torch.allclose(objective.gradient(y), y - y.mean(dim=0), atol=1e-8)
    assert torch.allclose(objective.hessian_vector_product(y, v), v - v.mean(dim=0), atol=1e-10)


def test_the_steepest_slope_of_all_pairs_is_that_of_the_errata():
    for n in (2, 3, 5, 30):
        bound = float(ConvexClustering(reduction="sum").constants((n, 4)).lipschitz)
        assert bound == pytest.approx(n * np.sqrt((n - 1) / 2), rel=1e-12)
        assert bound == pytest.approx(float(slope(all_pairs(n))), rel=1e-9)
    far = 1e6 * torch.arange(2.0, dtype=torch.float64)[:, None]
    objective = ConvexClustering(reduction="sum")
    assert float(objective.gradient(far).norm()) == pytest.approx(
        float(objective.constants(far).lipschitz), rel=1e-9
    )


@pytest.mark.parametrize("kind", ["all pairs", "neighbours", "matrix", "chain"])
@pytest.mark.parametrize("penalty", [0.3, 2.0])
def test_no_gradient_is_longer_than_the_constant(kind, penalty):
    y = points(15, 2, seed=7)
    edges = graphs(y)[kind]
    objective = ConvexClustering(edges, penalty=penalty, reduction="sum")
    bound = float(objective.constants(y).lipschitz)
    generator = torch.Generator().manual_seed(8)
    worst = 0.0
    for dim in (1, 2, 5):
        direction = torch.randn(15, dim, generator=generator, dtype=torch.float64)
        for _ in range(15):  # the longest gradient is reached far away: at c·sign of the differences
            gaps = edges.incidence.differences(direction)
            pull = penalty * edges.weights[:, None] * gaps / gaps.norm(dim=1, keepdim=True)
            direction = edges.incidence.sums(pull)
            worst = max(worst, float(direction.norm()))
        worst = max(worst, float(objective.gradient(1e4 * direction).norm()))
    assert worst <= bound * (1 + 1e-12)
    assert worst >= 0.4 * bound


def test_gradients_are_monotone_and_do_not_expand():
    objective = ConvexClustering(penalty=0.2, tolerance=1e-12)
    scale = float(objective.constants((12, 3)).smoothness)
    assert scale == pytest.approx(1 / 12, rel=1e-12)
    for seed in range(6):
        x, y = points(seed=seed), points(seed=seed) + 10.0 ** (-seed / 2) * points(seed=seed + 50)
        change = objective.gradient(x) - objective.gradient(y)
        assert float(change.norm()) <= scale * float((x - y).norm()) * (1 + 1e-6)
        inner = float((change * (x - y)).sum())
        assert inner >= float(change.square().sum()) / scale * (1 - 1e-6) - 1e-12


def test_the_table_of_the_paper():
    printed = ConvexClustering(reduction="sum").constants((2, 3), table="paper")
    assert (float(printed.lipschitz), float(printed.smoothness)) == pytest.approx((1.0, 1.0))
    assert any("ERRATA 8" in flag for flag in printed.flags)
    mean = ConvexClustering().constants((5, 3), table="paper")
    assert float(mean.lipschitz) == pytest.approx(2.0)
    assert not mean.flags
    with pytest.raises(ObjectiveError, match="paper"):
        ConvexClustering(penalty=2.0).constants((5, 3), table="paper")


def test_warm_starts_change_the_work_and_not_the_value():
    y = points(80, 3, seed=9)
    objective = ConvexClustering(penalty=0.02, tolerance=1e-5)
    cold = objective.solve(y)
    near = y + 1e-4
    near[0] += 1e-3
    warm = objective.solve(near)
    fresh = ConvexClustering(penalty=0.02, tolerance=1e-5).solve(near)
    assert warm.iterations < max(fresh.iterations, 1) <= cold.iterations + 50
    assert abs(warm.value - fresh.value) <= max(warm.gap, fresh.gap)


def test_neighbours_are_kept_until_forgotten():
    y = points(30)
    objective = ConvexClustering("knn", neighbours=4)
    with pytest.raises(ObjectiveError, match="bind"):
        objective.constants(y)
    objective(y)
    edges = objective.proximity.edges
    objective(y.flip(0))
    assert objective.proximity.edges is edges
    objective.bind(y.flip(0))
    assert objective.proximity.edges is not edges
    objective.forget()
    assert objective.proximity.edges is None
    restored = pickle.loads(pickle.dumps(copy.deepcopy(objective)))
    assert float(restored(y)) == float(objective(y))


def test_neighbours_are_the_nearest():
    y = points(25)
    edges = nearest_neighbours(y, 3, bandwidth=2.0)
    distance = torch.cdist(y, y).fill_diagonal_(torch.inf)
    nearest = distance.argsort(dim=1)[:, :3]
    wanted = {tuple(sorted((i, int(j)))) for i in range(25) for j in nearest[i]}
    assert set(zip(edges.first.tolist(), edges.second.tolist(), strict=True)) == wanted
    lengths = distance[edges.first, edges.second]
    assert torch.allclose(edges.weights, torch.exp(-lengths.square() / 8), rtol=1e-9)


def test_equal_points_one_point_and_no_pull():
    same = torch.ones(5, 2, dtype=torch.float64)
    assert float(ConvexClustering()(same)) == 0
    assert int(ConvexClustering().solve(same).labels.max()) == 0
    assert float(ConvexClustering()(torch.ones(1, 3))) == 0
    used = ConvexClustering()
    used(points(5, 2))
    assert float(used(same)) == float(used(0 * same)) == 0
    nearly = ConvexClustering().solve(same + 1e-16 * points(5, 2))
    assert nearly.converged
    free = ConvexClustering(penalty=0.0).solve(points())
    assert torch.equal(free.centroids, points())
    assert free.labels.tolist() == list(range(12))
    assert nearest_neighbours(same, 2).weights.tolist() == [1.0] * len(nearest_neighbours(same, 2))


def test_incidence_without_sparse_products():
    edges = all_pairs(6)
    z = torch.randn(len(edges), 3, dtype=torch.float64)
    plain = Incidence(edges.first, edges.second, 6)
    fast = plain.sums(z)
    plain._transpose = None
    assert torch.allclose(plain.sums(z), fast, rtol=1e-14, atol=1e-14)
    x = torch.randn(6, 3, dtype=torch.float64)
    assert float((plain.differences(x) * z).sum()) == pytest.approx(float((x * fast).sum()), rel=1e-12)


def test_components_are_those_of_scipy():
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    generator = torch.Generator().manual_seed(0)
    for edges in (0, 20, 60, 400):
        first, second = torch.randint(0, 100, (2, edges), generator=generator)
        found = components(first, second, 100)
        graph = coo_matrix((np.ones(edges), (first.numpy(), second.numpy())), shape=(100, 100))
        count, labels = connected_components(graph, directed=False)
        assert int(found.max()) + 1 == count
        assert len(set(zip(found.tolist(), labels.tolist(), strict=True))) == count
    path = torch.randperm(1000, generator=generator)
    assert int(components(path[:-1], path[1:], 1000).max()) == 0


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ConvexClustering("nearest"), "weights are None"),
        (lambda: ConvexClustering(penalty=-1.0), "penalty"),
        (lambda: ConvexClustering(penalty=float("nan")), "penalty"),
        (lambda: ConvexClustering(tolerance=0.0), "tolerance"),
        (lambda: ConvexClustering(reduction="none"), "reduction"),
        (lambda: ConvexClustering(max_iterations=0), "max_iterations"),
        (lambda: ConvexClustering("knn", neighbours=0), "neighbours"),
        (lambda: ConvexClustering(torch.tensor([[0.0, 1.0], [2.0, 0.0]])), "symmetric"),
        (lambda: ConvexClustering(-torch.ones(3, 3)), "≥ 0"),
        (lambda: explicit([[0, 1]], [-1.0]), "≥ 0"),
        (lambda: explicit([[0, 1]], [float("nan")]), "≥ 0"),
        (lambda: explicit([[0, 1]], [1.0, 2.0]), "one weight per edge"),
        (lambda: explicit([[0, 5]], count=3), "out of range"),
        (lambda: explicit([[0, -1]]), "out of range"),
        (lambda: explicit([[1, 1]]), "itself"),
        (lambda: explicit([0, 1]), "pairs"),
        (lambda: explicit([[0.0, 1.0]]), "whole numbers"),
        (lambda: all_pairs(10_000), "neighbours"),
        (lambda: nearest_neighbours(points(5), 5), "more than 5"),
        (lambda: nearest_neighbours(points() * torch.nan, 2), "not finite"),
        (lambda: nearest_neighbours(points(), 2, bandwidth=0.0), "bandwidth"),
        (lambda: ConvexClustering().bind(points()), "given"),
        (lambda: ConvexClustering()(points() * torch.inf), "not finite"),
        (lambda: ConvexClustering()(points() * 1e200), "too large"),
        (lambda: ConvexClustering()(torch.ones(4)), "samples × dimensions"),
        (lambda: ConvexClustering(all_pairs(5))(points()), "for 5 samples"),
    ],
)
def test_what_does_not_fit_is_refused(make, word):
    with pytest.raises(ObjectiveError, match=word):
        make()


@pytest.mark.parametrize("weights", [None, "knn"])
@pytest.mark.parametrize("penalty", [1e-3, 0.5, 5.0])
def test_it_is_convex_whatever_the_round_off(weights, penalty):
    """Outputs that move together do not change it: that curvature is zero, and round-off has either sign."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2).double(), torch.randn(15, 3).double()
    loss = ConvexClustering(weights, penalty=penalty, neighbours=4)
    assert loss.convex
    chain = sf.Chain(model, x)
    with pytest.raises(sf.oracles.OracleError, match="not a sum over the rows"):
        sf.oracles.gauss_newton(chain, loss, method="dual")
    assert sf.oracles.gauss_newton(chain, loss, method="dynamic").solved
