"""Densely connected networks for images (Huang, Liu, van der Maaten and Weinberger, 2016)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from surefoot.zoo.parts import Activation, ZooError, make_activation, stem

_BOTTLENECK = 4


def _layer(inputs: int, outputs: int, kernel: int, activation: Activation) -> nn.Sequential:
    """Batch-normalisation, activation, convolution without intercept: the order of DenseNet."""
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    layers = {"normalization": nn.BatchNorm2d(inputs), "activation": make_activation(activation)}
    return nn.Sequential(OrderedDict(**layers, convolution=convolution))


class DenseBlock(nn.Module):
    """Layers that each read all features so far and add ``growth`` of their own."""

    def __init__(self, inputs: int, layers: int, growth: int, activation: Activation) -> None:
        super().__init__()
        hidden = _BOTTLENECK * growth
        self.layers = nn.ModuleList()
        for n in range(inputs, inputs + layers * growth, growth):
            self.layers.append(
                nn.Sequential(_layer(n, hidden, 1, activation), _layer(hidden, growth, 3, activation))
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat((x, layer(x)), dim=1)
        return x


def densenet121(
    num_classes: int = 1000,
    growth: int = 32,
    blocks: Sequence[int] = (6, 12, 24, 16),
    in_channels: int = 3,
    small_input: bool = False,
    activation: Activation = "relu",
    pooling: str = "max",
) -> nn.Sequential:
    """DenseNet-121: four dense blocks whose layers read all features before them; images of any size.

    Args:
        growth: number of features that each layer adds; the stem makes twice as many.
        blocks: number of layers in each dense block; the default is the network of 121 layers.
        small_input: whether images are about 32×32: then the stem is one 3×3 convolution, without pooling.
        pooling: pooling of the stem, ``"max"`` or ``"average"``; the transitions always average.
    """
    if growth < 1 or not blocks or min(blocks) < 1:
        raise ZooError(f"densenet121: growth and blocks must be positive, not {growth} and {tuple(blocks)}")
    model, channels = nn.Sequential(), 2 * growth
    model.stem = stem(in_channels, channels, small_input, activation, pooling)
    for number, layers in enumerate(blocks):
        model.add_module(f"block{number}", DenseBlock(channels, layers, growth, activation))
        channels += layers * growth
        if number < len(blocks) - 1:
            halve = _layer(channels, channels // 2, 1, activation).append(nn.AvgPool2d(2))
            model.add_module(f"transition{number}", halve)
            channels //= 2
    # The last transition, to the classifier, only normalises: there is nothing left to halve.
    model.normalization = nn.BatchNorm2d(channels)
    model.activation = make_activation(activation)
    model.pooling = nn.AdaptiveAvgPool2d(1)
    model.flatten = nn.Flatten()
    model.classifier = nn.Linear(channels, num_classes)
    return model
