"""Gauss-Newton steps and products against gradients of the same model.

The baseline is one forward pass and ``torch.autograd.grad`` of the loss, in single precision on one thread. A
step is solved until the gradient of its model, measured by automatic differentiation, is 1e-6 of that at 0. A
product is one pull-back and one push-forward at a point where derivatives were taken before, with the curvature
of the loss between them. Other packages are measured in :mod:`benchmarks.peers`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from benchmarks.timing import Measurement, compare
from surefoot.oracles.problem import Problem

STEP, PRODUCT = 12.0, 1.6
TOLERANCE = 1e-6


def run() -> list[Measurement]:
    """A perceptron and a small convolutional network, for a strong and a weak damping."""
    return [m for name, model, x, pairs in networks() for m in _measure(name, model, x, pairs)]


def networks() -> list[tuple[str, nn.Module, Tensor, int]]:
    """What is measured: a title, the model, its batch, and how many pairs of runs."""
    torch.manual_seed(0)
    perceptron = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 10))
    images = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 49, 10),
    )  # fmt: skip
    return [
        ("MLP 784-256-128-10, batch 128", perceptron, torch.randn(128, 784), 21),
        ("CNN 8-16 on 28×28, batch 64", images, torch.randn(64, 1, 28, 28), 9),
    ]


def _measure(name: str, model: nn.Module, x: Tensor, pairs: int) -> list[Measurement]:
    y = torch.randint(0, 10, (len(x),))
    chain, objective, parameters = sf.Chain(model, x), sf.CrossEntropy(y), list(model.parameters())

    def gradient() -> object:
        return torch.autograd.grad(F.cross_entropy(model(x), y), parameters)

    found = []
    for kappa in (0.1, 1e-3):

        def step(kappa: float = kappa) -> object:
            result = sf.oracles.gauss_newton(chain, objective, kappa, method="dual_gram", tolerance=TOLERANCE)
            assert result.residual is not None, result.status
            assert result.residual <= TOLERANCE, result.status
            return result

        subject = f"{name}: Gauss-Newton step, κ = {kappa:g}"
        found.append(compare(subject, step, "gradient", gradient, target=STEP, pairs=pairs))
    problem = Problem(chain, objective)
    direction = {path: torch.randn_like(value) for path, value in problem.parameters.items()}

    def product() -> object:
        return problem.autodiff.pullback(problem.curve(problem.autodiff.pushforward(direction)))

    subject = f"{name}: Gauss-Newton-vector product"
    found.append(compare(subject, product, "gradient", gradient, target=PRODUCT, pairs=pairs, calls=2))
    return found


if __name__ == "__main__":
    for m in run():
        print(f"{m.subject}: {m.ratio:.2f} gradients [{m.low:.2f}, {m.high:.2f}], target {m.target}")
