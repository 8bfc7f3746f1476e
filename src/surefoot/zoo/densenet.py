"""Densely connected networks for images (Huang, Liu, van der Maaten and Weinberger, 2016)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from surefoot.zoo.parts import Activation, make_activation, make_pooling
from surefoot.zoo.registry import ZooError, image_of_any_size, register

_BOTTLENECK = 4


class NormConvolution(nn.Sequential):
    """Batch-normalisation, activation, convolution without intercept: the order of DenseNet."""

    def __init__(self, inputs: int, outputs: int, kernel: int, activation: Activation, norm_eps: float) -> None:
        super().__init__(
            OrderedDict(
                normalization=nn.BatchNorm2d(inputs, eps=norm_eps),
                activation=make_activation(activation),
                convolution=nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
            )
        )


class DenseBlock(nn.Module):
    """Layers that each read all features so far and add ``growth`` of their own."""

    def __init__(self, inputs: int, layers: int, growth: int, activation: Activation, norm_eps: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                NormConvolution(inputs + layer * growth, _BOTTLENECK * growth, 1, activation, norm_eps),
                NormConvolution(_BOTTLENECK * growth, growth, 3, activation, norm_eps),
            )
            for layer in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The features of the block: its input and what each layer added, side by side."""
        for layer in self.layers:
            x = torch.cat((x, layer(x)), dim=1)
        return x


class DenseNet(nn.Module):
    """Stem, dense blocks with transitions between them, mean over positions, linear ``classifier``."""

    def __init__(
        self,
        blocks: Sequence[int],
        growth: int,
        num_classes: int,
        in_channels: int,
        small_input: bool,
        activation: Activation,
        pooling: str,
        norm_eps: float,
    ) -> None:
        super().__init__()
        channels = 2 * growth
        kernel, stride = (3, 1) if small_input else (7, 2)
        stem = OrderedDict[str, nn.Module](
            convolution=nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False),
            normalization=nn.BatchNorm2d(channels, eps=norm_eps),
            activation=make_activation(activation),
        )
        if not small_input:
            stem["pooling"] = make_pooling(pooling, 3, stride=2, padding=1)
        self.stem = nn.Sequential(stem)

        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for position, layers in enumerate(blocks):
            self.blocks.append(DenseBlock(channels, layers, growth, activation, norm_eps))
            channels += layers * growth
            if position < len(blocks) - 1:
                halve = NormConvolution(channels, channels // 2, 1, activation, norm_eps)
                halve.append(nn.AvgPool2d(2))
                self.transitions.append(halve)
                channels //= 2
        # The last transition, to the classifier, only normalises: there is nothing left to halve.
        self.normalization = nn.BatchNorm2d(channels, eps=norm_eps)
        self.activation = make_activation(activation)
        self.pooling = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images ``(batch, in_channels, height, width)`` to logits ``(batch, num_classes)``."""
        x = self.blocks[0](self.stem(x))
        for transition, block in zip(self.transitions, list(self.blocks)[1:], strict=True):
            x = block(transition(x))
        return self.classifier(self.flatten(self.pooling(self.activation(self.normalization(x)))))


@register("densenet121", example=image_of_any_size,
          small={"growth": 2, "blocks": (2, 3, 2), "small_input": True, "num_classes": 5},
          variants={"smooth": {"activation": "softplus", "pooling": "average"}})  # fmt: skip
def densenet121(
    num_classes: int = 1000,
    growth: int = 32,
    blocks: Sequence[int] = (6, 12, 24, 16),
    in_channels: int = 3,
    small_input: bool = False,
    activation: Activation = "relu",
    pooling: str = "max",
    norm_eps: float = 1e-5,
) -> DenseNet:
    """DenseNet-121: four dense blocks whose layers read all features before them; images of any size.

    The variant ``densenet121-smooth`` has soft-plus and, in the stem, average pooling.

    Args:
        growth: number of features that each layer adds; the stem makes twice as many.
        blocks: number of layers in each dense block; the default is the network of 121 layers.
        small_input: whether images are about 32×32: then the stem is one 3×3 convolution, without pooling.
        pooling: pooling of the stem, ``"max"`` or ``"average"``; the transitions always average.

    Raises:
        ZooError: a count is not positive.

    >>> with torch.device("meta"):
    ...     shape = sf.zoo.densenet121(num_classes=10)(torch.empty(1, 3, 64, 64)).shape
    >>> shape
    torch.Size([1, 10])
    """
    if growth < 1 or not blocks or min(blocks) < 1:
        raise ZooError(f"densenet121: growth and blocks must be positive, not {growth} and {tuple(blocks)}")
    return DenseNet(blocks, growth, num_classes, in_channels, small_input, activation, pooling, norm_eps)
