"""Judges for the paper's statements: suprema searched from below, independent of the code under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def tensor_norm(tensor: Tensor, starts: int = 6, rounds: int = 12) -> float:
    """A lower bound of sup A[x,y,z] over unit vectors, by alternating maximisation (exact in each argument)."""
    outputs, rows, columns = tensor.shape
    weights = normal(outputs, starts, seed=0)
    left = normal(rows, starts, seed=1)
    right = normal(columns, starts, seed=2)
    for _ in range(rounds):
        weights = torch.nn.functional.normalize(torch.einsum("nij,is,js->ns", tensor, left, right), dim=0)
        left = torch.nn.functional.normalize(torch.einsum("nij,ns,js->is", tensor, weights, right), dim=0)
        right = torch.nn.functional.normalize(torch.einsum("nij,ns,is->js", tensor, weights, left), dim=0)
    return float(torch.einsum("nij,ns,is,js->s", tensor, weights, left, right).abs().max())


def jacobian_norm(function: Function, point: Tensor) -> float:
    jacobian = torch.func.jacrev(function)(point)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, point.numel()), ord=2))


def curvature_norm(function: Function, point: Tensor) -> float:
    hessian = torch.func.jacrev(torch.func.jacrev(function))(point)
    return tensor_norm(hessian.reshape(-1, point.numel(), point.numel()))


def value_norm(function: Function, point: Tensor) -> float:
    return float(torch.linalg.vector_norm(function(point)))


def ascend(
    score: Callable[[Tensor], float],
    starts: Sequence[Tensor],
    project: Function = lambda point: point,
    rounds: int = 15,
    seed: int = 0,
) -> float:
    """The largest score met by a random local search from the best start, inside the domain."""
    random = generator(seed)
    best_point = max((project(start) for start in starts), key=score)
    best, width = score(best_point), 0.5
    for _ in range(rounds):
        step = torch.randn(best_point.shape, generator=random, dtype=torch.float64)
        candidate = project(best_point + width * best_point.norm().clamp(min=0.1) * step / step.norm())
        value = score(candidate)
        if value > best:
            best, best_point = value, candidate
        else:
            width *= 0.85
    return best


class Balls:
    """A product of balls, around a centre, for parameters stored one block after the other."""

    def __init__(self, sizes: Sequence[int], radii: Sequence[float], centre: Tensor | None = None) -> None:
        self.sizes, self.radii = list(sizes), list(radii)
        self.centre = torch.zeros(sum(self.sizes), dtype=torch.float64) if centre is None else centre

    def project(self, point: Tensor) -> Tensor:
        blocks = (point - self.centre).split(self.sizes)
        inside = [
            block * min(1.0, radius / max(float(block.norm()), 1e-300))
            for block, radius in zip(blocks, self.radii, strict=True)
        ]
        return self.centre + torch.cat(inside)

    def starts(self, count: int, seed: int) -> list[Tensor]:
        """Random points, most of them with every block on its sphere, and the centre."""
        points = [self.centre.clone()]
        for index in range(count):
            draw = normal(len(self.centre), seed=1000 * seed + index)
            points.append(self.project(self.centre + (1e3 if index % 3 else 0.3) * draw))
        return points


def attack(function: Function, domain: Balls, starts: int = 8, seed: int = 0) -> tuple[float, float, float]:
    """Lower bounds of m, ℓ, L of a function on a product of balls."""
    points = domain.starts(starts, seed)
    return (
        ascend(lambda point: value_norm(function, point), points, domain.project, seed=seed),
        ascend(lambda point: jacobian_norm(function, point), points, domain.project, seed=seed),
        ascend(lambda point: curvature_norm(function, point), points, domain.project, seed=seed),
    )


class Network:
    """A chain of fully connected layers on a batch, each block of parameters being (weight, intercept)."""

    def __init__(self, batch: int, widths: Sequence[int], activations: Sequence[Sequence[Function]]) -> None:
        self.batch, self.widths, self.activations = batch, list(widths), activations
        self.sizes = [rows * (columns + 1) for columns, rows in zip(self.widths, self.widths[1:], strict=False)]

    def layer(self, index: int, state: Tensor, block: Tensor) -> Tensor:
        rows, columns = self.widths[index + 1], self.widths[index]
        weight, intercept = block[: rows * columns].reshape(rows, columns), block[rows * columns :]
        state = state @ weight.T + intercept
        for activation in self.activations[index]:
            state = activation(state)
        return state

    def __call__(self, inputs: Tensor, parameters: Tensor) -> Tensor:
        state = inputs
        for index, block in enumerate(parameters.split(self.sizes)):
            state = self.layer(index, state, block)
        return state.reshape(-1)


def batch_normalise(epsilon: float) -> Function:
    """Batch-normalisation of the columns of a (batch, features) matrix."""

    def function(state: Tensor) -> Tensor:
        centred = state - state.mean(dim=0)
        return centred / torch.sqrt(centred.square().mean(dim=0) + epsilon)

    return function
