"""How near K, the Lipschitz constant of the Jacobian, is to what alternating ascent attains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from benchmarks.convergence import digits, from_sklearn, gauss_newton, perceptron, small_convolution
from surefoot.calculus.analysis import Analysis
from surefoot.theorems.bending import Here, bending, layered_bending
from surefoot.theorems.layered import read_layers
from surefoot.theorems.samples import single_samples

RADIUS = 1e-3
_SWEEPS = 8


@dataclass(frozen=True)
class Case:
    """A network on some samples, after so many Gauss-Newton steps; K is to be at most ``most`` times the truth."""

    network: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    most: float
    steps: int = 0

    @property
    def name(self) -> str:
        """With the steps."""
        return f"{self.network}, after {self.steps} steps" if self.steps else self.network


def _layers(activation: type[nn.Module], samples: int, *sizes: int, steps: int = 0) -> Case:
    names = {nn.Tanh: "tanh", nn.Softplus: "soft-plus", nn.GELU: "GELU"}
    data = partial(from_sklearn, "wine", samples) if sizes[0] == 13 else partial(digits, samples, sizes[-1] > 1)
    name = f"{names[activation]} {'-'.join(map(str, sizes))}, {samples}"
    return Case(name, partial(perceptron, *sizes, activation=activation), data, 5.0, steps)


def _convolutions(activation: type[nn.Module], *channels: int, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for before, after in itertools.pairwise((1, *channels)):
        layers += [nn.Conv2d(before, after, 3), activation()]
    side = 8 - 2 * len(channels)
    layers += [nn.AvgPool2d(2)] if pool else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * (side // 2 if pool else side) ** 2, 10))


_TEN = partial(digits, 10, True)
CASES = (
    _layers(nn.Tanh, 20, 64, 64, 1),
    _layers(nn.Tanh, 20, 64, 64, 1, steps=2),
    _layers(nn.Tanh, 20, 64, 512, 1),
    _layers(nn.Softplus, 100, 64, 256, 10),
    _layers(nn.GELU, 20, 64, 512, 10),
    _layers(nn.GELU, 40, 13, 128, 3),
    _layers(nn.Tanh, 30, 64, 64, 64, 1),
    _layers(nn.Tanh, 30, 64, 64, 64, 1, steps=3),
    _layers(nn.GELU, 20, 64, 64, 64, 10),
    _layers(nn.Tanh, 20, 64, 256, 256, 10),
    _layers(nn.Softplus, 20, 64, 512, 512, 1),
    Case("small CNN, tanh, 12", small_convolution, partial(digits, 12), 10.0),
    Case("small CNN, tanh, 12", small_convolution, partial(digits, 12), 10.0, 3),
    Case("8 filters, GELU, 10 × 10", partial(_convolutions, nn.GELU, 8), _TEN, 10.0),
    Case("8 filters, tanh, mean pooling, 10 × 10", partial(_convolutions, nn.Tanh, 8, pool=True), _TEN, 10.0),
    Case("two convolutions, tanh, 10 × 10", partial(_convolutions, nn.Tanh, 4, 4), _TEN, 10.0),
)


def measured(case: Case) -> tuple[float, float]:
    """What ascent attains at the weights, and K on the ball."""
    torch.manual_seed(0)
    model = case.make().double()
    x, y = case.data()
    for _ in range(case.steps):
        gauss_newton(model, x, y)
    analysis = Analysis.of(model, x)
    layered = read_layers(analysis)
    if layered is None:
        return attained(model, x), bending(analysis, RADIUS, single_samples(analysis)).constant
    return attained(model, x), layered_bending(Here(lambda: [layered]), RADIUS).constant


def attained(model: nn.Module, x: Tensor, starts: int = 3) -> float:
    """‖D²ψ[v, v]‖ for a unit vector v: the costate that sees most of it and the eigenvector of the second
    derivative along this costate in turn.
    """
    parts = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in parts.values()]
    centre = torch.cat([p.reshape(-1) for p in parts.values()])

    def outputs(u: Tensor) -> Tensor:
        pieces = zip(parts.items(), u.split(sizes), strict=True)
        given = {name: piece.reshape(p.shape) for (name, p), piece in pieces}
        result: Tensor = torch.func.functional_call(model, given, (x,))
        return result.reshape(-1)

    def second(v: Tensor) -> Tensor:
        def speed(u: Tensor) -> Any:
            return torch.func.jvp(outputs, (u,), (v,))[1]

        found: Tensor = torch.func.jvp(speed, (centre,), (v,))[1]
        return found

    best = 0.0
    for seed in range(starts):
        v = torch.randn(len(centre), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        v, here = v / v.norm(), 0.0
        for _ in range(_SWEEPS):
            bent = second(v)
            if float(bent.norm()) <= here * (1 + 1e-4):
                break
            here = float(bent.norm())
            slope = torch.func.grad(lambda u, c=bent / here: (outputs(u) * c).sum())

            def times(w: np.ndarray, slope: Callable[[Tensor], Tensor] = slope) -> np.ndarray:
                pushed: Tensor = torch.func.jvp(slope, (centre,), (torch.as_tensor(w).reshape(-1),))[1]
                return pushed.numpy()

            operator = LinearOperator((len(v), len(v)), matvec=times, dtype=np.float64)
            v = torch.as_tensor(eigsh(operator, k=1, v0=v.numpy(), tol=1e-3)[1][:, 0].copy())
        best = max(best, float(second(v).norm()))
    return best
