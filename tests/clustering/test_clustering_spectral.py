"""Spectral clustering against numpy's singular values, with its second derivative and its ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surefoot.clustering import KMeans, Spectral
from surefoot.objectives import ObjectiveError

SHAPES = [(9, 4), (4, 9), (6, 6)]


def matrix(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_values(shape: tuple[int, int], values: list[float], seed: int = 0) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(matrix(shape, seed), full_matrices=False)
    return (u * torch.tensor(values, dtype=torch.float64)) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_it_is_the_sum_of_the_small_singular_values_squared(shape, k):
    y = matrix(shape)
    tail = np.linalg.svd(y.numpy(), compute_uv=False)[k:]
    assert float(Spectral(k)(y)) == pytest.approx((tail**2).sum() / (2 * shape[0]), rel=1e-10, abs=1e-28)
    assert 2 * float(Spectral(k, reduction="sum")(y)) == pytest.approx((tail**2).sum(), rel=1e-10, abs=1e-28)


def test_small_singular_values_are_accurate():
    y = with_values((8, 3), [1e6, 1.0, 1e-3])
    assert float(Spectral(2, reduction="sum")(y)) == pytest.approx(0.5e-6, rel=1e-5)


def test_it_is_at_most_k_means():
    for seed in range(5):
        y = matrix((30, 5), seed)
        assert float(Spectral(3)(y)) <= float(KMeans(3)(y)) * (1 + 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_derivatives_by_differences(shape, k):
    y, objective, h = matrix(shape, 1), Spectral(k), 1e-5
    for seed in (2, 3):
        v = matrix(shape, seed)
        difference = float(objective(y + h * v) - objective(y - h * v)) / (2 * h)
        assert float((objective.gradient(y) * v).sum()) == pytest.approx(difference, abs=1e-8)
        curved = (objective.gradient(y + h * v) - objective.gradient(y - h * v)) / (2 * h)
        assert torch.allclose(objective.hessian_vector_product(y, v), curved, atol=1e-7)


def hessian(objective: Spectral, y: torch.Tensor) -> torch.Tensor:
    units = torch.eye(y.numel(), dtype=torch.float64).reshape(-1, *y.shape)
    return torch.stack([objective.hessian_vector_product(y, unit).flatten() for unit in units])


@pytest.mark.parametrize("values", [[3.0, 2.0, 1.0], [3.0, 2.0, 1.9], [5.0, 1.0, 0.99], [2.0, 2.0, 0.5]])
def test_the_norm_of_the_hessian_is_the_one_that_is_claimed(values):
    y = with_values((5, 3), values)
    found = hessian(Spectral(2, reduction="sum"), y)
    assert torch.allclose(found, found.mT, atol=1e-9)
    claimed = max(1.0, values[2] / (values[1] - values[2]))
    assert float(torch.linalg.matrix_norm(found, 2)) == pytest.approx(claimed, rel=1e-8)


def test_equal_values_on_one_side_of_the_cut_do_no_harm():
    y = with_values((6, 4), [3.0, 3.0, 1.0, 1.0])
    v = matrix((6, 4), 5)
    objective, h = Spectral(2), 1e-5
    curved = (objective.gradient(y + h * v) - objective.gradient(y - h * v)) / (2 * h)
    assert torch.allclose(objective.hessian_vector_product(y, v), curved, atol=1e-7)
    assert not objective.solve(y).tie


def test_a_tie_is_detected_and_its_gradient_is_finite():
    y = with_values((6, 4), [3.0, 2.0, 2.0, 1.0])
    objective = Spectral(2, reduction="sum")
    found = objective.solve(y)
    assert found.tie
    assert "one choice of several" in found.status
    slope = objective.gradient(y)
    assert float(slope.norm()) == pytest.approx(5**0.5, rel=1e-12)  # every Clarke extreme point has this norm
    assert bool(torch.isfinite(objective.hessian_vector_product(y, matrix((6, 4), 1))).all())


@pytest.mark.parametrize("seed", range(3))
def test_the_descent_lemma_holds_across_kinks(seed):
    y, objective = with_values((6, 4), [3.0, 2.0, 2.0, 1.0], seed), Spectral(2)
    value, slope = float(objective(y)), objective.gradient(y)
    majoriser = objective.majoriser(y)
    for size in (0.01, 1.0, 10.0):
        v = size * matrix((6, 4), seed + 10)
        above = value + float((slope * v).sum()) + float(v.square().sum()) / 12
        assert float(objective(y + v)) <= above * (1 + 1e-12)
        assert float(majoriser(y + v)) == pytest.approx(above, rel=1e-10)


def test_labels_of_separate_groups():
    truth = torch.arange(30) % 3
    y = 5 * torch.eye(3, dtype=torch.float64)[truth] + 0.1 * matrix((30, 3), 4)
    found = Spectral(3).solve(y)
    assert len(set(zip(found.labels.tolist(), truth.tolist(), strict=True))) == 3
    assert torch.allclose(found.vectors.mT @ found.vectors, torch.eye(3, dtype=torch.float64), atol=1e-12)


def test_the_error_of_singular_values_is_a_bound():
    for shape in SHAPES:
        y = matrix(shape, 6)
        parts = Spectral(2).proximity.solved(y).result
        exact = torch.linalg.svdvals(y)
        assert float((parts.values - exact).abs().max()) <= parts.error <= 1e-12


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Spectral(0), "at least 1"),
        (lambda: Spectral(1.5), "whole number"),
        (lambda: Spectral(10)(matrix((9, 4))), "at least 10 samples, got 9"),
        (lambda: Spectral(2)(torch.ones(3)), "samples × dimensions"),
        (lambda: Spectral(2)(torch.full((3, 3), torch.nan)), "not finite"),
    ],
)
def test_what_does_not_fit_is_refused(make, word):
    with pytest.raises(ObjectiveError, match=word):
        make()
