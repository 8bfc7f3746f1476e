"""Linear maps with bounded slopes between them: no slopes come out larger, and wrong proofs are refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from surefoot.bounds.multipliers import Bounded, Linear, System
from surefoot.scalar import Rounded


def exact(value: Tensor) -> Linear:
    return Linear(value, torch.zeros(value.shape[1], dtype=torch.float64))


def layers(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, a, dtype=torch.float64, generator=generator) / math.sqrt(a) for a, b in pairwise(sizes)]


def rectified(weights: list[Tensor], improve: bool = True) -> System:
    """Slopes between 0 and 1: half of what comes in, and half of w."""
    width = weights[0].shape[1]
    state, groups = torch.eye(width, dtype=torch.float64), []
    for weight in weights[:-1]:
        rows = weight @ state
        groups.append(Bounded(exact(rows), len(rows)))
        state = torch.cat([rows / 2, torch.eye(len(rows), dtype=torch.float64) / 2], 1)
    return System(width, groups, exact(weights[-1] @ state), improve)


def steepest(weights: list[Tensor], seed: int = 0) -> float:
    """The largest norm that single changes of slopes between 0 and 1 arrive at."""
    generator = torch.Generator().manual_seed(seed)
    slopes = [torch.randint(0, 2, (len(w),), generator=generator).double() for w in weights[:-1]]

    def norm() -> float:
        total = weights[0]
        for slope, weight in zip(slopes, weights[1:], strict=True):
            total = weight @ (slope[:, None] * total)
        return float(torch.linalg.matrix_norm(total, 2))

    best, before = norm(), 0.0
    while best > before:
        before = best
        for slope in slopes:
            for k in range(len(slope)):
                slope[k] = 1 - slope[k]
                now = norm()
                if now > best:
                    best = now
                else:
                    slope[k] = 1 - slope[k]
    return best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 6, 5, 3), (5, 3, 3, 3, 1)])
def test_no_slopes_come_out_larger(sizes: tuple[int, ...], seed: int) -> None:
    weights = layers(*sizes, seed=seed)
    product = math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)
    best, closed = rectified(weights).gain(), rectified(weights, improve=False).gain()
    assert max(steepest(weights, seed=k) for k in range(3)) <= best <= closed * (1 + 1e-9)
    assert closed <= product * (1 + 1e-9)
    assert best < 0.99 * closed


def test_multipliers_cannot_be_improved() -> None:
    """The problem is convex, so small changes of the best multipliers are enough to see."""
    system = rectified(layers(4, 8, 8, 3))
    best, there = system.gain(), system.multipliers
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        system.multipliers = there * (1 + 0.05 * torch.randn(len(there), dtype=torch.float64, generator=generator))
        assert system.gain() >= best * (1 - 1e-3)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 2.0, 1e3])
def test_a_wrong_constant_is_refused_whatever_the_multipliers(factor: float) -> None:
    weights = layers(3, 5, 4, 2)
    system, truth = rectified(weights), steepest(weights)
    unit = torch.eye(2, dtype=torch.float64)
    assert system.proves(Rounded.exact(system.gain() ** 2 * unit))
    for scale in (1.0, factor):
        system.multipliers = system.multipliers * scale
        assert not system.proves(Rounded.exact((0.999 * truth) ** 2 * unit))


def test_multipliers_that_are_too_large_are_refused() -> None:
    system = rectified(layers(3, 5, 4, 2))
    system.multipliers = system.multipliers * 10
    assert not system.proves(Rounded.exact(1e9 * torch.eye(2, dtype=torch.float64)))
    assert system.gain() == math.inf
    assert system.shape() is None


def test_errors_of_columns_are_counted() -> None:
    system = rectified(layers(3, 5, 4, 2))
    plain = system.gain()
    output = system.output
    system.output = Linear(output.value, torch.full_like(output.error, 0.1))
    assert system.gain() > plain + 1e-3


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (1, 1)])
def test_without_operations_it_is_the_spectral_norm(shape: tuple[int, int]) -> None:
    (weight,) = layers(*shape)
    norm = float(torch.linalg.matrix_norm(weight, 2))
    system = System(weight.shape[1], [], exact(weight))
    assert norm <= system.gain() <= norm * (1 + 1e-6)
    factor = system.shape()
    assert factor is not None
    assert float(torch.linalg.matrix_norm(factor, 2)) == pytest.approx(norm, rel=1e-6)


def test_a_cut_keeps_directions() -> None:
    """What comes out of the first layers, in the shape in which it goes on, is sharper than its norm."""
    weights = layers(6, 8, 8, 8, 2, seed=5)
    first = rectified(weights[:2])
    factor = first.shape()
    assert factor is not None
    head, tail = first.gain(), rectified([torch.eye(8, dtype=torch.float64), *weights[2:]]).gain()
    together = rectified(weights).gain()
    cut = rectified([factor, *weights[2:]]).gain()
    assert steepest(weights) <= together * (1 + 1e-3) <= cut * (1 + 2e-3)
    assert cut < 0.95 * head * tail


def test_a_group_that_is_bounded_together() -> None:
    """w with ‖w‖ ≤ ‖Ay‖ behind B: the constant is ‖B‖‖A‖ and attained."""
    a, b = layers(3, 4, 5)
    system = System(3, [Bounded(exact(a), 4, together=True)], exact(torch.cat([torch.zeros(5, 3), b], 1)))
    norm = float(torch.linalg.matrix_norm(a, 2) * torch.linalg.matrix_norm(b, 2))
    assert norm <= system.gain() <= norm * (1 + 1e-4)
