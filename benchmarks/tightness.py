"""How far certificates are from the truth: the tables of ``docs/tightness.md``.

Cross-entropy of scikit-learn's digits, PyTorch's default weights, double precision. The norm of the second
derivative at the weights is measured by Lanczos iterations on its products with vectors: a lower bound of what is
certified on any ball around the weights, and at radius 0 the very number. Costs are in processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import surefoot as sf
from benchmarks.networks import Recurrent, Residual, convolutional, images, perceptron
from benchmarks.runner import Case, aim, benchmark
from benchmarks.timing import gradient_seconds, seconds

TARGETS = {(0.0, "soft-plus"): 3.0, (0.0, "tanh"): 10.0, (0.03, "soft-plus"): 6.0, (0.03, "tanh"): 25.0}


class Transformer(nn.Module):
    """The rows of an image as tokens, one pre-norm layer, an average and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, 16), nn.Linear(16, 10)
        self.position = nn.Parameter(0.02 * torch.randn(8, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.embed(x.flatten(1, 2)) + self.position).mean(1))
        return out


def residual_gelu() -> nn.Module:
    """A convolution, a residual block of two, an average and a linear layer."""
    stem = (nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), Residual(8, "GELU", norm=False))
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "MLP tanh 64-64-64-10": (partial(perceptron, 64, 64, 64, 10), 0.3),
    "MLP tanh 64-256-256-10": (partial(perceptron, 64, 256, 256, 10), 0.3),
    "8 layers tanh, width 64": (partial(perceptron, *[64] * 8, 10), 0.3),
    "CNN soft-plus, 8 and 16 channels": (partial(convolutional, "soft-plus", pool=""), 0.15),
    "CNN tanh, 8 and 16 channels": (partial(convolutional, "tanh", pool=""), 0.15),
    "residual CNN GELU": (residual_gelu, 0.1),
    "MLP GELU, layer norm": (partial(perceptron, 64, 64, 64, 10, activation="GELU", norm=True), 0.1),
    "CNN GELU, batch norm (train)": (partial(convolutional, "GELU", norm=True, pool=""), 0.02),
    "pre-norm transformer layer, width 16": (Transformer, 0.02),
}


def second_derivative_norm(model: nn.Module, x: Tensor, objective: Any) -> float:
    """The largest absolute eigenvalue of the second derivative at the weights, by Lanczos iterations."""
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
        slopes = torch.autograd.grad(objective(model(x)), parameters, create_graph=True)
        slope = torch.cat([s.reshape(-1) for s in slopes])

        def product(v: np.ndarray) -> np.ndarray:
            pulled = torch.autograd.grad(slope, parameters, torch.from_numpy(v.reshape(-1)), retain_graph=True)
            return torch.cat([p.reshape(-1) for p in pulled]).numpy()

        operator = LinearOperator((len(slope), len(slope)), matvec=product, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(len(slope))
        return float(abs(eigsh(operator, k=1, which="LM", v0=start, return_eigenvectors=False, tol=1e-8)[0]))


class Subject:
    """A model with digits, the norm of its second derivative, and certificates with their costs in gradients."""

    def __init__(self, build: Callable[[], nn.Module], samples: int = 64, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = build().double()
        self.x, y = images("digits", samples)
        self.x, self.objective = self.x.reshape(-1, 1, 8, 8), sf.CrossEntropy(y)
        self.norm = second_derivative_norm(self.model, self.x, self.objective)
        self.gradient = gradient_seconds(self.model, lambda: self.objective(self.model(self.x)))
        self.certify(domain=sf.Ball(0.0), effort="quick")  # captures the model

    def certify(self, **options: Any) -> tuple[sf.Certificate, float]:
        found: list[sf.Certificate] = []
        time = seconds(lambda: found.append(sf.certify(self.model, self.x, objective=self.objective, **options)))
        return found[0], time / self.gradient


@benchmark("tightness", "tightness", "activation | radius | linear layers | ratio, median | worst | target | "
           "cost in gradients, median")  # fmt: skip
def tightness() -> Iterator[Case]:
    """Perceptrons of width 64 on 256 digits, three seeds: smoothness over a ball over the norm at the weights."""
    for activation in ("soft-plus", "tanh"):
        for radius in (0.0, 0.03):
            for layers in (2, 3, 5, 8):
                label = f"{activation}, {layers} layers, radius {radius:g}"
                yield label, partial(_ratios, activation, layers, radius)


def _ratios(activation: str, layers: int, radius: float) -> list[str]:
    found = []
    for seed in range(3):
        subject = Subject(partial(perceptron, *[64] * layers, 10, activation=activation), 256, seed)
        certificate, cost = subject.certify(domain=sf.Ball(radius))
        found.append((float(certificate.smoothness) / subject.norm, cost))
    ratios, costs = zip(*found, strict=True)
    target, worst = aim(max(ratios), most=TARGETS[radius, activation]), f"{max(ratios):.2f}"
    return [
        activation,
        f"{radius:g}",
        str(layers),
        f"**{median(ratios):.2f}**",
        worst,
        target,
        f"{median(costs):.0f}",
    ]


@benchmark("sharpness", "tightness", "network | numbers | by balls | step | target | at the weights | target | "
           "cost | stated")  # fmt: skip
def sharpness() -> Iterator[Case]:
    """The longest gradient step that is proved, times the norm of the second derivative at the weights."""
    yield from ((name, partial(_sharp, name)) for name in NETWORKS)


def _sharp(name: str) -> list[str]:
    build, target = NETWORKS[name]
    subject = Subject(build)
    found, cost = subject.certify(effort="high")
    centre, _ = subject.certify(domain=sf.Ball(0.0), effort="high")
    step, ratio = found.step_size * subject.norm, float(centre.smoothness) / subject.norm
    balls = min(1 / float(found.one_step or found.smoothness), found.step_size) * subject.norm
    numbers = sum(parameter.numel() for parameter in subject.model.parameters())
    cells = [f"{balls:.2g}", f"**{step:.2g}**", aim(step, least=target), f"**{ratio:.3g}**", aim(ratio, most=3)]
    return [name, f"{numbers:,}", *cells, f"{cost:,.0f}", f"{found.gradients or 0:,}"]


@benchmark("width", "tightness", "width | at the weights | cost | stated")
def width() -> Iterator[Case]:
    """Five linear layers with tanh between them, normal effort: the smoothness at the weights over the norm."""
    yield from ((str(size), partial(_width, size)) for size in (64, 128, 136, 168, 256, 512))


def _width(size: int) -> list[str]:
    subject = Subject(partial(perceptron, 64, *[size] * 4, 10))
    found, cost = subject.certify(domain=sf.Ball(0.0))
    ratio = float(found.smoothness) / subject.norm
    return [str(size), f"**{ratio:.3g}**", f"{cost:,.0f}", f"{found.gradients or 0:,}"]


@benchmark("wide", "tightness", "network | numbers | norm | norms only | proved | target | cost | stated")
def wide() -> Iterator[Case]:
    """A network that is too wide to follow every direction: what is said of it at the weights."""
    yield "ResNet-18, soft-plus, evaluation", _resnet


def _resnet() -> list[str]:
    """ResNet-18 made smooth, in evaluation mode, with ten classes, on 16 random images of 32×32."""
    torch.manual_seed(0)
    model = sf.zoo.build("resnet18-smooth", num_classes=10).double().eval()
    x, objective = torch.randn(16, 3, 32, 32).double(), sf.CrossEntropy(torch.randint(0, 10, (16,)))
    gradient, ball = gradient_seconds(model, lambda: objective(model(x))), sf.Ball(0.0)
    norms = sf.certify(model, x, objective=objective, domain=ball, effort="quick")
    found: list[sf.Certificate] = []
    high = partial(sf.certify, model, x, objective=objective, domain=ball, effort="high")
    cost = seconds(lambda: found.append(high())) / gradient
    norm = second_derivative_norm(model, x, objective)
    ratio = float(found[0].smoothness) / norm
    target = f"≤ 10 in 2,000{'' if ratio <= 10 and cost <= 2000 else ' (missed)'}"
    numbers = sum(parameter.numel() for parameter in model.parameters())
    sizes = [f"{numbers:,}", f"{norm:.3g}", f"{float(norms.smoothness) / norm:,.0f}"]
    ends = [f"**{ratio:.3g}**", target, f"{cost:,.0f}", f"{found[0].gradients or 0:,}"]
    return ["ResNet-18, soft-plus, evaluation", *sizes, *ends]


def _encoder(layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


A_PRIORI: dict[str, tuple[Callable[[int], nn.Module], int, str]] = {
    "RNN, tanh": (lambda _: Recurrent(nn.RNN(8, 16, batch_first=True), 16), 50, "step"),
    "GRU": (lambda _: Recurrent(nn.GRU(8, 16, batch_first=True), 16), 50, "step"),
    "LSTM": (lambda _: Recurrent(nn.LSTM(8, 16, batch_first=True), 16), 50, "step"),
    "encoder, post-norm": (_encoder, 4, "layer"),
}


@benchmark("a-priori", "tightness", "network | depth | ℓ | L | growth of ℓ")
def a_priori() -> Iterator[Case]:
    """Every block within 1 of the origin, four sequences: constants before any weights are known."""
    yield from ((name, partial(_before, name)) for name in A_PRIORI)


def _before(name: str) -> list[str]:
    build, deep, unit = A_PRIORI[name]

    def certified(depth: int) -> sf.Certificate:
        torch.manual_seed(0)
        model, shape = build(depth).double(), (4, 6, 16) if unit == "layer" else (4, depth, 8)
        return sf.certify(model, torch.randn(*shape, dtype=torch.float64), domain=sf.ProductBall(1.0))

    whole, half = certified(deep), certified(deep // 2)
    growth = float(whole.lipschitz / half.lipschitz) ** (1 / (deep - deep // 2))
    sizes = [f"{whole.lipschitz:.1e}", f"{whole.smoothness:.1e}"]
    return [name, f"{deep} {unit}s", *sizes, f"{growth:.3g} per {unit}"]
