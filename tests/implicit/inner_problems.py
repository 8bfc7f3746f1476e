"""Inner problems with known solutions, and judges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MU = 0.7


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


class RidgeOfSample(nn.Module):
    """ζ = ½‖Aβ − x‖² + (μ/2)‖β‖²: every sample is fitted by the columns of A."""

    def __init__(self, rows: int = 5, size: int = 3) -> None:
        super().__init__()
        self.a = nn.Parameter(numbers(rows, size, seed=1))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return 0.5 * (self.a @ beta - x).square().sum() + 0.5 * MU * beta.square().sum()

    @staticmethod
    def solution(x: Tensor, a: Tensor) -> Tensor:
        gram = a.mT @ a + MU * torch.eye(a.shape[1], dtype=a.dtype)
        return torch.linalg.inv(gram).matmul(a.mT @ x.mT).mT


class RidgeOfBatch(nn.Module):
    """Ridge regression of fixed targets on features of the whole batch: one β."""

    def __init__(self, samples: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(numbers(samples, seed=2))
        self.register_buffer("y", numbers(samples, seed=3))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return 0.5 * ((x @ beta) * self.scale - self.y).square().sum() + 0.5 * MU * beta.square().sum()

    @staticmethod
    def solution(x: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        features = x * scale[:, None]
        gram = features.mT @ features + MU * torch.eye(x.shape[1], dtype=x.dtype)
        return torch.linalg.inv(gram) @ features.mT @ y


class Logistic(nn.Module):
    """ζ = Σ softplus(a_k·β x_k) + (μ/2)‖β‖², not quadratic."""

    def __init__(self, rows: int = 4, size: int = 3) -> None:
        super().__init__()
        self.a = nn.Parameter(1.5 * numbers(rows, size, seed=4))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return F.softplus((self.a @ beta) * x).sum() + 0.5 * MU * beta.square().sum()


def central_hessian(values: Callable[[Tensor], Tensor], point: Tensor, step: float) -> Tensor:
    """Second derivatives by central differences of values at many points at once, extrapolated once."""

    def differences(h: float) -> Tensor:
        size = point.numel()
        unit = h * torch.eye(size, dtype=point.dtype)
        signs = [(a, b) for a in (1, -1) for b in (1, -1)]
        points = [point + a * unit[i] + b * unit[j] for i in range(size) for j in range(size) for a, b in signs]
        found = values(torch.stack(points)).reshape(size, size, 4)
        return (found @ torch.tensor([a * b for a, b in signs], dtype=point.dtype)) / (4 * h * h)

    coarse, fine = differences(2 * step), differences(step)
    return (4 * fine - coarse) / 3
