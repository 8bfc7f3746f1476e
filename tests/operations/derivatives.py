"""Dense derivatives and norms of small maps, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def gradients(goal: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a number, by leaf."""
    if not goal.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(goal, list(leaves.values()), allow_unused=True, retain_graph=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if g is None else g.detach() for (name, leaf), g in pairs}


def jacobian(function: Callable[..., Tensor], slots: Mapping[str, Tensor]) -> list[Tensor]:
    """Dense blocks, results × entries, one per slot."""
    leaves = {slot: value.detach().clone().requires_grad_() for slot, value in slots.items()}
    return _rows(function(**leaves), list(leaves.values()))


def second_derivative(
    function: Callable[..., Tensor], slots: Mapping[str, Tensor], pair: tuple[str, str]
) -> Tensor:
    """The block of second derivatives, results × first × second."""
    leaves = {slot: value.detach().clone().requires_grad_() for slot, value in slots.items()}
    first, second = leaves[pair[0]], leaves[pair[1]]
    outcome = function(**leaves)
    slices = [torch.zeros(0, first.numel(), second.numel(), dtype=torch.float64)]
    for entry in outcome:
        (slope,) = _rows(entry.reshape(1), [first], create_graph=True)
        slices.append(_rows(slope.reshape(-1), [second])[0].unsqueeze(0))
    return torch.cat(slices)


def _rows(outcome: Tensor, leaves: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    """The gradients of all entries of a vector, stacked, by leaf.

    One entry at a time: differentiating all at once gives wrong second derivatives for some normalisations.
    """
    zeros = [torch.zeros(leaf.numel(), dtype=torch.float64) for leaf in leaves]
    rows: list[list[Tensor]] = [[] for _ in leaves]
    for k in range(outcome.numel()):
        entry = outcome[k]
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if entry.requires_grad and entry.grad_fn is not None:
            found = torch.autograd.grad(
                entry, leaves, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        for row, zero, gradient in zip(rows, zeros, found, strict=True):
            row.append(zero if gradient is None else gradient.reshape(-1))
    empty = [torch.zeros(0, leaf.numel(), dtype=torch.float64) for leaf in leaves]
    return [torch.stack(row) if row else none for row, none in zip(rows, empty, strict=True)]


def tensor_norm(tensor: Tensor, generator: torch.Generator, starts: int = 4, steps: int = 60) -> float:
    """The largest value of a trilinear form on unit vectors that alternating maximisation finds.

    It starts from the slice with the largest norm and from random vectors.
    """
    if not bool(tensor.any()):
        return 0.0
    best = 0.0
    slices = tensor.flatten(1).norm(dim=1)
    for start in range(starts):
        if start == 0:
            a = torch.zeros(tensor.shape[0], dtype=torch.float64)
            a[int(slices.argmax())] = 1.0
        else:
            a = torch.randn(tensor.shape[0], generator=generator, dtype=torch.float64)
        value = 0.0
        for _ in range(steps):
            matrix = torch.einsum("a,abc->bc", a, tensor)
            u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
            a = torch.einsum("abc,b,c->a", tensor, u[:, 0], vt[0])
            size = float(a.norm())
            if size == 0:
                break
            a = a / size
            if size <= value * (1 + 1e-14):
                break
            value = size
            best = max(best, size)
    return best


def spectral(matrix: Tensor) -> float:
    """The spectral norm; zero for what has no derivative at this point."""
    usable = matrix.numel() and bool(matrix.isfinite().all())
    return float(torch.linalg.matrix_norm(matrix, 2)) if usable else 0.0
