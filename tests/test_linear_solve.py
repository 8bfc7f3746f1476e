"""Conjugate gradients against a dense solve: vectors of every kind, preconditioners, negative curvature."""

from __future__ import annotations

import pytest
import torch

from surefoot.linear_solve import (
    Columns,
    Conjugate,
    Flat,
    InPlace,
    Parts,
    Products,
    Rows,
    conjugate_gradients,
    inner,
    norm,
)

F64 = torch.float64


def positive(size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, dtype=F64, generator=generator))
    return basis @ torch.diag(torch.logspace(0, spread, size, dtype=F64)) @ basis.T


def right(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(7))


def test_a_flat_tensor_of_any_shape() -> None:
    matrix, b = positive(12), right(3, 4)
    found = conjugate_gradients(
        lambda v: (matrix @ v.reshape(-1)).reshape(3, 4), b, space=Flat(), tolerance=1e-13, most=200
    )
    assert found.solved
    assert found.residual <= 1e-13
    assert torch.allclose(found.x.reshape(-1), torch.linalg.solve(matrix, b.reshape(-1)), rtol=1e-9)


def test_parts_are_one_vector() -> None:
    matrix, b = positive(12), right(12)

    def multiply(parts):
        return list((matrix @ torch.cat([part.reshape(-1) for part in parts])).split([5, 7]))

    found = conjugate_gradients(multiply, list(b.split([5, 7])), space=Parts(), tolerance=1e-13, most=200)
    assert torch.allclose(torch.cat(found.x), torch.linalg.solve(matrix, b), rtol=1e-9)


def test_rows_are_systems_of_their_own() -> None:
    matrices = torch.stack([positive(6, seed=k, spread=k) for k in range(4)])
    b = right(4, 6)
    b[2] = 0
    found = conjugate_gradients(
        lambda v: torch.einsum("kij,kj->ki", matrices, v), b, space=Rows(), tolerance=1e-13, most=100
    )
    assert found.solved
    assert torch.allclose(found.x, torch.linalg.solve(matrices, b), rtol=1e-9)
    assert not found.x[2].any()


def test_a_preconditioner_saves_iterations() -> None:
    scale = torch.logspace(0, 6, 40, dtype=F64)
    near = positive(40, spread=0.3)
    matrix, b = scale.sqrt()[:, None] * near * scale.sqrt(), right(40)
    plain = conjugate_gradients(lambda v: matrix @ v, b, space=Flat(), tolerance=1e-10, most=500)
    helped = conjugate_gradients(
        lambda v: matrix @ v, b, space=Flat(), tolerance=1e-10, most=500, precondition=lambda r: r / scale
    )
    assert helped.solved
    assert helped.iterations < 20 < plain.iterations
    assert torch.allclose(helped.x, torch.linalg.solve(matrix, b), rtol=1e-7)


def test_the_solution_is_met_after_as_many_iterations_as_there_are_eigenvalues() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1.0, 2.0, 2.0, 5.0], dtype=F64))
    found = conjugate_gradients(lambda v: matrix @ v, right(5), space=Flat(), tolerance=1e-12, most=50)
    assert found.iterations == 3


@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_a_direction_without_positive_curvature_is_returned(value: float) -> None:
    matrix = torch.diag(torch.tensor([value, 1.0], dtype=F64))
    found = conjugate_gradients(
        lambda v: matrix @ v, torch.tensor([1.0, 0.0], dtype=F64), space=Flat(), tolerance=1e-12, most=50
    )
    assert not found.solved
    assert found.finite
    assert found.curvature <= 0
    assert float(found.direction @ matrix @ found.direction) == found.curvature
    rows = conjugate_gradients(
        lambda v: v * torch.tensor([[1.0], [value]], dtype=F64), right(2, 3), space=Rows(), tolerance=1e-12, most=9
    )
    assert (rows.curvature > 0).tolist() == [True, False]


def test_what_is_not_finite_is_not_solved() -> None:
    for b, factor in ((torch.tensor([1.0, float("nan")]), 1.0), (torch.ones(2), float("nan"))):
        found = conjugate_gradients(lambda v: factor * v, b, space=Flat(), tolerance=1e-6, most=9)  # noqa: B023
        assert not found.solved
        assert not found.finite


def test_the_limit_of_iterations_and_zero() -> None:
    matrix = positive(30)
    found = conjugate_gradients(lambda v: matrix @ v, right(30), space=Flat(), tolerance=1e-14, most=3)
    assert (found.iterations, found.solved, found.direction) == (3, False, None)
    zero = conjugate_gradients(
        lambda v: matrix @ v, torch.zeros(30, dtype=F64), space=Flat(), tolerance=1e-14, most=3
    )
    assert zero.solved
    assert not zero.x.any()


def test_one_iteration_at_a_time() -> None:
    """Directions are conjugate, and the curvature of the residual follows from theirs."""
    matrix, b = positive(8), right(8)
    run = Conjugate(Products(lambda v: matrix @ v, Flat()), torch.zeros_like(b), b, Flat())
    directions = []
    for _ in range(5):
        curvature = run.look()
        assert curvature == run.look()
        known = curvature + run.beta**2 * run.before
        assert float(run.residual @ matrix @ run.residual) == pytest.approx(known, rel=1e-8)
        directions.append(run.direction)
        run.step()
    stacked = torch.stack(directions)
    products = stacked @ matrix @ stacked.T
    assert float((products - torch.diag(products.diag())).abs().max()) < 1e-8 * float(products.diag().max())
    assert torch.allclose(run.residual, b - matrix @ run.x)


def test_several_right_hand_sides_share_each_product() -> None:
    matrix, calls = positive(12), []
    b = torch.stack([right(12), torch.zeros(12).double(), 1e-3 * matrix @ right(12)], dim=1)[..., None]

    def multiply(v):
        calls.append(v.shape)
        return torch.tensordot(matrix, v, dims=1)

    found = conjugate_gradients(multiply, b, space=Columns(), tolerance=1e-13, most=60)
    assert found.solved
    assert torch.allclose(found.x[..., 0], torch.linalg.solve(matrix, b[..., 0]), rtol=1e-9, atol=1e-12)
    assert not bool(found.x[:, 1].any())
    alone = [
        conjugate_gradients(lambda v: matrix @ v, one, space=Flat(), tolerance=1e-13, most=60).iterations
        for one in b[..., 0].unbind(1)
    ]
    assert len(calls) <= max(alone) + 2 < sum(alone)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_vectors_that_are_written_over_give_the_same_points(preconditioned: bool) -> None:
    matrix, b = positive(30, spread=1.0), right(30)
    inverse = (lambda r: r / matrix.diagonal()) if preconditioned else None

    class Owned(Products):
        def residual(self, before, direction, length):
            return super().residual(before.clone() if before is direction else before, direction, length)

    plain = Conjugate(Products(lambda v: matrix @ v, Flat()), torch.zeros_like(b), b.clone(), Flat(), inverse)
    over = Conjugate(Owned(lambda v: matrix @ v, InPlace()), torch.zeros_like(b), b.clone(), InPlace(), inverse)
    held = over.x.data_ptr()
    for _ in range(20):
        plain.step()
        over.step()
        assert torch.allclose(over.x, plain.x, rtol=1e-12)
        assert torch.allclose(over.residual, plain.residual, rtol=1e-8, atol=1e-12)
    assert over.x.data_ptr() == held


def test_sums_of_long_vectors_in_single_precision_are_accurate() -> None:
    vector = torch.full((10_000_001,), 0.1)
    expected = float(vector.double().square().sum())
    assert abs(float(torch.dot(vector, vector)) / expected - 1) > 1e-3  # what a plain sum would be
    assert abs(inner(vector, vector) / expected - 1) < 1e-4
    assert abs(norm(vector) / expected**0.5 - 1) < 1e-4
    square = vector[:-1].view(100, -1)
    assert abs(inner(square, 2 * square) / (2 * expected) - 1) < 1e-4


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1.0, 1e22, 1e37])
def test_norms_of_numbers_whose_squares_leave_single_precision(size: float) -> None:
    vector = torch.full((100_000,), size)
    assert abs(norm(vector) / float(vector.double().norm()) - 1) < 1e-4
    assert norm(torch.zeros(3)) == 0
