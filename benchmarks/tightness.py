"""Tightness: certified smoothness of objectives over the norm of the second derivative at the weights.

Perceptrons of width 64 with default weights on 256 of scikit-learn's digits (pixels between 0 and 1),
cross-entropy, double precision. The second derivative is measured by Lanczos iterations on its products with
vectors; a lower bound of what is certified on any ball around the weights, and at radius 0 the very number.

``python -m benchmarks.tightness`` prints the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

import surefoot as sf

LAYERS = (2, 3, 5, 8)
ACTIVATIONS = {"softplus": nn.Softplus, "tanh": nn.Tanh}
TARGETS = {(0.0, "softplus"): 3.0, (0.0, "tanh"): 10.0, (0.03, "softplus"): 6.0, (0.03, "tanh"): 25.0}
SAMPLES, WIDTH, CLASSES = 256, 64, 10


@dataclass(frozen=True)
class Tightness:
    """One certificate.

    Attributes:
        activation: of the perceptron.
        layers: how many linear ones.
        radius: of the ball around the weights.
        certified: the smoothness over the ball.
        measured: the norm of the second derivative at the weights.
        target: for their ratio.
        seconds: how long the certificate took, in processor time.
        gradient: how long a gradient took.
    """

    activation: str
    layers: int
    radius: float
    certified: float
    measured: float
    target: float
    seconds: float
    gradient: float

    @property
    def ratio(self) -> float:
        """How many times too large the certificate is at most."""
        return self.certified / self.measured


def rows(seed: int = 0) -> Iterator[Tightness]:
    """Every activation, depth and radius, with the weights of one seed."""
    for name in ACTIVATIONS:
        for layers in LAYERS:
            yield from rows_of(name, layers, seed)


def rows_of(name: str, layers: int, seed: int) -> list[Tightness]:
    """Every radius, with one activation and depth and the weights of one seed."""
    x, y = digits()
    torch.manual_seed(seed)
    model, found = perceptron(layers, name), []
    objective = sf.CrossEntropy(y)
    measured, gradient = second_derivative_norm(model, x, objective), gradient_seconds(model, x, objective)
    sf.certify(model, x, objective=objective, domain=sf.Ball(0.0), effort="quick")  # captures the model
    for radius in (0.0, 0.03):
        start = time.process_time()
        certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(radius))
        seconds = time.process_time() - start
        certified, target = float(certificate.smoothness), TARGETS[radius, name]
        found.append(Tightness(name, layers, radius, certified, measured, target, seconds, gradient))
    return found


def digits() -> tuple[Tensor, Tensor]:
    """The first digits of scikit-learn's copy, and their classes."""
    from sklearn.datasets import load_digits  # not a dependency of the package

    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images[:SAMPLES] / 16).double(), torch.tensor(classes[:SAMPLES])


def perceptron(layers: int, activation: str) -> nn.Module:
    """Linear layers with an activation between them, as torch initialises them."""
    parts: list[nn.Module] = []
    for k in range(layers):
        last = k == layers - 1
        parts.append(nn.Linear(WIDTH, CLASSES if last else WIDTH))
        if not last:
            parts.append(ACTIVATIONS[activation]())
    return nn.Sequential(*parts).double()


def second_derivative_norm(model: nn.Module, x: Tensor, objective: nn.Module) -> float:
    """The largest absolute eigenvalue of the second derivative at the weights, found by Lanczos iterations."""
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(objective(model(x)), parameters, create_graph=True)
    slope = torch.cat([s.reshape(-1) for s in slopes])

    def product(v: np.ndarray) -> np.ndarray:
        pulled = torch.autograd.grad(slope, parameters, torch.from_numpy(v.reshape(-1)), retain_graph=True)
        return torch.cat([p.reshape(-1) for p in pulled]).numpy()

    operator = LinearOperator((len(slope), len(slope)), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(len(slope))
    return float(abs(eigsh(operator, k=1, which="LM", v0=start, return_eigenvectors=False, tol=1e-8)[0]))


def gradient_seconds(model: nn.Module, x: Tensor, objective: nn.Module) -> float:
    """The shortest of several durations of a gradient, in processor time."""
    parameters, found = list(model.parameters()), []
    for _ in range(20):
        start = time.process_time()
        torch.autograd.grad(objective(model(x)), parameters)
        found.append(time.process_time() - start)
    return min(found)


def table(measured: Iterator[Tightness]) -> Iterator[str]:
    """The lines of the table, as they come."""
    yield "| activation | layers | radius | certified | at the weights | ratio | target | seconds | gradients |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for m in measured:
        sizes = f"{m.certified:.4g} | {m.measured:.4g} | **{m.ratio:.2f}** | ≤ {m.target:g}"
        cost = f"{m.seconds:.2f} | {m.seconds / m.gradient:.0f}"
        yield f"| {m.activation} | {m.layers} | {m.radius:g} | {sizes} | {cost} |"


if __name__ == "__main__":
    for line in table(rows()):
        print(line, flush=True)
