"""Theorems about data in pieces say what they say of the joined batch, and hold no more than their matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.verdicts import assert_same_verdict
from surefoot.batches import Batches
from surefoot.calculus.analysis import Analysis
from surefoot.norms.blocked import Symmetric
from surefoot.norms.verified import smallest_eigenvalue
from surefoot.theorems.bending import bending
from surefoot.theorems.layered import read_layers
from surefoot.theorems.pieces import Pieces

METHODS = [
    ("gauss_newton", False),
    ("damped", False),
    ("gradient", False),
    ("gradient", True),
    ("stochastic", False),
]


def fitted(*between: nn.Module, width: int = 40, samples: int = 9) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs, and targets near its outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), *between, nn.Linear(width, 2)).double()
    x = torch.randn(samples, 12).double()
    with torch.no_grad():
        return model, x, model(x) + 0.01


def split(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split([2, 1, 4, 2]), y.split([2, 1, 4, 2]), strict=True))


@pytest.mark.parametrize(("method", "per_block"), METHODS)
def test_the_verdict_is_that_of_the_joined_batch(method: str, per_block: bool) -> None:
    model, x, y = fitted(nn.Tanh())
    options = {"method": method, "per_block": per_block, "batch_size": 4}
    assert_same_verdict(
        sf.convergence(model, split(x, y), sf.Square(), **options),
        sf.convergence(model, x, sf.Square(y), **options),
    )


def test_deep_networks_and_kinks() -> None:
    for between, width in (((nn.Tanh(), nn.Linear(40, 20), nn.Sigmoid()), 20), ((nn.ReLU(),), 40)):
        model, x, y = fitted(*between, width=width)
        assert_same_verdict(
            sf.convergence(model, split(x, y), sf.Square(), effort="low"),
            sf.convergence(model, x, sf.Square(y), effort="low"),
        )


def test_other_networks_and_strict_minima_join_the_data() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 3).double(), torch.zeros(9, 2).double()
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Softmax(1), nn.Linear(4, 2)).double()
    for options in ({"method": "gauss_newton"}, {"method": "newton", "regularizer": sf.Ridge(10.0)}):
        assert_same_verdict(
            sf.convergence(model, split(x, y), sf.Square(), effort="low", **options),
            sf.convergence(model, x, sf.Square(y), effort="low", **options),
        )


def test_gram_matrix_and_bending_of_pieces() -> None:
    """More rows than a panel has, and batches that end inside of panels."""
    model, x, y = fitted(nn.Tanh(), samples=330)
    batches = list(zip(x.split(101), y.split(101), strict=True))
    pieces = Pieces(model, Batches(batches, ordered=True), sf.Square(), None)
    whole = read_layers(Analysis.of(model, x))
    assert whole is not None
    gram, expected = pieces.gram(), Symmetric.dense(whole.gram)
    for (start, _, found), (_, _, other) in zip(gram.panels(), expected.panels(), strict=True):
        apart = (found.value - other.value).tril(start).abs()
        assert bool((apart <= (found.error + other.error).tril(start)).all())
        assert bool((found.error.tril(start) <= 4 * other.error.tril(start) + 1e-14).all())
    assert smallest_eigenvalue(gram) == pytest.approx(smallest_eigenvalue(expected), abs=1e-9)
    for radius in (0.0, 0.1):
        found, other = bending(None, pieces, radius), bending(None, whole, radius)
        assert found.constant == pytest.approx(other.constant, rel=1e-10)
        assert found.variation == pytest.approx(other.variation, rel=1e-8)


def test_batches_of_all_samples_are_never_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes are asked of one batch and another, and the data are not joined."""
    model, x, y = fitted(nn.Tanh())
    monkeypatch.setattr(Batches, "joined", lambda self: pytest.fail("joined"))
    assert sf.convergence(model, split(x, y), sf.Square(), effort="low").theorem
