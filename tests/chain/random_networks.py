"""Random small networks on tensors of shape (batch, channels, length), made of all that chains must take apart."""

from __future__ import annotations

from hypothesis import strategies as st
from torch import Tensor, cat, nn
from torch.nn import functional

CHANNELS, LENGTH = 4, 4
PARTS = (
    "linear", "convolution", "tanh", "softplus", "relu", "layer norm", "group norm", "batch norm",
    "running batch norm", "residual", "dense", "gated", "attention", "average pool", "max pool", "split", "twice",
    "frozen", "weight norm", "flip",
)  # fmt: skip


class Residual(nn.Module):
    """What is inside, added to what goes in."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + x


class Dense(nn.Module):
    """All that was computed so far is concatenated and mixed."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.mix = inside, nn.Conv1d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(cat([x, self.inside(x)], dim=1))


class Gated(nn.Module):
    """A gate, and what it gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * self.value(x)


class Attention(nn.Module):
    """Every channel attends to every other."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(LENGTH, LENGTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class Split(nn.Module):
    """One half goes through what is inside, the other one waits."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.short = inside, nn.Conv1d(CHANNELS // 2, CHANNELS // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return cat([self.short(self.inside(x)[:, : CHANNELS // 2].sin() + first), second], dim=1)


class Twice(nn.Module):
    """The same layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Flip(nn.Module):
    """Numbers change places."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(2).transpose(1, 2).reshape(x.shape[0], -1, LENGTH)


def part(name: str, inside: nn.Module) -> nn.Module:
    """A part of a network by name, around what is inside if it goes around something."""
    match name:
        case "linear":
            return nn.Linear(LENGTH, LENGTH)
        case "convolution":
            return nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)
        case "layer norm":
            return nn.LayerNorm(LENGTH)
        case "group norm":
            return nn.GroupNorm(2, CHANNELS)
        case "batch norm":
            return nn.BatchNorm1d(CHANNELS)
        case "running batch norm":
            return nn.BatchNorm1d(CHANNELS).eval()
        case "residual":
            return Residual(inside)
        case "dense":
            return Dense(inside)
        case "gated":
            return Gated()
        case "attention":
            return Attention()
        case "average pool":
            return nn.AvgPool1d(3, stride=1, padding=1)
        case "max pool":
            return nn.MaxPool1d(3, stride=1, padding=1)
        case "split":
            return Split(inside)
        case "twice":
            return Twice()
        case "frozen":
            return nn.Linear(LENGTH, LENGTH).requires_grad_(False)
        case "weight norm":
            return nn.utils.parametrizations.weight_norm(nn.Linear(LENGTH, LENGTH))
        case "flip":
            return Flip()
        case "tanh":
            return nn.Tanh()
        case "softplus":
            return nn.Softplus()
        case _:
            return nn.ReLU()


def networks(depth: int = 2) -> st.SearchStrategy[nn.Sequential]:
    """Sequences of parts, where parts that go around something go around such a sequence."""
    if depth == 0:
        return st.just(nn.Sequential(nn.Identity()))
    inside = networks(depth - 1)
    parts = st.lists(st.builds(part, st.sampled_from(PARTS), inside), min_size=1, max_size=4)
    return parts.map(lambda layers: nn.Sequential(*layers).double())
