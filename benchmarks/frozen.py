"""What certificates of small models say, one row per model and domain, to compare code with earlier code.

``python -m benchmarks.frozen write`` measures all rows and writes them to ``tests/frozen.json``;
``python -m benchmarks.frozen`` measures them again and prints the quotients of proved steps and of constants.
Words after that restrict the rows to names that contain one of them. Weights and data come from fixed seeds, in
double precision. ``python -m benchmarks.frozen models`` does the same with the list of models of the zoo, and of
transformers where that is installed, whose output has a finite smoothness on a small ball.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf

FILE = Path(__file__).resolve().parent.parent / "tests" / "frozen.json"


class Convolutional(nn.Module):
    """One convolution of stride two, with batch normalisation or without, and a linear layer."""

    def __init__(self, activation: Callable[[], nn.Module], normalise: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False) if normalise else nn.Identity()
        self.activation, self.linear = activation(), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.activation(self.norm(self.convolution(x))).flatten(1))


class Residual(nn.Module):
    """Two residual blocks, with layer normalisation before each or without."""

    def __init__(self, normalise: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) if normalise else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            h = h + torch.tanh(block(norm(h)))
        return self.last(h)


class Attention(nn.Module):
    """A transformer block that normalises first, with GELU, one head, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.before, self.between = nn.LayerNorm(8), nn.LayerNorm(8)
        self.wide, self.narrow, self.last = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h)))
        x = x + self.narrow(F.gelu(self.wide(self.between(x))))
        return self.last(x.mean(1))


def perceptron(activation: Callable[[], nn.Module], *widths: int) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Case:
    """A model with its data and loss, and the domains on which it is certified."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of the inputs
    domains: tuple[Any, ...]  # None: the ball that is searched for
    loss: str = "cross entropy"
    classes: int = 3
    wrt: str = "params"
    efforts: tuple[str, ...] = ("normal", "high")

    def data(self) -> tuple[nn.Module, Tensor, nn.Module | None]:
        torch.manual_seed(sum(map(ord, self.name)))
        model, x = self.build().double(), torch.randn(*self.shape, dtype=torch.float64)
        labels = torch.arange(len(x)) % self.classes
        losses: dict[str, Callable[[], nn.Module | None]] = {
            "cross entropy": lambda: sf.CrossEntropy(labels),
            "square": lambda: sf.Square(torch.sin(torch.arange(len(x) * self.classes).double()).view(len(x), -1)),
            "reconstruction": lambda: sf.Square(x),
            "logistic": lambda: sf.objectives.SoftMargin((2.0 * (labels[:, None] % 2) - 1).double()),
            "none": lambda: None,
        }
        return model, x, losses[self.loss]()


AROUND = (None, sf.Ball(0.01), sf.Ball(0.1))
CASES = (
    Case("softplus 4-8-3", lambda: perceptron(nn.Softplus, 4, 8, 3), (32, 4), AROUND),
    Case("tanh 10-16-16-4", lambda: perceptron(nn.Tanh, 10, 16, 16, 4), (64, 10), AROUND, classes=4),
    Case("relu 6-12-3", lambda: perceptron(nn.ReLU, 6, 12, 3), (16, 6), (None, sf.Ball(0.0005))),
    Case("gelu 6-12-12-3", lambda: perceptron(nn.GELU, 6, 12, 12, 3), (32, 6), (None, sf.Ball(0.01))),
    Case("tanh 5 layers", lambda: perceptron(nn.Tanh, 8, 12, 12, 12, 12, 3), (32, 8), AROUND),
    Case("cnn softplus", lambda: Convolutional(nn.Softplus), (16, 1, 8, 8), AROUND),
    Case("cnn tanh", lambda: Convolutional(nn.Tanh), (16, 1, 8, 8), (None, sf.Ball(0.01))),
    Case("cnn batch norm", lambda: Convolutional(nn.Softplus, True), (16, 1, 8, 8), (None, sf.Ball(0.01))),
    Case("residual", lambda: Residual(False), (24, 6), (None, sf.Ball(0.01))),
    Case("layer norm", lambda: Residual(True), (24, 6), (None, sf.Ball(0.01))),
    Case("attention", Attention, (6, 5, 8), (None, sf.Ball(0.01))),
    Case("auto-encoder", lambda: perceptron(nn.Tanh, 8, 3, 8), (24, 8), (None, sf.Ball(0.01)), "reconstruction"),
    Case("square", lambda: perceptron(nn.Tanh, 5, 10, 2), (32, 5), (None, sf.Ball(0.1)), "square", 2),
    Case("sigmoid logistic", lambda: perceptron(nn.Sigmoid, 5, 8, 1), (32, 5), (None, sf.Ball(0.1)), "logistic"),
    Case("linear logistic", lambda: nn.Linear(5, 1), (32, 5), (None, sf.Ball(0.1)), "logistic", 2),
    Case(
        "wide tanh 32-64-10", lambda: perceptron(nn.Tanh, 32, 64, 10), (64, 32), (None, sf.Ball(0.01)),
        classes=10, efforts=("normal",),
    ),
    Case(
        "wide softplus 64-128-128-10", lambda: perceptron(nn.Softplus, 64, 128, 128, 10), (64, 64),
        (None, sf.Ball(0.01), sf.Ball(0.05)), classes=10, efforts=("normal",),
    ),
    Case(
        "tanh on products", lambda: perceptron(nn.Tanh, 6, 8, 3), (16, 6),
        (sf.ProductBall(1.0), sf.ProductBall(0.05, center="present")), efforts=("normal",),
    ),
    Case("network on products", lambda: perceptron(nn.Tanh, 6, 8, 3), (16, 6), (sf.ProductBall(1.0),), "none",
         efforts=("normal",)),
    Case("inputs tanh", lambda: perceptron(nn.Tanh, 6, 8, 3), (4, 6), (sf.Ball(0.1),), wrt="input"),
    Case("inputs of a network", lambda: perceptron(nn.Tanh, 6, 8, 3), (4, 6), (sf.Ball(0.1),), "none", wrt="input",
         efforts=("normal",)),
    *(
        Case(f"segment {name}", build, shape, (sf.Segment(None, 0.2), sf.Segment(None, 1.0)), efforts=("normal",))
        for name, build, shape in (
            ("softplus 4-8-3", lambda: perceptron(nn.Softplus, 4, 8, 3), (32, 4)),
            ("tanh 5 layers", lambda: perceptron(nn.Tanh, 8, 12, 12, 12, 12, 3), (32, 8)),
            ("cnn batch norm", lambda: Convolutional(nn.Softplus, True), (16, 1, 8, 8)),
            ("attention", Attention, (6, 5, 8)),
        )
    ),
)  # fmt: skip


def measure(case: Case, domain: Any, effort: str) -> dict[str, Any]:
    """The numbers of one certificate, and how many seconds it took."""
    model, x, loss = case.data()
    start = time.perf_counter()
    options: dict[str, Any] = {"objective": loss, "wrt": case.wrt, "effort": effort}
    certificate = sf.certify(model, x, domain=domain, **options)
    row: dict[str, Any] = {"seconds": time.perf_counter() - start}
    for name in ("bound", "lipschitz", "smoothness"):
        row[name] = float(getattr(certificate, name))
    row["step"], row["radius"] = certificate.step_size, certificate.radius
    if loss is not None:
        value = sf.evaluate(model, x, loss)
        row["value"], row["error"] = value.value, value.error
        if case.wrt == "params" and not isinstance(domain, sf.Segment | sf.ProductBall):
            row["at centre"] = float(sf.certify(model, x, domain=sf.Ball(0.0), **options).smoothness)
    return row


def rows(words: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case on every domain at every effort, by name."""
    for case in CASES:
        for domain in case.domains:
            for effort in case.efforts:
                name = f"{case.name} | {'searched' if domain is None else domain} | {effort}"
                if not words or any(word in name for word in words):
                    yield name, measure(case, domain, effort)


def models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    """The models of the zoo in small sizes, and those of transformers that the tests build, by name."""
    for name in sf.zoo.names():
        options = sf.zoo.small_options(name)

        def build(name: str = name, options: Any = options) -> tuple[nn.Module, Any]:
            torch.manual_seed(0)
            model = sf.zoo.build(name, **options).double()
            return model, sf.zoo.example_input(name, dtype=torch.float64, **options)

        yield f"zoo {name}", build
    try:
        others: Any = import_module("graph.test_transformers")
    except ImportError:
        return
    for name in others.MODELS:
        yield f"transformers {name}", partial(others.build, name)


def certified_models() -> dict[str, float]:
    """The smoothness of each of them within 1e-3 of its weights, where it has a certificate."""
    found = {}
    for name, build in models():
        try:
            found[name] = float(sf.certify(*build(), domain=sf.Ball(1e-3)).smoothness)
        except sf.errors.SurefootError as error:
            print(f"{name}: {error}")
        print(f"{name:40} {found.get(name)}", flush=True)
    return found


def quotient(now: float | None, before: float | None) -> float:
    """Of two numbers, 1 where both are zero or infinite alike."""
    if now is None or before is None:
        return math.nan
    return 1.0 if now == before else now / before if before else math.inf


def main(words: list[str]) -> None:
    """Write the file, or compare with it."""
    warnings.simplefilter("ignore")
    if words[-1:] == ["models"]:
        old, new = json.loads(FILE.read_text()), certified_models()
        print("missing:", sorted(set(old.get("models", {})) - set(new)))
        if words[:1] == ["write"]:
            FILE.write_text(json.dumps(old | {"models": new}, indent=1) + "\n")
        return
    if words[:1] == ["write"]:
        found = json.loads(FILE.read_text()) if words[1:] and FILE.exists() else {}
        for name, row in rows(words[1:]):
            found[name] = row
            print(f"{name:70} step {row['step']:.4g} L {row['smoothness']:.4g} {row['seconds']:.1f}s", flush=True)
            FILE.write_text(json.dumps(found, indent=1) + "\n")
        return
    before, steps = json.loads(FILE.read_text()), []
    print(f"{'case':62}{'step':>8}{'L':>8}{'L(0)':>8}{'l':>8}{'seconds':>9}")
    for name, row in rows(words):
        old = before[name]
        ratios = [quotient(row.get(key), old.get(key)) for key in ("step", "smoothness", "at centre", "lipschitz")]
        if "searched" in name:
            steps.append(ratios[0])
        print(f"{name:62}" + "".join(f"{ratio:8.3f}" for ratio in ratios) + f"{row['seconds']:9.2f}", flush=True)
    if steps:
        print(f"proved steps of searched balls: median {median(steps):.3f}, least {min(steps):.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
