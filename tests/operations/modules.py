"""One small module of each kind that torch.nn offers, with an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from operations.tensors import real, whole

Build = Callable[[], nn.Module]
Shape = tuple[int, ...]

IDS = "ids"
_ROWS, _SIGNAL, _IMAGE, _VOLUME, _SEQUENCE = (3, 4), (2, 2, 5), (2, 2, 4, 3), (1, 2, 2, 3, 2), (2, 3, 4)
_BY_DIMENSION: dict[int, Shape] = {1: _SIGNAL, 2: _IMAGE, 3: _VOLUME}


class Applied(nn.Module):
    """A function of the input and some modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)


def _class(name: str, dims: int) -> Any:
    return getattr(nn, f"{name}{dims}d")


def _by_dimension(dims: int) -> dict[str, tuple[Build, Shape]]:
    shape = _BY_DIMENSION[dims]

    def of(name: str, *args: Any, **kwargs: Any) -> tuple[Build, Shape]:
        return (lambda: _class(name, dims)(*args, **kwargs)), shape

    cases = {
        "Conv": of("Conv", 2, 2, 2, stride=2, padding=1),
        "Conv same": of("Conv", 2, 2, 3, padding="same"),
        "Conv same even": of("Conv", 2, 1, 2, padding="same", dilation=1),
        "Conv groups": of("Conv", 2, 4, 2, groups=2, bias=False),
        "Conv circular": of("Conv", 2, 1, 2, padding=1, padding_mode="circular"),
        "Conv reflect": of("Conv", 2, 1, 2, padding=1, padding_mode="reflect"),
        "ConvTranspose": of("ConvTranspose", 2, 2, 2, stride=2, padding=1, output_padding=1),
        "AvgPool": of("AvgPool", 2, ceil_mode=True, padding=1, stride=1),
        "MaxPool": of("MaxPool", 2, stride=1),
        "AdaptiveAvgPool": of("AdaptiveAvgPool", 2),
        "AdaptiveMaxPool": of("AdaptiveMaxPool", 2),
        "BatchNorm": of("BatchNorm", 2),
        "BatchNorm eval": ((lambda: _settled(_class("BatchNorm", dims)(2))), shape),
        "InstanceNorm": of("InstanceNorm", 2, affine=True),
        "ZeroPad": of("ZeroPad", 1),
        "ConstantPad": of("ConstantPad", 1, 0.5),
        "ReflectionPad": of("ReflectionPad", 1),
        "ReplicationPad": of("ReplicationPad", 1),
        "CircularPad": of("CircularPad", 1),
        "Dropout": ((lambda: _class("Dropout", dims)().eval()), shape),
        "MaxPool places": ((lambda: Applied(_first, _class("MaxPool", dims)(2, return_indices=True))), shape),
        "Conv one sample": ((lambda: _class("Conv", dims)(2, 2, 2)), shape[1:]),
        "Upsample": ((lambda: nn.Upsample(scale_factor=1.5, mode=_LINEAR[dims], align_corners=dims == 2)), shape),
        "Upsample nearest": ((lambda: nn.Upsample(size=4)), shape),
    }
    return {f"{name} {dims}d": case for name, case in cases.items()}


_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def _first(x: Tensor, module: nn.Module) -> Tensor:
    return module(x)[0]


def _settled(norm: nn.Module) -> nn.Module:
    """Running statistics that are neither 0 nor 1."""
    with torch.no_grad():
        norm.running_mean.copy_(real(2).float())
        norm.running_var.copy_(real(2).float().square() + 0.2)
    return norm.eval()


def _attention(**kwargs: Any) -> Build:
    def build() -> nn.Module:
        module = nn.MultiheadAttention(4, 2, batch_first=True)
        return Applied(lambda x, inner: inner(x, x, x, **kwargs)[0], module)

    return build


def _activation(name: str, *args: Any, **kwargs: Any) -> Build:
    return lambda: getattr(nn, name)(*args, **kwargs).eval()


_CAUSAL = torch.ones(3, 3, dtype=torch.bool).triu(1)
_ACTIVATIONS = (
    *("ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Softplus", "Sigmoid"),
    *("LogSigmoid", "Tanh", "Softsign", "Hardtanh", "Hardswish", "Hardsigmoid", "Softshrink", "Tanhshrink"),
    *("PReLU", "RReLU", "GLU", "Identity", "Dropout", "AlphaDropout", "FeatureAlphaDropout"),
)

MODULES: dict[str, tuple[Build, Shape | str]] = {
    "Linear": (lambda: nn.Linear(4, 3), _ROWS),
    "Linear of sequences": (lambda: nn.Linear(4, 2), _SEQUENCE),
    "Bilinear": (lambda: Applied(lambda x, inner: inner(x, x), nn.Bilinear(4, 4, 2)), _ROWS),
    "Embedding": (lambda: nn.Embedding(5, 3), IDS),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 3), IDS),
    "EmbeddingBag sum": (lambda: nn.EmbeddingBag(5, 3, mode="sum"), IDS),
    **_by_dimension(1),
    **_by_dimension(2),
    **_by_dimension(3),
    **{name: (_activation(name), _ROWS) for name in _ACTIVATIONS},
    "Softmax": (_activation("Softmax", dim=1), _ROWS),
    "Softmin": (_activation("Softmin", dim=-1), _ROWS),
    "LogSoftmax": (_activation("LogSoftmax", dim=1), _ROWS),
    "Softmax2d": (nn.Softmax2d, _IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(4), _ROWS),
    "LayerNorm of all": (lambda: nn.LayerNorm([3, 4]), _ROWS),
    "RMSNorm": (lambda: nn.RMSNorm(4), _ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), _IMAGE),
    "Upsample cubic": (lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"), _IMAGE),
    "Upsample smoothed": (
        lambda: Applied(lambda x: F.interpolate(x, size=(2, 2), mode="bilinear", antialias=True)),
        _IMAGE,
    ),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (1, 4, 2, 2)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), (1, 1, 4, 2)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), (1, 4, 2, 2)),
    "Unfold": (lambda: nn.Unfold(2, padding=1), _IMAGE),
    "Fold": (lambda: nn.Fold((3, 3), 2), (1, 4, 4)),
    "Flatten": (nn.Flatten, _IMAGE),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), _ROWS),
    "CosineSimilarity": (
        lambda: Applied(lambda x, a, s: s(a(x), x), nn.Linear(4, 4), nn.CosineSimilarity()),
        _ROWS,
    ),
    "MultiheadAttention": (_attention(), _SEQUENCE),
    "MultiheadAttention eval": (lambda: _attention()().eval(), _SEQUENCE),
    "MultiheadAttention without weights": (_attention(need_weights=False), _SEQUENCE),
    "MultiheadAttention masked": (_attention(attn_mask=_CAUSAL), _SEQUENCE),
    "MultiheadAttention padded": (
        _attention(key_padding_mask=torch.tensor([[False, False, True], [False, False, False]])),
        _SEQUENCE,
    ),
    "MultiheadAttention with biases": (
        lambda: Applied(
            lambda x, a: a(x, x, x)[0], nn.MultiheadAttention(4, 1, add_bias_kv=True, add_zero_attn=True)
        ),
        _SEQUENCE,
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True, activation="gelu"),
        _SEQUENCE,
    ),
    "TransformerEncoderLayer eval": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True, norm_first=True, activation="gelu").eval(),
        _SEQUENCE,
    ),
    "TransformerDecoderLayer": (
        lambda: Applied(
            lambda x, layer: layer(x, x), nn.TransformerDecoderLayer(4, 1, 4, dropout=0.0, batch_first=True)
        ),
        _SEQUENCE,
    ),
    "RNN": (lambda: Applied(_first, nn.RNN(4, 2)), _SEQUENCE),
    "LSTM": (lambda: Applied(_first, nn.LSTM(4, 2, bidirectional=True)), _SEQUENCE),
    "GRU": (lambda: Applied(_first, nn.GRU(4, 2)), _SEQUENCE),
    "RNNCell": (lambda: Applied(lambda x, cell: cell(x, cell(x)), nn.RNNCell(4, 3)), _ROWS),
    "GRUCell": (lambda: Applied(lambda x, cell: cell(x, cell(x)), nn.GRUCell(4, 3)), _ROWS),
    "LSTMCell": (lambda: Applied(lambda x, cell: cell(x, cell(x))[0], nn.LSTMCell(4, 3)), _ROWS),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), _ROWS),
    "weight_norm of a convolution": (lambda: parametrizations.weight_norm(nn.Conv2d(2, 2, 2)), _IMAGE),
    "normalize": (lambda: Applied(lambda x, a: F.normalize(a(x), dim=1), nn.Linear(4, 4)), _ROWS),
    "variance": (lambda: Applied(lambda x, a: a(x).var(1), nn.Linear(4, 4)), _ROWS),
    "in place": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2), nn.SiLU(inplace=True), nn.AvgPool2d(2)),
        _IMAGE,
    ),
}


def example(name: str) -> tuple[nn.Module, Tensor]:
    """The module with reproducible weights, and a batch for it."""
    build, shape = MODULES[name]
    torch.manual_seed(0)
    module = build()
    return module, whole(5, 2, 3) if isinstance(shape, str) else real(*shape).float()
