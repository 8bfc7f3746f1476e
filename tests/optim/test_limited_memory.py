"""The direction of L-BFGS against the two loops, written out on vectors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.optim.limited_memory import _MEMORY, LimitedMemory
from surefoot.optim.vectors import Layout


def two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]], kept: int, layout: Layout) -> Tensor:
    """Nocedal's recursion, newest pair last, from a diagonal of all pairs, written out tensor by tensor."""
    moves = changes = torch.zeros_like(gradient)
    for move, change in pairs:
        moves = _MEMORY * moves + move**2 / (move @ change)
        changes = _MEMORY * changes + change**2 / (move @ change)
    parts = [
        ((s + s.mean() + 1e-6 * moves.mean()) / (y + y.mean() + 1e-6 * changes.mean())).sqrt().flatten()
        for s, y in zip(layout.unpack(moves).values(), layout.unpack(changes).values(), strict=True)
    ]
    diagonal = torch.cat(parts)
    pairs = pairs[-kept:]
    q, alphas = gradient.clone(), []
    for move, change in reversed(pairs):
        alphas.append(move @ q / (move @ change))
        q -= alphas[-1] * change
    move, change = pairs[-1]
    q *= diagonal * (move @ change) / (change @ (diagonal * change))
    for (move, change), alpha in zip(pairs, reversed(alphas), strict=True):
        q += move * (alpha - change @ q / (move @ change))
    return -q


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    """Parameters of these shapes."""
    return Layout.of({str(k): torch.empty(shape) for k, shape in enumerate(shapes)})


FUNCTION = {
    size: SimpleNamespace(layout=layout_of(*shapes))
    for size, shapes in {6: [(6,)], 12: [(2, 4), (0,), (1,), (3,)], 3000: [(30, 50), (1500,)]}.items()
}


def at(vector: Tensor, matrix: Tensor) -> Any:
    """A point of a quadratic function."""
    gradient = matrix @ vector if matrix.dim() == 2 else matrix * vector  # a diagonal
    size = float(gradient.norm())
    return SimpleNamespace(vector=vector, gradient=gradient, gradient_norm=size, function=FUNCTION[len(vector)])


@pytest.mark.parametrize("kept", [3, 50])
def test_the_direction_is_that_of_the_two_loops(kept: int) -> None:
    torch.manual_seed(0)
    factor = torch.randn(12, 12, dtype=torch.float64)
    matrix = factor @ factor.T + torch.eye(12, dtype=torch.float64)
    memory, pairs = LimitedMemory(kept), []
    point = at(torch.randn(12, dtype=torch.float64), matrix)
    for k in range(9):
        direction, step = memory.propose(point)
        if pairs:
            assert torch.allclose(
                direction, two_loops(point.gradient, pairs, kept, FUNCTION[12].layout), rtol=1e-8, atol=1e-11
            )
        step *= (1.0, 0.3)[k % 2]  # a move need not be the whole direction
        after = at(point.vector + step * direction, matrix)
        if k == 4:  # nor along it
            after = at(point.vector + torch.randn(12, dtype=torch.float64), matrix)
        memory.learn(point, after, step)
        pairs.append((after.vector - point.vector, after.gradient - point.gradient))
        point = after


def test_many_rows_are_in_single_precision_and_the_direction_is_as_good() -> None:
    torch.manual_seed(0)
    scales = torch.logspace(-2, 2, 3000, dtype=torch.float64)
    memory, pairs = LimitedMemory(), []
    point = at(torch.randn(3000, dtype=torch.float64) * 1e-25, scales)
    for _ in range(25):
        direction, step = memory.propose(point)
        if pairs:
            exact = two_loops(point.gradient, pairs, 100, FUNCTION[3000].layout)
            assert float((direction - exact).norm()) <= 1e-5 * float(exact.norm())
        after = at(point.vector + step * direction, scales)
        memory.learn(point, after, step)
        pairs.append((after.vector - point.vector, after.gradient - point.gradient))
        point = after
    rows = memory.state()["rows"]
    assert rows is not None
    assert rows.dtype is torch.float32


def test_a_resumed_memory_goes_on() -> None:
    torch.manual_seed(0)
    matrix = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    memory, resumed = LimitedMemory(), LimitedMemory()
    point = at(torch.ones(6, dtype=torch.float64), matrix)
    for _ in range(4):
        direction, step = memory.propose(point)
        after = at(point.vector + step * direction, matrix)
        memory.learn(point, after, step)
        point = after
    resumed.load(memory.state())
    assert torch.equal(resumed.propose(point)[0], memory.propose(point)[0])


def test_after_a_short_step_no_first_trial_is_much_longer() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1e-3, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    memory, point = LimitedMemory(), at(torch.ones(6, dtype=torch.float64), matrix)
    after = at(point.vector + torch.full((6,), 1e-3, dtype=torch.float64), matrix)
    memory.learn(point, after, 1.0)
    direction, step = memory.propose(after)
    last = float((after.vector - point.vector).norm())
    assert step < 1
    assert step * float(direction.norm()) == pytest.approx(3 * last)
    near = at(after.vector * 1e-3, matrix)  # whose steps are short
    assert memory.propose(near)[1] == 1.0
    later = at(after.vector + torch.tensor([1e-3, 0, 0, 0, 0, 0], dtype=torch.float64), matrix)
    for taken, is_held_back in ((1.0, False), (0.5, True)):
        memory.learn(after, later, taken)
        assert (memory.propose(later)[1] < 1) == is_held_back
