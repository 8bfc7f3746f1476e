"""Residual networks for images (He, Zhang, Ren and Sun, "Deep residual learning", 2015)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from surefoot.zoo.parts import Activation, make_activation, make_pooling, scaled
from surefoot.zoo.registry import image_of_any_size, register

# A branch is a list of convolutions: kernel, and channels relative to the stage's.
_Branch = tuple[tuple[int, int], ...]
_BASIC = ((3, 1), (3, 1))
_BOTTLENECK = ((1, 1), (3, 1), (1, 4))
_STAGE_CHANNELS = (64, 128, 256, 512)

_SMALL = {"width": 1 / 16, "small_input": True, "num_classes": 5}
_VARIANTS = {"smooth": {"activation": "softplus", "pooling": "average"}}


class ConvolutionNorm(nn.Sequential):
    """A convolution without intercept, then batch-normalisation with scale and shift."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, norm_eps: float) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        normalization = nn.BatchNorm2d(outputs, eps=norm_eps)
        super().__init__(OrderedDict(convolution=convolution, normalization=normalization))


class ResidualBlock(nn.Module):
    """``activation(branch(x) + shortcut(x))``; the shortcut is the identity if the shapes are equal."""

    def __init__(
        self, branch: _Branch, inputs: int, channels: int, stride: int, activation: Activation, norm_eps: float
    ) -> None:
        super().__init__()
        outputs = channels * branch[-1][1]
        layers: list[nn.Module] = []
        current, remaining_stride = inputs, stride
        for kernel, multiple in branch:
            # The stride is in the first 3×3 convolution, as a 1×1 convolution with a stride would skip pixels.
            here = remaining_stride if kernel == 3 else 1
            remaining_stride //= here
            layers.append(ConvolutionNorm(current, channels * multiple, kernel, here, norm_eps))
            layers.append(make_activation(activation))
            current = channels * multiple
        self.branch = nn.Sequential(*layers[:-1])
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else ConvolutionNorm(inputs, outputs, 1, stride, norm_eps)
        self.activation = make_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual step."""
        return self.activation(self.branch(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Stem, four stages of residual blocks, mean over positions, linear ``classifier`` that returns logits."""

    def __init__(
        self,
        branch: _Branch,
        repeats: tuple[int, ...],
        num_classes: int,
        in_channels: int,
        width: float,
        small_input: bool,
        activation: Activation,
        pooling: str,
        norm_eps: float,
    ) -> None:
        super().__init__()
        inputs = scaled(_STAGE_CHANNELS[0], width)
        kernel, stride = (3, 1) if small_input else (7, 2)
        stem = OrderedDict[str, nn.Module](
            convolution=ConvolutionNorm(in_channels, inputs, kernel, stride, norm_eps),
            activation=make_activation(activation),
        )
        if not small_input:
            stem["pooling"] = make_pooling(pooling, 3, stride=2, padding=1)
        self.stem = nn.Sequential(stem)

        self.stages = nn.Sequential()
        for stage, (stage_channels, count) in enumerate(zip(_STAGE_CHANNELS, repeats, strict=True)):
            channels = scaled(stage_channels, width)
            blocks = []
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(ResidualBlock(branch, inputs, channels, stride, activation, norm_eps))
                inputs = channels * branch[-1][1]
            self.stages.append(nn.Sequential(*blocks))

        self.pooling = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(inputs, num_classes)


@register("resnet18", example=image_of_any_size, small=_SMALL, variants=_VARIANTS)
def resnet18(
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    small_input: bool = False,
    activation: Activation = "relu",
    pooling: str = "max",
    norm_eps: float = 1e-5,
) -> ResNet:
    """ResNet-18: eight residual blocks of two 3×3 convolutions; images of any size.

    The variant ``resnet18-smooth`` has soft-plus and, in the stem, average pooling.

    Args:
        width: multiplies the channels of every layer.
        small_input: whether images are about 32×32: then the stem is one 3×3 convolution, without pooling.
        pooling: pooling of the stem, ``"max"`` or ``"average"``.

    >>> with torch.device("meta"):
    ...     print(sum(p.numel() for p in sf.zoo.resnet18().parameters()))
    11689512
    """
    options = num_classes, in_channels, width, small_input, activation, pooling, norm_eps
    return ResNet(_BASIC, (2, 2, 2, 2), *options)


@register("resnet50", example=image_of_any_size, small=_SMALL, variants=_VARIANTS)
def resnet50(
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    small_input: bool = False,
    activation: Activation = "relu",
    pooling: str = "max",
    norm_eps: float = 1e-5,
) -> ResNet:
    """ResNet-50: sixteen bottleneck blocks of 1×1, 3×3 and 1×1 convolutions; options as :func:`resnet18`.

    The stride of a block is in its 3×3 convolution, as in the networks torchvision publishes.

    >>> with torch.device("meta"):
    ...     print(sum(p.numel() for p in sf.zoo.resnet50().parameters()))
    25557032
    """
    options = num_classes, in_channels, width, small_input, activation, pooling, norm_eps
    return ResNet(_BOTTLENECK, (3, 4, 6, 3), *options)


@register("resnet152", example=image_of_any_size, small=_SMALL, variants=_VARIANTS)
def resnet152(
    num_classes: int = 1000,
    in_channels: int = 3,
    width: float = 1.0,
    small_input: bool = False,
    activation: Activation = "relu",
    pooling: str = "max",
    norm_eps: float = 1e-5,
) -> ResNet:
    """ResNet-152: fifty bottleneck blocks; options as :func:`resnet18`.

    >>> with torch.device("meta"):
    ...     print(sum(p.numel() for p in sf.zoo.resnet152().parameters()))
    60192808
    """
    options = num_classes, in_channels, width, small_input, activation, pooling, norm_eps
    return ResNet(_BOTTLENECK, (3, 8, 36, 3), *options)
