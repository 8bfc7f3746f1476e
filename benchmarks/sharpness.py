"""Sharpness: the longest gradient step that a ball proves, of networks of several kinds.

64 of scikit-learn's digits, cross-entropy, PyTorch's default weights, double precision, high effort. The step is
measured in units of one over the norm of the second derivative at the weights, which Lanczos iterations find.

``python -m benchmarks.sharpness`` prints the table; with names of networks behind it, theirs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import surefoot as sf
from benchmarks.tightness import digits, gradient_seconds, second_derivative_norm
from surefoot.calculus.adjoint.bounds import Centre, dense_centre
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.effort import HIGH
from surefoot.certificate.proving import bounds_of, longest_proved, with_gradient_step
from surefoot.lower import curvature_at_weights

SAMPLES = 64
MOST_AT_CENTRE = 3.0
MOST_WIDE, MOST_GRADIENTS = 10.0, 2000


class Residual(nn.Module):
    """A convolution, a residual block of two, an average and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 10)
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """From images to logits."""
        x = nn.functional.gelu(self.stem(x))
        x = x + self.second(nn.functional.gelu(self.first(x)))
        out: Tensor = self.out(x.mean((2, 3)))
        return out


class Transformer(nn.Module):
    """The rows of an image as tokens, one pre-norm layer, an average and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, 16), nn.Linear(16, 10)
        self.position = nn.Parameter(0.02 * torch.randn(8, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """From images to logits."""
        out: Tensor = self.out(self.layer(self.embed(x.flatten(1, 2)) + self.position).mean(1))
        return out


def perceptron(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh, norm: bool = False) -> nn.Module:
    """Linear layers with activations between them, and layer normalisation if asked for."""
    parts: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), *([nn.LayerNorm(outputs)] if norm else []), activation()]
    return nn.Sequential(*parts, nn.Linear(widths[-1], 10))


def convolutional(activation: Callable[[], nn.Module], norm: bool = False) -> nn.Module:
    """Two convolutions with 8 and 16 channels, an average and a linear layer."""
    parts: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        parts += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            *([nn.BatchNorm2d(outputs)] if norm else []),
            activation(),
        ]
    return nn.Sequential(*parts, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "MLP tanh 64-64-64-10": (lambda: perceptron(64, 64, 64), 0.3),
    "MLP tanh 64-256-256-10": (lambda: perceptron(64, 256, 256), 0.3),
    "8 layers tanh, width 64": (lambda: perceptron(*[64] * 8), 0.3),
    "CNN soft-plus, 8 and 16 channels": (lambda: convolutional(nn.Softplus), 0.15),
    "CNN tanh, 8 and 16 channels": (lambda: convolutional(nn.Tanh), 0.15),
    "residual CNN GELU": (Residual, 0.1),
    "MLP GELU, layer norm": (lambda: perceptron(64, 64, 64, activation=nn.GELU, norm=True), 0.1),
    "CNN GELU, batch norm (train)": (lambda: convolutional(nn.GELU, norm=True), 0.02),
    "pre-norm transformer layer, width 16": (Transformer, 0.02),
}


@dataclass(frozen=True)
class Sharpness:
    """One network.

    Attributes:
        network: its name.
        numbers: how many numbers vary.
        by_balls: the longest step that balls prove, times the norm of the second derivative at the weights.
        step: the longest proved step, on the segment against the gradient if that is longer, times the same.
        target: for that.
        centre: the smoothness proved at the weights over the norm there.
        cost: in gradients, measured in processor time.
        stated: the same as the certificate states it.
    """

    network: str
    numbers: int
    by_balls: float
    step: float
    target: float
    centre: float
    cost: float
    stated: int


def measured(name: str, seed: int = 0) -> Sharpness:
    """One row."""
    x, y = digits()
    x, y = x[:SAMPLES].reshape(-1, 1, 8, 8), y[:SAMPLES]
    torch.manual_seed(seed)
    make, target = NETWORKS[name]
    model, objective = make().double(), sf.CrossEntropy(y)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        norm = second_derivative_norm(model, x, objective)
        gradient = gradient_seconds(model, x, objective)
    start = time.process_time()
    analysis = Analysis.of(model, x, objective)
    centre = Centre(HIGH, dense_centre(analysis.over(sf.Ball(0.0)), HIGH))
    tried = []

    def on(ball: sf.Ball) -> sf.Certificate:
        tried.append(bounds_of(analysis.over(ball), ball, "params", centre).certificate)
        return tried[-1]

    balls = longest_proved(on, HIGH)  # as surefoot.certify(…, effort="high") does
    best = with_gradient_step(balls, analysis, centre)
    cost = (time.process_time() - start) / gradient
    numbers = sum(parameter.numel() for parameter in model.parameters())
    ratio, stated = float(tried[0].smoothness) / norm, best.gradients or 0
    steps = balls.step_size * norm, best.step_size * norm
    return Sharpness(name, numbers, *steps, target, ratio, cost, stated)


@dataclass(frozen=True)
class Width:
    """The smoothness proved at the weights with normal effort over the norm there, for one width."""

    width: int
    centre: float
    cost: float
    stated: int


def of_width(width: int) -> Width:
    """Five linear layers with tanh between them."""
    x, y = digits()
    x, y = x[:SAMPLES], y[:SAMPLES]
    torch.manual_seed(0)
    model, objective = perceptron(64, *[width] * 4).double(), sf.CrossEntropy(y)
    norm = second_derivative_norm(model, x, objective)
    gradient = gradient_seconds(model, x, objective)
    sf.certify(model, x, objective=objective, domain=sf.Ball(0.0), effort="quick")  # captures the model
    start = time.process_time()
    found = sf.certify(model, x, objective=objective, domain=sf.Ball(0.0))
    cost = (time.process_time() - start) / gradient
    return Width(width, float(found.smoothness) / norm, cost, found.gradients or 0)


@dataclass(frozen=True)
class Wide:
    """A network that is too wide to follow every direction: what is said of it at the weights.

    Attributes:
        network: its name.
        numbers: how many numbers vary.
        norm: a lower bound of the norm of the second derivative, by Lanczos iterations.
        proved: the smoothness that is proved, over that.
        by_norms: the same with products of norms.
        cost: in gradients, measured in processor time.
        stated: the same as the certificate states it.
    """

    network: str
    numbers: int
    norm: float
    proved: float
    by_norms: float
    cost: float
    stated: int


def of_resnet() -> Wide:
    """ResNet-18 made smooth, in evaluation mode, with ten classes, on 16 random images of 32×32."""
    torch.manual_seed(0)
    model = sf.zoo.build("resnet18-smooth", num_classes=10).double().eval()
    x, objective = torch.randn(16, 3, 32, 32).double(), sf.CrossEntropy(torch.randint(0, 10, (16,)))
    gradient, ball = gradient_seconds(model, x, objective), sf.Ball(0.0)
    norms = sf.certify(model, x, objective=objective, domain=ball, effort="quick")  # captures the model
    start = time.process_time()
    found = sf.certify(model, x, objective=objective, domain=ball, effort="high")
    cost = (time.process_time() - start) / gradient
    norm = float(curvature_at_weights(model, x, objective, 24) or 0.0)
    sizes = [float(each) / norm for each in (found.smoothness, norms.smoothness)]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return Wide("ResNet-18, soft-plus, evaluation", numbers, norm, *sizes, cost, found.gradients or 0)


def wide_line(row: Wide) -> str:
    """A row as a line of the table."""
    met = row.proved <= MOST_WIDE and row.cost <= MOST_GRADIENTS
    proved = f"**{row.proved:.3g}** | ≤ {MOST_WIDE:g} in {MOST_GRADIENTS:,}{'' if met else ' (missed)'}"
    sizes = f"{row.numbers:,} | {row.norm:.3g} | {row.by_norms:,.0f}"
    return f"| {row.network} | {sizes} | {proved} | {row.cost:,.0f} | {row.stated:,} |"


def line(row: Sharpness) -> str:
    """A row as a line of the table."""
    missed = "" if row.step >= row.target else " (missed)"
    step = f"{row.by_balls:.2g} | **{row.step:.2g}** | ≥ {row.target:g}{missed}"
    centre = f"**{row.centre:.3g}** | ≤ {MOST_AT_CENTRE:g}{'' if row.centre <= MOST_AT_CENTRE else ' (missed)'}"
    return f"| {row.network} | {row.numbers:,} | {step} | {centre} | {row.cost:,.0f} | {row.stated:,} |"


if __name__ == "__main__":
    for name in sys.argv[1:] or list(NETWORKS):
        print(line(measured(name)), flush=True)
