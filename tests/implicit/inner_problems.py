"""Inner problems with their exact minimisers and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mpmath as mp
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.implicit import Constants

MU = 0.7
D = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed + sum(shape)))


class RidgeOfSample(nn.Module):
    """ζ = ½‖Aβ − x‖² + (μ/2)‖β‖²: every sample is fitted by the columns of A."""

    def __init__(self, rows: int = 5, size: int = 3) -> None:
        super().__init__()
        self.a = nn.Parameter(numbers(rows, size, seed=1))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return 0.5 * (self.a @ beta - x).square().sum() + 0.5 * MU * beta.square().sum()

    def constants(self, sizes: Mapping[str, float]) -> Constants:
        """‖β‖ ≤ ‖x‖/(2√μ) = b and ‖Aβ − x‖ ≤ ‖x‖ at the minimiser."""
        a, x = sizes["a"], sizes["x"]
        b = sizes.get("beta", x / (2 * MU**0.5))
        left = x if "beta" not in sizes else a * b + x
        slopes = {"x": a, "a": left + a * b, "beta": a * a + MU}
        return Constants(MU, slopes, {("x", "a"): 1.0, ("a", "a"): 2 * b, ("a", "beta"): 2 * a})

    @staticmethod
    def solution(x: Tensor, a: Tensor) -> Tensor:
        gram = a.mT @ a + MU * torch.eye(a.shape[1], dtype=a.dtype)
        return torch.linalg.inv(gram).matmul(a.mT @ x.mT).mT


class RidgeOfBatch(nn.Module):
    """Ridge regression of fixed targets on features of the whole batch: one β."""

    def __init__(self, samples: int = 6) -> None:
        super().__init__()
        self.a = nn.Parameter(numbers(samples, seed=2))
        self.register_buffer("y", numbers(samples, seed=3))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return 0.5 * ((x @ beta) * self.a - self.y).square().sum() + 0.5 * MU * beta.square().sum()

    def solution(self, x: Tensor, a: Tensor) -> Tensor:
        features = x * a[:, None]
        gram = features.mT @ features + MU * torch.eye(x.shape[1], dtype=x.dtype)
        return torch.linalg.inv(gram) @ features.mT @ self.y


class Soft(nn.Module):
    """ζ = Σ softplus(Aβ + x) + (μ/2)‖β‖², not quadratic."""

    def __init__(self, rows: int = 3, size: int = 3, scale: float = 1.5) -> None:
        super().__init__()
        self.a = nn.Parameter(scale * numbers(rows, size, seed=4))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return F.softplus(self.a @ beta + x).sum() + 0.5 * MU * beta.square().sum()

    def constants(self, sizes: Mapping[str, float]) -> Constants:
        r"""g = Aᵀs(z) + μβ, z = Aβ + x, |s| ≤ 1, |s'| ≤ 1/4, |s''| ≤ 3^{-3/2}/2, so ‖β‖ ≤ ‖A‖√n/μ."""
        a, root = sizes["a"], self.a.shape[0] ** 0.5
        b = sizes.get("beta", a * root / MU)
        second, third = 0.25, 3**-1.5 / 2
        slopes = {"x": a * second, "a": root + a * second * b, "beta": a * a * second + MU}
        bends = {
            ("x", "x"): a * third,
            ("x", "a"): a * third * b + second,
            ("x", "beta"): a * a * third,
            ("a", "a"): a * third * b * b + 2 * second * b,
            ("a", "beta"): a * a * third * b + 2 * a * second,
            ("beta", "beta"): a**3 * third,
        }
        return Constants(MU, slopes, bends)


class Shifted(nn.Module):
    """ζ = softplus(β) + cβ²/2 − (xu)β for each number; x and u are one number each per sample."""

    def __init__(self, c: float, u: float = 0.7) -> None:
        super().__init__()
        self.c, self.u = c, nn.Parameter(torch.tensor([u], dtype=D))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return (F.softplus(beta) + 0.5 * self.c * beta.square() - x * self.u * beta).sum()

    def constants(self, sizes: Mapping[str, float]) -> Constants:
        slopes = {"x": sizes["u"], "u": sizes["x"], "beta": self.c + 0.25}
        return Constants(self.c, slopes, {("beta", "beta"): 3**-1.5 / 2, ("x", "u"): 1.0})

    def exact(self, x: float) -> tuple[mp.mpf, mp.mpf]:
        """The minimiser and its derivative in u, to the present precision."""
        c, u, x = mp.mpf(self.c), mp.mpf(float(self.u.detach())), mp.mpf(x)
        beta = mp.findroot(lambda b: 1 / (1 + mp.exp(-b)) + c * b - x * u, x * u / c)
        s = 1 / (1 + mp.exp(-beta))
        return beta, x / (s * (1 - s) + c)


@dataclass(frozen=True)
class Case:
    """An inner problem with its inputs and its exact minimiser as a differentiable function of x and A."""

    zeta: Callable[[], nn.Module]
    x: Tensor
    batched: bool = True
    exact: Callable[[Tensor, Tensor], Tensor] | None = None


def _by_newton(x: Tensor, a: Tensor) -> Tensor:
    """The minimisers of :class:`Soft` by thirty steps that automatic differentiation follows."""
    beta = torch.zeros(len(x), a.shape[1], dtype=D)
    for _ in range(30):
        s = torch.sigmoid(beta @ a.mT + x)
        hessian = torch.einsum("ki,nk,kj->nij", a, s * (1 - s), a) + MU * torch.eye(a.shape[1], dtype=D)
        beta = beta - (torch.linalg.inv(hessian) @ (s @ a + MU * beta)[..., None])[..., 0]
    return beta


CASES = {
    "ridge per sample": Case(RidgeOfSample, numbers(4, 5), exact=RidgeOfSample.solution),
    "ridge of the batch": Case(RidgeOfBatch, numbers(6, 3), False, exact=RidgeOfBatch().solution),
    "soft-plus": Case(Soft, numbers(4, 3), exact=_by_newton),
}
