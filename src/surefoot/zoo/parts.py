"""Parts of several models: activations and poolings by name, widths, checks of what a model is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from surefoot.errors import SurefootError

Activation: TypeAlias = str | Callable[[], nn.Module]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "celu": nn.CELU, "elu": nn.ELU, "gelu": nn.GELU, "gelu-tanh": partial(nn.GELU, approximate="tanh"),
    "identity": nn.Identity, "leaky-relu": nn.LeakyReLU, "mish": nn.Mish, "relu": nn.ReLU, "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU, "softplus": nn.Softplus, "softsign": nn.Softsign, "tanh": nn.Tanh,
}  # fmt: skip


class ZooError(SurefootError, ValueError):
    """A model of the zoo was asked for in a way it cannot be built, or fed an input it cannot take."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> ZooError:
    """The error for a name that is not in a list, with the closest match and the whole list.

    >>> print(unknown("activation", "softpuls", ["relu", "softplus"]))
    there is no activation 'softpuls': did you mean 'softplus'? There are: relu, softplus.
    """
    listed = list(choices)
    close = difflib.get_close_matches(str(name).lower(), listed, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return ZooError(f"there is no {kind} {name!r}{hint} There are: {', '.join(listed)}.")


def make_activation(choice: Activation) -> nn.Module:
    """A new activation, from a key of :data:`ACTIVATIONS` or from what makes a module when it is called.

    >>> make_activation("softplus"), make_activation(nn.Tanh)
    (Softplus(beta=1.0, threshold=20.0), Tanh())
    """
    if isinstance(choice, nn.Module):
        # One module in several places has one path only, and reports could not tell its uses apart.
        raise ZooError(f"the module {choice!r} would be shared by all layers: pass its class, or a function")
    if isinstance(choice, str) and choice not in ACTIVATIONS:
        raise unknown("activation", choice, ACTIVATIONS)
    make = ACTIVATIONS[choice] if isinstance(choice, str) else choice
    module = make() if callable(make) else None
    if not isinstance(module, nn.Module):
        raise ZooError(f"activation must be a name or make an nn.Module when called, not {choice!r}")
    return module


def make_pooling(choice: str, kernel: int, stride: int | None = None, padding: int = 0) -> nn.Module:
    """A pooling of images, ``"max"`` or ``"average"``; the stride defaults to the kernel."""
    kinds = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}
    if choice not in kinds:
        raise unknown("pooling", choice, kinds)
    return kinds[choice](kernel, stride, padding)


def stem(in_channels: int, channels: int, small: bool, activation: Activation, pooling: str) -> nn.Sequential:
    """The first layers of a network for images: 7×7 and a pooling, or 3×3 alone if the images are small."""
    kernel, stride = (3, 1) if small else (7, 2)
    layers = nn.Sequential()
    layers.convolution = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False)
    layers.normalization = nn.BatchNorm2d(channels)
    layers.activation = make_activation(activation)
    if not small:
        layers.pooling = make_pooling(pooling, 3, stride=2, padding=1)
    return layers


def scaled(channels: int, width: float) -> int:
    """Channels times the width multiplier, at least one."""
    if not width > 0:
        raise ZooError(f"width is a multiplier of the number of channels and must be positive, not {width}")
    return max(1, round(channels * width))


def check_sizes(sizes: Sequence[int], what: str) -> tuple[int, ...]:
    """Layer sizes as a tuple: the input's and at least one layer's, all positive."""
    checked = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    if len(checked) < 2 or not all(isinstance(size, int) and size >= 1 for size in checked):
        raise ZooError(f"{what}: sizes lists the input's size and that of each layer, all positive: not {checked}")
    return checked


def check_image(x: torch.Tensor, channels: int, size: int, what: str) -> None:
    """Refuse images of another size than the network was built for."""
    if tuple(x.shape[1:]) != (channels, size, size):
        raise ZooError(
            f"{what} was built for images of shape (batch, {channels}, {size}, {size}) and got "
            f"{tuple(x.shape)}: build it with in_channels and image_size of your images"
        )
