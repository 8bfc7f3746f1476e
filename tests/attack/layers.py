"""Random layers by the shape of their input.

Rows are (N, d), sequences (N, T, d), signals (N, C, L), images (N, C, H, W). Every entry of a table maps a way to
draw and a shape to a module. Sequences and signals have the same rank; which of the two tables is used is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from attack import parts
from attack.activations import ACTIVATIONS
from attack.parts import Apply

Draw = Callable[[st.SearchStrategy[Any]], Any]
Shape = tuple[int, ...]
Layer = Callable[[Draw, Shape], nn.Module]


def _whole(draw: Draw, low: int, high: int) -> int:
    return int(draw(st.integers(low, high)))


def _one_of(draw: Draw, *choices: Any) -> Any:
    return draw(st.sampled_from(choices))


def _divisor(draw: Draw, number: int) -> int:
    return int(_one_of(draw, *(k for k in range(1, number + 1) if number % k == 0)))


def activation(draw: Draw, shape: Shape) -> nn.Module:
    return draw(st.sampled_from(ACTIVATIONS))()


def scaling(draw: Draw, shape: Shape) -> nn.Module:
    return _one_of(
        draw,
        Apply("x·0.5", lambda x: x * 0.5),
        Apply("-2x", lambda x: -2 * x),
        Apply("x/3 + 1", lambda x: x / 3 + 1),
        Apply("1 - x", lambda x: 1 - x),
        Apply("x - row mean", lambda x: x - x.mean(-1, keepdim=True)),
        Apply("x·(fixed vector)", lambda x: x * torch.linspace(-1, 2, x.shape[-1], dtype=x.dtype)),
        Apply("x + 2x", lambda x: torch.add(x, x, alpha=2)),
        Apply("identity", lambda x: x),
    )


def softmax(draw: Draw, shape: Shape) -> nn.Module:
    dim = _one_of(draw, *range(len(shape)))
    return _one_of(
        draw,
        Apply(f"softmax({dim})", lambda x: x.softmax(dim)),
        Apply(f"log_softmax({dim})", lambda x: x.log_softmax(dim)),
        Apply(f"softmax({dim}) of 3x", lambda x: (3 * x).softmax(dim)),
    )


def moving(draw: Draw, shape: Shape) -> nn.Module:
    """Layout operations that any shape of rank two or more knows."""
    last = shape[-1]
    choices = [
        Apply("flip", lambda x: x.flip(-1)),
        Apply("roll", lambda x: x.roll(1, -1)),
        Apply("cat with itself", lambda x: torch.cat([x, 2 * x], dim=-1)),
        Apply("cat samples", lambda x: torch.cat([x, x], dim=0)),
        Apply("pad", lambda x: F.pad(x, (1, 2), value=0.5)),
        Apply("cumsum", lambda x: x.cumsum(-1)),
        Apply("sum kept", lambda x: x.sum(-1, keepdim=True)),
        Apply("mean kept", lambda x: x.mean(1, keepdim=True)),
        Apply("mean of samples", lambda x: x.mean(0, keepdim=True)),
        Apply("x ∘ row mean", lambda x: x * x.mean(-1, keepdim=True)),
        Apply("x ∘ sample sum", lambda x: x * x.sum(0, keepdim=True)),
        Apply("repeat", lambda x: x.repeat(*[1] * (x.dim() - 1), 2)),
        Apply("repeat_interleave", lambda x: x.repeat_interleave(2, dim=-1)),
        Apply("index", lambda x: x[..., torch.tensor([0, 0, x.shape[-1] - 1])]),
        Apply("where", lambda x: torch.where(torch.arange(x.shape[-1]) % 2 == 0, x, 0.5 * x * x)),
        Apply("masked_fill", lambda x: x.masked_fill(torch.arange(x.shape[-1]) == 0, 0.25)),
        Apply("unbind and stack", lambda x: torch.stack(x.unbind(-1)[::-1], dim=-1)),
        Apply("flatten", lambda x: x.flatten(1)),
        Apply("transpose", lambda x: x.transpose(0, 1)),
    ]
    if last > 1:
        choices += [
            Apply("slice", lambda x: x[..., 1:]),
            Apply("every other", lambda x: x[..., ::2]),
            Apply("select", lambda x: x.select(-1, 0).unsqueeze(-1)),
            Apply("split and multiply", lambda x: x.split([1, x.shape[-1] - 1], -1)[0] * x[..., 1:]),
        ]
    if last % 2 == 0:
        choices += [
            Apply("glu", lambda x: F.glu(x, dim=-1)),
            Apply("chunks multiplied", lambda x: torch.mul(*x.chunk(2, dim=-1))),
        ]
    return draw(st.sampled_from(choices))


def linear(draw: Draw, shape: Shape) -> nn.Module:
    return nn.Linear(shape[-1], _whole(draw, 1, 5), bias=draw(st.booleans()))


def square_linear(draw: Draw, shape: Shape) -> nn.Module:
    return nn.Linear(shape[-1], shape[-1], bias=draw(st.booleans()))


def last_norm(draw: Draw, shape: Shape) -> nn.Module:
    """Normalisations of the last dimension."""
    dim, eps = shape[-1], _one_of(draw, 1e-5, 1e-2)
    plain = draw(st.booleans())
    return _one_of(
        draw,
        nn.LayerNorm(dim, eps=eps, elementwise_affine=plain),
        nn.RMSNorm(dim, eps=_one_of(draw, None, 1e-2), elementwise_affine=plain),
        parts.HandRMSNorm(dim, eps),
    )


def channel_norm(draw: Draw, shape: Shape) -> nn.Module:
    """Normalisations whose second dimension is the channels; batch statistics need more than one number."""
    channels, rest = shape[1], shape[0] * int(torch.Size(shape[2:]).numel())
    affine, training = draw(st.booleans()), draw(st.booleans()) and rest > 1
    batch = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](
        channels, eps=1e-2, affine=affine
    )
    _randomise_statistics(batch)
    choices: list[nn.Module] = [batch.train(training)]
    if rest // shape[0] > 1 or channels > 1:
        choices.append(nn.GroupNorm(1, channels, eps=1e-2, affine=affine))
    if len(shape) > 2 and rest // shape[0] > 1:
        instance = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d}[len(shape)]
        choices += [
            nn.GroupNorm(_divisor(draw, channels), channels, eps=1e-2, affine=affine),
            instance(channels, eps=1e-2, affine=affine),
            nn.LayerNorm(list(shape[1:]), eps=1e-2, elementwise_affine=affine),
        ]
    return draw(st.sampled_from(choices))


def _randomise_statistics(batch: Any) -> None:
    batch.running_mean.copy_(torch.linspace(-1, 1, batch.num_features))
    batch.running_var.copy_(torch.linspace(0.3, 2, batch.num_features))


def convolution(draw: Draw, shape: Shape) -> nn.Module:
    """One- or two-dimensional convolutions with all their options, plain and transposed."""
    dims, channels = len(shape) - 2, shape[1]
    size = min(shape[2:])
    groups = _divisor(draw, channels)
    out = groups * _whole(draw, 1, 2)
    kernel = _whole(draw, 1, min(3, size))
    stride, bias = _whole(draw, 1, 3), draw(st.booleans())
    if draw(st.integers(0, 2)) == 0:
        kind: Any = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}[dims]
        padding = _whole(draw, 0, kernel - 1)
        extra = _whole(draw, 0, stride - 1)
        dilation = _whole(draw, 1, 2)
        if (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 < 1:
            padding = 0
        return kind(
            channels,
            out,
            kernel,
            stride,
            padding,
            output_padding=extra,
            groups=groups,
            bias=bias,
            dilation=dilation,
        )
    kind = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
    mode = _one_of(draw, "zeros", "zeros", "zeros", "circular", "reflect", "replicate")
    padding = _whole(draw, 0, 2) if mode == "zeros" else _whole(draw, 0, size - 1)
    dilation = _whole(draw, 1, 2) if 2 * (kernel - 1) + 1 <= size + 2 * padding else 1
    return kind(
        channels, out, kernel, stride, padding, groups=groups, bias=bias, dilation=dilation, padding_mode=mode
    )


def pooling(draw: Draw, shape: Shape) -> nn.Module:
    dims, size = len(shape) - 2, min(shape[2:])
    kernel = _whole(draw, 1, min(3, size))
    stride, padding = _whole(draw, 1, 3), _whole(draw, 0, kernel // 2)
    ceil, include = draw(st.booleans()), draw(st.booleans())
    target = _whole(draw, 1, 4)
    maximum: Any = {1: nn.MaxPool1d, 2: nn.MaxPool2d}[dims]
    choices: list[nn.Module] = [
        maximum(kernel, stride, padding, ceil_mode=ceil),
        {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}[dims](target),
        {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d}[dims](target),
        nn.Upsample(scale_factor=_one_of(draw, 2, 1.5), mode="nearest"),
        nn.Upsample(size=target + 1, mode={1: "linear", 2: "bilinear"}[dims], align_corners=ceil),
    ]
    if dims == 1:
        choices.append(nn.AvgPool1d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=include))
        return draw(st.sampled_from(choices))
    divisor = _one_of(draw, None, None, 2)
    choices += [
        nn.AvgPool2d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=include, divisor_override=divisor),
        nn.Upsample(scale_factor=2, mode="bicubic", align_corners=ceil),
        Apply("reflection pad", lambda x: F.pad(x, (1, 1, 1, 0), mode="reflect"))
        if size > 1
        else Apply("replication pad", lambda x: F.pad(x, (2, 1, 1, 0), mode="replicate")),
    ]
    if 2 * (kernel - 1) + 1 <= size:
        choices.append(maximum(kernel, stride, padding, dilation=2))
    if shape[1] % 4 == 0:
        choices.append(nn.PixelShuffle(2))
    if shape[2] % 2 == 0 and shape[3] % 2 == 0:
        choices.append(nn.PixelUnshuffle(2))
    return draw(st.sampled_from(choices))


def attention(draw: Draw, shape: Shape) -> nn.Module:
    dim = shape[-1]
    heads = _whole(draw, 1, 2)
    return _one_of(
        draw,
        parts.Attention(dim, heads, _one_of(draw, *parts.Attention.MODES)),
        parts.HandAttention(dim, draw(st.booleans())),
        parts.MultiHead(dim, _divisor(draw, dim), draw(st.booleans())),
        parts.Gram(),
        parts.GatedUnit(dim, 3),
        parts.Positions(*shape[1:], draw(st.booleans())),
        _transformer(dim, _divisor(draw, dim)),
    )


def _transformer(dim: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        dim, heads, 3, dropout=0.0, activation="gelu", layer_norm_eps=1e-2, batch_first=True
    )


def by_hand(draw: Draw, shape: Shape) -> nn.Module:
    dim = shape[-1]
    choices: list[nn.Module] = [
        parts.HandLinear(dim, _whole(draw, 1, 4)),
        parts.TiedPair(dim, _whole(draw, 1, 4)),
        parts.TiedModules(dim),
    ]
    if len(shape) == 2:
        choices += [
            parts.SelfBilinear(dim, _whole(draw, 1, 3), draw(st.booleans())),
            parts.Gram(),
            parts.Conditioned(*shape),
            parts.Mixed(*shape),
        ]
    return draw(st.sampled_from(choices))


def turn(draw: Draw, shape: Shape) -> nn.Module:
    """To another rank."""
    if len(shape) == 2:
        return _one_of(
            draw,
            Apply("as signal", lambda x: x.unsqueeze(1)),
            Apply("as sequence", lambda x: x.unsqueeze(-1)),
            Apply("outer product", lambda x: x.unsqueeze(-1) * x.unsqueeze(-2)),
        )
    return _one_of(
        draw,
        Apply("flatten", lambda x: x.flatten(1)),
        Apply("mean of the rest", lambda x: x.mean(tuple(range(2, x.dim())))),
        Apply("first position", lambda x: x[:, 0]),
        Apply("channels last", lambda x: x.movedim(1, -1)),
        Apply("largest dimensions joined", lambda x: x.reshape(x.shape[0] * x.shape[1], -1)),
    )


_ANY = (softmax, moving, scaling, turn)
TABLES: dict[str, tuple[Layer, ...]] = {
    "rows": (
        linear,
        linear,
        activation,
        activation,
        last_norm,
        channel_norm,
        softmax,
        moving,
        scaling,
        by_hand,
        turn,
    ),
    "sequence": (linear, activation, last_norm, attention, attention, softmax, moving, scaling, by_hand, turn),
    "signal": (convolution, convolution, pooling, activation, channel_norm, softmax, moving, scaling, turn),
    "image": (
        convolution,
        convolution,
        pooling,
        pooling,
        activation,
        channel_norm,
        softmax,
        moving,
        scaling,
        turn,
    ),
}


def table_for(draw: Draw, shape: Shape) -> tuple[Layer, ...]:
    if len(shape) == 3:
        return TABLES[_one_of(draw, "sequence", "signal")]
    return TABLES["rows" if len(shape) == 2 else "image"]
