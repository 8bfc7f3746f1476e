"""Small networks, one for each structure that a chain can have, with an input in double precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 3


def mlp() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, CLASSES)]
    return nn.Sequential(*layers), torch.randn(7, 4)


def wide() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(12, 9), nn.Sigmoid(), nn.Linear(9, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers), torch.randn(3, 12)


def convolutional() -> tuple[nn.Module, Tensor]:
    first = [nn.Conv2d(2, 3, 3, padding=1), nn.Softplus(), nn.AvgPool2d(2)]
    second = [nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(2, CLASSES)]
    return nn.Sequential(*first, *second), torch.randn(4, 2, 4, 4)


def layer_norm() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, CLASSES)), torch.randn(5, 4)


def group_norm() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Softplus(), nn.Flatten(), nn.Linear(12, CLASSES)]
    return nn.Sequential(*layers), torch.randn(4, 2, 5)


def batch_norm() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES)), torch.randn(6, 4)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, CLASSES)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def residual() -> tuple[nn.Module, Tensor]:
    return Residual(), torch.randn(5, 4)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + 3 * k, 3) for k in range(3))
        self.last = nn.Linear(13, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for layer in self.layers:
            states.append(F.softplus(layer(torch.cat(states, dim=1))))
        return self.last(torch.cat(states, dim=1))


def dense() -> tuple[nn.Module, Tensor]:
    return Dense(), torch.randn(5, 4)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        heads = [f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.leave((x + mixed).mean(dim=1))


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.randn(3, 4, 3)


def frozen() -> tuple[nn.Module, Tensor]:
    model, x = mlp()
    for path in ("0.weight", "2.bias", "4.weight"):
        model.get_parameter(path).requires_grad_(False)
    return model, x


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.again(torch.sigmoid(self.again(x)))))


def shared() -> tuple[nn.Module, Tensor]:
    return Shared(), torch.randn(5, 4)


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.used(x))


def spare() -> tuple[nn.Module, Tensor]:
    return Spare(), torch.randn(5, 4)


def first_frozen() -> tuple[nn.Module, Tensor]:
    model, x = mlp()
    for path in ("0.weight", "0.bias"):
        model.get_parameter(path).requires_grad_(False)
    return model, x


class Chosen(nn.Module):
    """A state without real numbers: nothing before it has an influence that can be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.last = nn.Linear(4, 4), nn.Embedding(4, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.rows(self.first(x).argmax(dim=1))))


def chosen() -> tuple[nn.Module, Tensor]:
    return Chosen(), torch.randn(5, 4)


class Split(nn.Module):
    """A state that is a tuple, and an element-wise gate."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.gate, self.last = nn.Linear(4, 6), nn.Linear(3, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.tanh(self.both(x)).chunk(2, dim=1)
        return self.last(left * torch.sigmoid(self.gate(right)))


def split() -> tuple[nn.Module, Tensor]:
    return Split(), torch.randn(5, 4)


class Sorted(nn.Module):
    """Samples are mixed, in a way that shapes do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(x.flip(0) * x.roll(1, dims=0)) + x.mean(dim=0, keepdim=True))


def mixing() -> tuple[nn.Module, Tensor]:
    return Sorted(), torch.randn(4, 4)


def square_batch() -> tuple[nn.Module, Tensor]:
    """As many samples as features: transposing keeps the shape and mixes samples."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.last(torch.tanh(self.second(x).T) + x)

    return Transposed(), torch.randn(4, 4)


MAKERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    make.__name__: make
    for make in (
        mlp, wide, convolutional, layer_norm, group_norm, batch_norm, residual, dense, attention, frozen, shared,
        spare, first_frozen, chosen, split, mixing, square_batch,
    )
}  # fmt: skip


def make(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The network of that name; parameters are larger than by default, so that curvature shows."""
    torch.manual_seed(seed)
    model, x = MAKERS[name]()
    model, x = model.double(), x.double()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.5).add_(0.1 * torch.randn_like(value))
    return model, x
