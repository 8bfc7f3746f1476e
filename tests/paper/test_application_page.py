"""The page on the paper's application is about code that exists, and what it says of the paper is true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paper_judges import normal, tensor_norm

from surefoot import paper
from surefoot.magnitude import Magnitude
from surefoot.paper.algorithm import VALUE_AT_ZERO_DROPPED
from surefoot.paper.chains import SWAPPED_RADII
from surefoot.paper.layers import CONVOLUTION_BIAS, OVERLAPPING_MAX_POOL, RESIDUAL_BOUND
from surefoot.paper.losses import TWO_CLUSTERED_POINTS

ROOT = Path(__file__).resolve().parents[2]


PAGE = (ROOT / "docs" / "application.md").read_text(encoding="utf-8")
ERRATA = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|", PAGE.partition("## Errata")[2], re.MULTILINE)


def test_files_that_the_page_names_exist():
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", PAGE)
    assert len(set(named)) >= 10
    roots = (ROOT, ROOT / "src" / "surefoot")
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []


@pytest.mark.parametrize(
    "flag",
    [
        CONVOLUTION_BIAS,
        VALUE_AT_ZERO_DROPPED,
        SWAPPED_RADII,
        TWO_CLUSTERED_POINTS,
        RESIDUAL_BOUND,
        OVERLAPPING_MAX_POOL,
    ],
)
def test_every_flag_points_to_a_row_that_says_so(flag):
    assert [int(number) for number, *_ in ERRATA] == list(range(1, 19))
    number = int(flag.removeprefix("ERRATA ").partition(":")[0])
    assert re.search("not a bound|no bounds", ERRATA[number - 1][2], re.IGNORECASE)


def test_matrix_product_needs_another_index_than_printed():
    n, d, p = 3, 2, 4
    a, b = normal(n, d, seed=0), normal(d, p, seed=1)
    vector = (a @ b).T.reshape(-1)  # columns one after the other

    def product(index) -> torch.Tensor:
        entries = []
        for q in range(1, n * p + 1):
            e, f = torch.eye(n).double()[index(q) - 1], torch.eye(p).double()[-(-q // n) - 1]
            left = torch.kron(torch.eye(d).double(), e[:, None])
            right = torch.kron(f[None, :], torch.eye(d).double())
            entries.append(a.T.reshape(-1) @ left @ right @ b.T.reshape(-1))
        return torch.stack(entries)

    torch.testing.assert_close(product(lambda q: (q - 1) % n + 1), vector)
    assert not torch.allclose(product(lambda q: q % n + 1), vector)


def test_extraction_matrices_as_printed_are_no_isometries():
    row, size = torch.eye(5)[:, 1:2], 3
    matrix = torch.kron(row, torch.ones(1, size))
    assert torch.equal(matrix.T @ matrix, torch.ones(size, size))
    assert torch.equal(matrix @ matrix.T, size * row @ row.T)


def test_the_gain_at_large_epsilon_does_not_need_the_bound():
    """Without the bound of batch-normalisation the numbers are the same."""
    layers = paper.batch_norm_vgg(1e2)
    unbounded = [
        replace(layer, nonlinear=tuple(replace(part, bound=Magnitude.infinity()) for part in layer.nonlinear))
        for layer in layers
    ]
    for keep in (True, False):
        with_bound = paper.algorithm_4(layers, 1.0, 1.0, keep).result
        assert paper.algorithm_4(unbounded, 1.0, 1.0, keep).result == with_bound


def test_derivative_of_a_quotient_has_a_minus_sign():
    """Lemma invcomp in dimension one, for ζ(α, β) = α³β² + 2β."""
    alpha, beta = torch.tensor(1.3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    quotient = lambda a: 3 * a**2 * beta**2 / (2 * a**3 * beta + 2)  # noqa: E731  ∂_α ζ / ∂_β ζ
    first, second = 3 * alpha**2 * beta**2, 2 * alpha**3 * beta + 2
    parts = 6 * alpha * beta**2 / second, first * 6 * alpha**2 * beta / second**2
    found = torch.func.grad(quotient)(alpha)
    torch.testing.assert_close(found, parts[0] - parts[1])
    assert not torch.allclose(found, parts[0] + parts[1])


def test_block_diagonal_tensors_have_the_largest_norm_of_their_blocks():
    blocks = [normal(3, 3, 3, seed=k) for k in range(4)]
    whole = torch.zeros(12, 12, 12, dtype=torch.float64)
    for k, block in enumerate(blocks):
        part = slice(3 * k, 3 * k + 3)
        whole[part, part, part] = block
    largest = max(tensor_norm(block, starts=20, rounds=60) for block in blocks)
    assert tensor_norm(whole, starts=40, rounds=80) == pytest.approx(largest, rel=1e-6)
