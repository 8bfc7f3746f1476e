"""Common parts of several models: activations and poolings by name, scaled widths, checks of sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from surefoot.zoo.registry import ZooError, unknown

Activation: TypeAlias = str | Callable[[], nn.Module]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "celu": nn.CELU, "elu": nn.ELU, "gelu": nn.GELU, "gelu-tanh": partial(nn.GELU, approximate="tanh"),
    "identity": nn.Identity, "leaky-relu": nn.LeakyReLU, "mish": nn.Mish, "relu": nn.ReLU, "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU, "softplus": nn.Softplus, "softsign": nn.Softsign, "tanh": nn.Tanh,
}  # fmt: skip


def make_activation(choice: Activation) -> nn.Module:
    """A new activation module, from its name or from anything that makes one when called.

    Args:
        choice: a key of :data:`ACTIVATIONS`, a module class, or a function without arguments such as
            ``functools.partial(nn.Softplus, beta=10)``. An instance is refused: one module used in several
            places has one path only, and reports by module could not tell its uses apart.

    >>> make_activation("softplus"), make_activation(nn.Tanh)
    (Softplus(beta=1.0, threshold=20.0), Tanh())
    """
    if isinstance(choice, nn.Module):
        raise ZooError(
            f"activation is the module {choice!r} and would be shared by all layers: pass its class, or a "
            "function that makes a new one"
        )
    if isinstance(choice, str):
        if choice not in ACTIVATIONS:
            raise ZooError(unknown("activation", choice, ACTIVATIONS))
        return ACTIVATIONS[choice]()
    module = choice() if callable(choice) else None
    if not isinstance(module, nn.Module):
        raise ZooError(f"activation must be a name or make an nn.Module when called, not {choice!r}")
    return module


def make_pooling(choice: str, kernel: int, *, stride: int | None = None, padding: int = 0) -> nn.Module:
    """A pooling of images by name, ``"max"`` or ``"average"``; the stride defaults to the kernel.

    >>> make_pooling("average", 2)
    AvgPool2d(kernel_size=2, stride=2, padding=0)
    """
    if choice == "max":
        return nn.MaxPool2d(kernel, stride, padding)
    if choice == "average":
        return nn.AvgPool2d(kernel, stride, padding)
    raise ZooError(unknown("pooling", choice, ("max", "average")))


def scaled(channels: int, width: float) -> int:
    """The number of channels times the width multiplier, at least one.

    >>> scaled(64, 1.0), scaled(64, 0.125), scaled(64, 0.001)
    (64, 8, 1)
    """
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
