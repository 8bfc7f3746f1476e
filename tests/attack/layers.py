"""Random layers by the shape of their input.

Rows are (N, d), sequences (N, T, d), signals (N, C, L), images (N, C, H, W), volumes (N, C, D, H, W). Every entry
of a table maps dice and a shape to a module. Sequences and signals have the same rank; the table is random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from attack import parts
from attack.activations import ACTIVATIONS
from attack.dice import Dice
from attack.moves import Shape, layout, product, reduction, scaling, softmax, turn
from attack.parts import Apply

Layer = Callable[[Dice, Shape], nn.Module]


def activation(dice: Dice, shape: Shape) -> nn.Module:
    return dice.one_of(*ACTIVATIONS)()


def linear(dice: Dice, shape: Shape) -> nn.Module:
    return nn.Linear(shape[-1], dice.whole(1, 5), bias=dice.chance(0.5))


def last_norm(dice: Dice, shape: Shape) -> nn.Module:
    """Normalisations of the last dimension."""
    dim, eps, affine = shape[-1], dice.one_of(1e-5, 1e-2), dice.chance(0.5)
    return dice.one_of(
        nn.LayerNorm(dim, eps=eps, elementwise_affine=affine),
        nn.RMSNorm(dim, eps=dice.one_of(None, 1e-2), elementwise_affine=affine),
        parts.HandRMSNorm(dim, eps),
    )


def channel_norm(dice: Dice, shape: Shape) -> nn.Module:
    """Normalisations whose second dimension is the channels; batch statistics need more than one number."""
    channels, rest = shape[1], shape[0] * int(torch.Size(shape[2:]).numel())
    affine = dice.chance(0.5)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    batch = kind(channels, eps=1e-2, affine=affine)
    batch.running_mean.copy_(torch.linspace(-1, 1, channels))
    batch.running_var.copy_(torch.linspace(0.3, 2, channels))
    choices: list[nn.Module] = [batch.train(dice.chance(0.7) and rest > 1)]
    if rest // shape[0] > 1:
        instance: Any = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}[len(shape)]
        choices += [
            nn.GroupNorm(dice.divisor(channels), channels, eps=1e-2, affine=affine),
            instance(channels, eps=1e-2, affine=affine),
            nn.LayerNorm(list(shape[1:]), eps=1e-2, elementwise_affine=affine),
        ]
    elif channels > 1:
        choices.append(nn.GroupNorm(1, channels, eps=1e-2, affine=affine))
    return dice.one_of(*choices)


def convolution(dice: Dice, shape: Shape) -> nn.Module:
    """Convolutions with all their options."""
    dims, channels, size = len(shape) - 2, shape[1], min(shape[2:])
    groups = dice.divisor(channels)
    kind: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    modes = ("zeros", "zeros", "zeros", "circular", "reflect", "replicate")
    mode = dice.one_of(*modes) if dims < 3 else "zeros"
    padding = dice.whole(0, 2 if mode == "zeros" else size - 1)
    kernel = tuple(dice.whole(1, min(3, n + 2 * padding)) for n in shape[2:])
    wide = all(2 * (k - 1) + 1 <= n + 2 * padding for k, n in zip(kernel, shape[2:], strict=True))
    return kind(
        channels,
        groups * dice.whole(1, 2),
        kernel,
        stride=tuple(dice.whole(1, 3) for _ in kernel),
        padding=padding,
        dilation=dice.whole(1, 2) if wide else 1,
        groups=groups,
        bias=dice.chance(0.5),
        padding_mode=mode,
    )


def transposed_convolution(dice: Dice, shape: Shape) -> nn.Module:
    dims, channels = len(shape) - 2, shape[1]
    groups = dice.divisor(channels)
    kind: Any = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
    kernel, stride, dilation = dice.whole(1, 3), dice.whole(1, 3), dice.whole(1, 2)
    padding, extra = dice.whole(0, kernel // 2), dice.whole(0, max(stride, dilation) - 1)
    out, bias = groups * dice.whole(1, 2), dice.chance(0.5)
    return kind(channels, out, kernel, stride, padding, extra, groups, bias, dilation)


def pooling(dice: Dice, shape: Shape) -> nn.Module:
    dims, size = len(shape) - 2, min(shape[2:])
    kernel, stride = dice.whole(1, min(3, size)), dice.whole(1, 3)
    padding = dice.whole(0, kernel // 2)
    ceil, target = dice.chance(0.5), dice.whole(1, 4)
    average: Any = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}[dims]
    maximum: Any = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims]
    divisor = {"divisor_override": 2} if dims > 1 and dice.chance(0.3) else {}
    dilation = 2 if 2 * (kernel - 1) + 1 <= size and dice.chance(0.5) else 1
    return dice.one_of(
        maximum(kernel, stride, padding, dilation=dilation, ceil_mode=ceil),
        average(kernel, stride, padding, ceil_mode=ceil, count_include_pad=dice.chance(0.5), **divisor),
        {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dims](target),
        {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}[dims](target),
    )


def resampling(dice: Dice, shape: Shape) -> nn.Module:
    dims, size = len(shape) - 2, min(shape[2:])
    corners, target = dice.chance(0.5), dice.whole(1, 5)
    smooth = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]
    choices: list[nn.Module] = [
        nn.Upsample(scale_factor=dice.one_of(2, 1.5, 0.5), mode="nearest"),
        nn.Upsample(size=target, mode="nearest-exact"),
        nn.Upsample(size=target, mode=smooth, align_corners=corners),
        nn.Upsample(scale_factor=1.7, mode=smooth, align_corners=False),
    ]
    if dims == 2:
        choices += [
            nn.Upsample(scale_factor=2, mode="bicubic", align_corners=corners),
            Apply("replication pad", lambda x: F.pad(x, (2, 1, 1, 0), mode="replicate")),
            Apply("unfold", lambda x: F.unfold(x, (2, 1), stride=(1, 2))),
        ]
        if size > 1:
            choices.append(Apply("reflection pad", lambda x: F.pad(x, (1, 1, 1, 0), mode="reflect")))
        if shape[1] % 4 == 0:
            choices.append(nn.PixelShuffle(2))
        if shape[2] % 2 == 0 and shape[3] % 2 == 0:
            choices.append(nn.PixelUnshuffle(2))
    return dice.one_of(*choices)


def attention(dice: Dice, shape: Shape) -> nn.Module:
    dim = shape[-1]
    return dice.one_of(
        parts.Attention(dim, dice.whole(1, 2), dice.one_of(*parts.Attention.MODES)),
        parts.Attention(dim, dice.whole(1, 2), dice.one_of(*parts.Attention.MODES)),
        parts.HandAttention(dim, dice.chance(0.5)),
        parts.MultiHead(dim, dice.divisor(dim), dice.chance(0.5)),
        parts.Gram(),
        parts.GatedUnit(dim, 3),
        parts.Positions(*shape[1:], dice.chance(0.5)),
        nn.TransformerEncoderLayer(dim, dice.divisor(dim), 3, 0.0, "gelu", 1e-2, batch_first=True),
    )


def by_hand(dice: Dice, shape: Shape) -> nn.Module:
    dim = shape[-1]
    choices: list[nn.Module] = [
        parts.HandLinear(dim, dice.whole(1, 4)),
        parts.TiedPair(dim, dice.whole(1, 4)),
        parts.TiedModules(dim),
    ]
    if len(shape) == 2:
        choices += [
            parts.SelfBilinear(dim, dice.whole(1, 3), dice.chance(0.5)),
            parts.Gram(),
            parts.Conditioned(*shape),
            parts.Mixed(*shape),
        ]
    return dice.one_of(*choices)


_ANY = (softmax, layout, layout, reduction, product, scaling, turn)
_SPATIAL = (
    convolution,
    convolution,
    transposed_convolution,
    pooling,
    pooling,
    resampling,
    activation,
    channel_norm,
)
TABLES: dict[str, tuple[Layer, ...]] = {
    "rows": (linear, linear, activation, activation, activation, last_norm, channel_norm, by_hand, by_hand, *_ANY),
    "sequence": (linear, activation, activation, last_norm, attention, attention, attention, by_hand, *_ANY),
    "spatial": (*_SPATIAL, *_ANY),
}


def layer_for(dice: Dice, shape: Shape) -> nn.Module:
    """A random layer that fits the shape."""
    names = {2: ("rows",), 3: ("sequence", "spatial")}.get(len(shape), ("spatial",))
    return dice.one_of(*TABLES[dice.one_of(*names)])(dice, shape)
