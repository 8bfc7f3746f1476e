"""Linear algebra with a proof, against exact arithmetic."""

from __future__ import annotations

import math

import flint
import pytest
import torch
from flint import arb, arb_mat

from surefoot.norms import verified
from surefoot.norms.blocked import Factor, Symmetric
from surefoot.norms.verified import largest_eigenvalue, least_solution, product, smallest_eigenvalue
from surefoot.scalar import Rounded


def matrix(size: int, spread: float, seed: int) -> torch.Tensor:
    """Symmetric, with eigenvalues from 1 down to the spread."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    values = torch.logspace(0, math.log10(spread), size, dtype=torch.float64)
    whole = basis @ torch.diag(values) @ basis.mT
    return (whole + whole.mT) / 2


def is_positive(a: torch.Tensor, shift: float) -> bool:
    """Whether A - shift I is positive definite, by its leading minors in 400 bits."""
    with flint.ctx.workprec(400):
        rows = [
            [arb(float(a[i, j])) - (arb(shift) if i == j else 0) for j in range(len(a))] for i in range(len(a))
        ]
        minors = [arb_mat([row[:k] for row in rows[:k]]).det() for k in range(1, len(a) + 1)]
        assert all(minor > 0 or minor < 0 for minor in minors)
        return all(minor > 0 for minor in minors)


@pytest.mark.parametrize("spread", [0.1, 1e-6, 1e-10])
@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_eigenvalue_is_not_above_the_exact_one(spread: float, seed: int) -> None:
    a = matrix(8, spread, seed)
    bound = smallest_eigenvalue(Rounded.exact(a))
    assert is_positive(a, bound)
    assert not is_positive(a, bound + 1e-6 * spread + 1e-13)
    top = largest_eigenvalue(Rounded.exact(a))
    assert is_positive(-a, -top * (1 + 1e-14))
    assert top < 1 + 1e-9


def test_errors_of_the_entries_count() -> None:
    a = matrix(6, 0.5, 0)
    off = Rounded(a, torch.full_like(a, 0.01))
    assert smallest_eigenvalue(off) <= smallest_eigenvalue(Rounded.exact(a)) - 0.06 * (1 - 1e-9)
    assert smallest_eigenvalue(Rounded(a, torch.full_like(a, math.inf))) == -math.inf


def test_an_indefinite_matrix_has_a_negative_bound() -> None:
    a = torch.diag(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    assert -2 - 1e-9 < smallest_eigenvalue(Rounded.exact(a)) <= -2


def test_a_product_contains_the_exact_one() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 5, dtype=torch.float64, generator=generator) * 10.0**k for k in (6, -6))
    found = product(Rounded(a, a.abs() * 1e-10), Rounded.exact(b))
    with flint.ctx.workprec(300):
        nudged = a * (1 + 1e-10 * (1 - 2.0**-20))
        for i in range(5):
            for j in range(5):
                exact = sum((arb(float(nudged[i, k])) * arb(float(b[k, j])) for k in range(5)), arb(0))
                assert abs(exact - arb(float(found.value[i, j]))) <= arb(float(found.error[i, j]))


@pytest.mark.parametrize("seed", range(3))
def test_the_least_solution_is_not_longer_than_its_bound(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    jacobian = torch.randn(6, 20, dtype=torch.float64, generator=generator)
    right = torch.randn(6, dtype=torch.float64, generator=generator)
    gram = product(Rounded.exact(jacobian), Rounded.exact(jacobian.mT))
    sigma = math.sqrt(smallest_eigenvalue(gram))
    bound = least_solution(Symmetric.dense(gram), right, 0.0, sigma)
    exact = float((torch.linalg.pinv(jacobian) @ right).norm())
    assert exact <= bound * (1 + 1e-13)
    assert bound <= exact * (1 + 1e-9)


@pytest.mark.parametrize("panel", [1, 3, 5, 64])
def test_by_panels_it_is_the_same_matrix(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvalues, products and the least solution, against exact arithmetic and the dense matrix."""
    a, wrong = matrix(8, 1e-4, 1), 1e-9
    exact = Rounded(a, torch.full_like(a, wrong))
    by_panels = Symmetric(8, lambda i, j: Rounded(a[i:j, :j], exact.error[i:j, :j]), panel)
    whole = Symmetric.dense(exact)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(8, dtype=torch.float64, generator=generator)
    product_of = by_panels.times(w)
    assert torch.allclose(product_of.value, a @ w, rtol=1e-12)
    assert bool((product_of.error >= wrong * w.abs().sum()).all())
    assert by_panels.size_and_error[1] >= 8 * wrong
    least = [least_solution(one, w, 0.0, 1e-2) for one in (by_panels, whole)]
    assert least[0] == pytest.approx(least[1], rel=1e-6)
    monkeypatch.setattr(verified, "_DENSE", 0)  # as if it were too large to be written out
    low, high = smallest_eigenvalue(by_panels), largest_eigenvalue(by_panels)
    nudge = torch.eye(8, dtype=torch.float64) * 8 * wrong
    assert is_positive(a - nudge, low)
    assert low > 0.9e-4 - 1e-7
    assert is_positive(-a - nudge, -high * (1 + 1e-14))
    assert high < 1.1


def test_a_factor_that_is_wrong_proves_nothing() -> None:
    a = matrix(6, 0.1, 0)
    whole = Symmetric(6, lambda i, j: Rounded.exact(a[i:j, :j]), 2)
    factor = whole.factor(0.05)
    assert factor is not None
    assert whole.apart(factor, 0.05) < 1e-13
    factor.rows[1][0, 1] += 1e-3
    exact = torch.zeros(6, 6, dtype=torch.float64)
    for k, row in enumerate(factor.rows):
        exact[2 * k : 2 * k + 2, : row.shape[1]] = row
    off = exact @ exact.mT - (a - 0.05 * torch.eye(6, dtype=torch.float64))
    assert float(torch.linalg.matrix_norm(off, 2)) <= whole.apart(factor, 0.05) <= 3 * float(off.norm())
    assert isinstance(factor, Factor)
    assert whole.factor(0.2) is None
