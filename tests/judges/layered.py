"""Small networks for Gauss-Newton: each kind of layer that has a formula, and each way in which samples meet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.objectives import Objective

F64 = torch.float64


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.two(torch.tanh(self.one(x))))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 3), nn.Linear(7, 2), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, torch.tanh(self.one(x))], dim=1)
        return self.head(torch.cat([x, torch.tanh(self.two(x))], dim=1))


class Attention(nn.Module):
    """An embedding, a position that is added, an encoder layer whose attention puts samples second, a mean."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(7, 4, padding_idx=2), nn.Parameter(torch.randn(length, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids) + self.position).mean(1))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class Mixed(nn.Module):
    """Samples meet after the first layer: their mean is added to each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        return self.two(y + y.mean(0, keepdim=True))


class Rows(nn.Module):
    """As many positions as samples, and the two exchanged: rows of the first layer are not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x.transpose(0, 1))).transpose(0, 1).sum(1))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def weight_normalised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (5, 4)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.Tanh(),
            nn.Conv2d(4, 4, 2, groups=2, dilation=2, bias=False), nn.AvgPool2d(2), nn.Flatten(), nn.LayerNorm(4),
            nn.Linear(4, 3),
        ),
        (4, 2, 8, 8),
    ),
    "convolution-1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Softplus(), nn.MaxPool1d(2),
            nn.Conv1d(3, 2, 2, dilation=2), nn.Flatten(), nn.Linear(4, 3),
        ),
        (4, 2, 16),
    ),
    "padded-same": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)),
        (3, 2, 5),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.LayerNorm((5, 3)), nn.Flatten(), nn.Linear(15, 3)),
        (4, 5, 2),
    ),
    "batch-norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False, eps=0.1), nn.Tanh(), nn.Linear(5, 3)
        ),
        (5, 4),
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)), (5, 4)),
    "residual": (Residual, (5, 4)),
    "dense": (Dense, (5, 4)),
    "attention": (lambda: Attention(5), (4, 5)),
    "attention-square": (lambda: Attention(4), (4, 4)),
    "shared": (Shared, (5, 4)),
    "mixed": (Mixed, (5, 4)),
    "rows": (Rows, (4, 4, 4)),
    "frozen": (frozen, (5, 4)),
    "weight-norm": (weight_normalised, (5, 4)),
    "one-sample": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (1, 4)),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    make, shape = MODELS[name]
    model = make().double()
    x = torch.randint(0, 7, shape) if "attention" in name else torch.randn(shape, dtype=F64)
    return model, x


def objectives(n: int) -> dict[str, Objective]:
    torch.manual_seed(4)
    return {
        "labels": sf.CrossEntropy(torch.randint(0, 3, (n,))),
        "soft": sf.CrossEntropy(torch.softmax(torch.randn(n, 3, dtype=F64), dim=1)),
        "square": sf.Square(torch.randn(n, 3, dtype=F64)),
    }
