"""Residual networks for images (He, Zhang, Ren and Sun, "Deep residual learning", 2015)."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import nn

from surefoot.zoo.parts import Activation, make_activation, scaled, stem

# A branch is a list of convolutions: kernel, and channels relative to the stage's.
_Branch = tuple[tuple[int, int], ...]
_BASIC: _Branch = ((3, 1), (3, 1))
_BOTTLENECK: _Branch = ((1, 1), (3, 1), (1, 4))
_STAGE_CHANNELS = (64, 128, 256, 512)


def convolution_norm(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    """A convolution without intercept, then batch-normalisation with scale and shift."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(OrderedDict(convolution=convolution, normalization=nn.BatchNorm2d(outputs)))


class ResidualBlock(nn.Module):
    """``activation(branch(x) + shortcut(x))``; the shortcut is the identity if the shapes are equal.

    The stride is in the 3×3 convolution, as in the networks torchvision publishes: a 1×1 one would skip pixels.
    """

    def __init__(self, branch: _Branch, inputs: int, channels: int, stride: int, activation: Activation) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        current, remaining = inputs, stride
        for kernel, multiple in branch:
            own = remaining if kernel == 3 else 1
            remaining //= own
            layers += [convolution_norm(current, channels * multiple, kernel, own), make_activation(activation)]
            current = channels * multiple
        self.branch = nn.Sequential(*layers[:-1])
        same_shape = stride == 1 and inputs == current
        self.shortcut = nn.Identity() if same_shape else convolution_norm(inputs, current, 1, stride)
        self.activation = make_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


def _resnet(
    branch: _Branch,
    repeats: tuple[int, ...],
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    small_input: bool = False,
    activation: Activation = "relu",
    pooling: str = "max",
) -> nn.Sequential:
    """Stem, four stages of residual blocks, mean over positions, linear ``classifier`` that returns logits.

    Args:
        branch, repeats: the convolutions of a block, and the number of blocks in each stage.
        width: multiplies the channels of every layer.
        small_input: whether images are about 32×32: then the stem is one 3×3 convolution, without pooling.
        pooling: pooling of the stem, ``"max"`` or ``"average"``.
    """
    model = nn.Sequential()
    inputs = scaled(_STAGE_CHANNELS[0], width)
    model.stem = stem(in_channels, inputs, small_input, activation, pooling)
    model.stages = nn.Sequential()
    for stage, (stage_channels, count) in enumerate(zip(_STAGE_CHANNELS, repeats, strict=True)):
        channels = scaled(stage_channels, width)
        blocks = []
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(ResidualBlock(branch, inputs, channels, stride, activation))
            inputs = channels * branch[-1][1]
        model.stages.append(nn.Sequential(*blocks))
    model.pooling = nn.AdaptiveAvgPool2d(1)
    model.flatten = nn.Flatten()
    model.classifier = nn.Linear(inputs, num_classes)
    return model


resnet18 = partial(_resnet, _BASIC, (2, 2, 2, 2))  # eight blocks of two 3×3 convolutions
resnet50 = partial(_resnet, _BOTTLENECK, (3, 4, 6, 3))  # sixteen blocks of 1×1, 3×3 and 1×1 convolutions
resnet152 = partial(_resnet, _BOTTLENECK, (3, 8, 36, 3))
