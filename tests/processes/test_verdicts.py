"""Theorems about data in pieces say what they say of the joined batch, and hold no more than their matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.memory import peak_bytes
from judges.verdicts import assert_same_verdict
from surefoot.batches import Batches
from surefoot.calculus.analysis import Analysis
from surefoot.norms.blocked import Symmetric
from surefoot.norms.verified import smallest_eigenvalue
from surefoot.theorems import convex
from surefoot.theorems.bending import Here, layered_bending
from surefoot.theorems.layered import read_layers
from surefoot.theorems.pieces import Pieces
from theorems.small_networks import linearised, perceptron
from theorems.test_strict_minima import Residual, check, flat, minimised, small_convolution

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


@pytest.mark.parametrize("per_block", [False, True])
def test_other_networks(per_block: bool) -> None:
    """Their constants are those of single samples, and so do not depend on the batches."""
    torch.manual_seed(0)
    model, x = small_convolution().double(), torch.randn(4, 1, 3, 3).double()
    with torch.no_grad():
        y = model(x) + 0.1
    options = {"method": "gradient", "per_block": True, "effort": "low"} if per_block else {}
    loader = list(zip(x.split([1, 3]), y.split([1, 3]), strict=True))
    found = sf.convergence(model, loader, sf.Square(), **options)
    assert_same_verdict(found, sf.convergence(model, x, sf.Square(y), **options))


@pytest.mark.parametrize("loss", [sf.Square, sf.CrossEntropy])
def test_strict_minima_by_the_ridge(loss: type[sf.Square], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient, the ridge and V are those of the joined batch: sums over samples, K and the norm of J. How
    negative the Hessian may be is bounded by batches, and so is m; it holds, and is not the same.
    """
    monkeypatch.setattr(convex, "DENSE", 0)
    model, x, y = fitted(nn.Tanh())
    given = y + 0.1 if loss is sf.Square else torch.arange(9) % 2
    options = {"method": "newton", "regularizer": sf.Ridge(0.5), "effort": "low"}
    found = sf.convergence(model, split(x, given), loss(), **options)
    joined = sf.convergence(model, x, loss(given), **options)
    for one, other in zip(found.hypotheses, joined.hypotheses, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-4 if one.symbol == "m" else 1e-10)


NETWORKS = {"layers": (lambda: perceptron(2, 3, 2), (2,)), "convolution": (small_convolution, (1, 3, 3)),
            "residual": (Residual, (2,))}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_strict_minimum_of_pieces_is_where_it_is_said_to_be(name: str) -> None:
    """Judged in 200 bits on the joined batch."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x, y = make().double(), torch.randn(4, *shape).double(), torch.tensor([0, 1, 1, 0])
    minimised(model, x, sf.CrossEntropy(y), 0.2, 40)
    loader = list(zip(x.split([1, 3]), y.split([1, 3]), strict=True))
    options = {"regularizer": sf.Ridge(0.2), "method": "newton"}
    verdict = sf.convergence(model, loader, sf.CrossEntropy(), **options)
    check(verdict, model, x, sf.CrossEntropy(y), 0.2)
    other = sf.convergence(model, x, sf.CrossEntropy(y), **options)
    for one, expected in zip(verdict.hypotheses[1:3], other.hypotheses[1:3], strict=True):  # m₀ and m
        assert one.value == pytest.approx(expected.value, rel=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_hessian_of_pieces_and_how_far_it_moves(name: str) -> None:
    """It is that of the joined batch, by automatic differentiation, and nowhere found further away."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x, y = make().double(), torch.randn(9, *shape).double(), torch.arange(9) % 2
    pieces = Pieces(model, Batches(split(x, y), ordered=True), sf.CrossEntropy())
    pieces.share()
    found = pieces.summed("hessian")
    assert found is not None
    value, wrong = found
    sizes = {path: p.numel() for path, p in model.named_parameters()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    order = [starts[path] + k for path in pieces.order for k in range(sizes[path])]
    objective = sf.CrossEntropy(y)
    there = flat(model, lambda out, v: objective(out), x)[1][order][:, order]
    assert torch.linalg.matrix_norm(there - value, 2) <= wrong + 1e-14
    assert wrong < 1e-10
    jacobian = linearised(model, x, model(x).detach())[0][:, order]
    curve = torch.func.hessian(objective)(model(x).detach()).reshape(18, 18)
    for weighted, expected in ((True, jacobian.mT @ curve @ jacobian), (False, jacobian.mT @ jacobian)):
        normal = pieces.summed("normal", weighted)
        assert normal is not None
        assert torch.linalg.matrix_norm(expected - normal[0], 2) <= normal[1] + 1e-13
        assert normal[1] < 1e-9
    u = nn.utils.parameters_to_vector(model.parameters()).detach()
    for radius in (1e-3, 0.1):
        moved = sum(parts[0] for parts in pieces.each("apart", [radius]))
        for _ in range(5):
            step = torch.randn_like(u)
            nn.utils.vector_to_parameters(u + radius * step / step.norm(), model.parameters())
            away = flat(model, lambda out, v: objective(out), x)[1][order][:, order]
            assert float(torch.linalg.matrix_norm(away - value, 2)) <= moved + wrong
        nn.utils.vector_to_parameters(u, model.parameters())


def test_a_batch_without_weight_says_nothing() -> None:
    model, x, _ = fitted(nn.Tanh(), width=40)
    y = torch.arange(9) % 2
    y[2] = -100  # all of the second batch
    loader, loss = split(x, y), sf.CrossEntropy(ignore_index=-100)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-6)
    options = {"method": "newton", "regularizer": sf.Ridge(2.0), "effort": "low"}
    found = sf.convergence(model, loader, loss, **options)
    joined = sf.convergence(model, x, loss.bound_to(y), **options)
    assert found.proved
    for one, other in zip(found.hypotheses[:2], joined.hypotheses[:2], strict=True):  # ∇F and m₀
        assert one.value == pytest.approx(other.value, rel=1e-10)


def test_statistics_of_batches_and_other_losses_are_refused() -> None:
    x, y = torch.randn(9, 3).double(), torch.zeros(9, 2).double()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with pytest.raises(sf.errors.SurefootError, match=r"in batch 0 .* computes its statistics from each batch"):
        sf.convergence(model, [(x[:4], y[:4]), (x[4:], y[4:])], sf.Square())
    model = nn.Linear(3, 2).double()
    rows, labels = torch.randn(5, 4, 3).double(), torch.zeros(5, 4, dtype=torch.long)
    found = sf.convergence(model, rows, sf.CrossEntropy(labels), sf.Ridge(1.0), method="newton", effort="low")
    assert "one class for each sample" in str(found)


def test_memory_does_not_grow_with_the_number_of_batches() -> None:
    """At most 1.2 times that of two batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2)).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    x, y = torch.randn(160, 1, 6, 6).double(), torch.arange(160) % 2

    def most(count: int) -> int:
        loader = list(zip(x[: 20 * count].split(20), y[: 20 * count].split(20), strict=True))
        options = {"method": "newton", "effort": "low"}
        return peak_bytes(lambda: sf.convergence(model, loader, sf.CrossEntropy(), sf.Ridge(9.0), **options))

    assert most(8) <= 1.2 * most(2)


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
        found, other = layered_bending(pieces, radius), layered_bending(Here(lambda: [whole]), radius)
        assert found.constant == pytest.approx(other.constant, rel=1e-10)
        assert found.variation == pytest.approx(other.variation, rel=1e-8)


def test_batches_are_not_joined_if_layers_would_read_other_numbers() -> None:
    class Column(nn.Module):
        def __init__(self, fixed: bool) -> None:
            super().__init__()
            self.inner, self.fixed = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double(), fixed

        def forward(self, x: Tensor) -> Tensor:
            start = 1 if self.fixed else len(x) - 1
            result: Tensor = self.inner(x[:, start : start + 1])
            return result

    x, y = torch.randn(6, 8, dtype=torch.float64), torch.zeros(6, 1, dtype=torch.float64)
    batches = list(zip(x.split(2), y.split(2), strict=True))
    for fixed in (True, False):
        pieces = Pieces(Column(fixed), Batches(batches, ordered=True), sf.Square(), None)
        assert pieces.is_layered
        assert (pieces.joined() is not None) == fixed


def test_batches_of_all_samples_are_never_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes are asked of one batch and another, and the data are not joined."""
    model, x, y = fitted(nn.Tanh())
    monkeypatch.setattr(Batches, "joined", lambda self: pytest.fail("joined"))
    for options in ({}, {"method": "newton"}, {"method": "gradient"}):
        assert sf.convergence(model, split(x, y), sf.Square(), effort="low", **options).theorem
