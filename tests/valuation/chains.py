"""Long chains for the judges: recurrent networks, solvers of differential equations, flows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import surefoot as sf
from attack.exact_subject import Subject


class Recurrent(nn.Module):
    """A recurrent layer of a kind of ``torch.nn``, and a linear map of its last output."""

    def __init__(self, kind: str, states: int, layers: int = 1, batch_first: bool = False) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(2, states, layers, batch_first=batch_first)
        self.head, self.time = nn.Linear(states, 2), 1 if batch_first else 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0].select(self.time, -1))


class ByHand(nn.Module):
    """An LSTM whose output reads the cell itself, with normalised states or rectifiers if asked for."""

    def __init__(self, states: int, normalised: bool = False, rectified: bool = False) -> None:
        super().__init__()
        self.gates, self.head = nn.Linear(2 + states, 4 * states), nn.Linear(states, 2)
        self.norm = nn.LayerNorm(states) if normalised else nn.Identity()
        self.activation = nn.ReLU() if rectified else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), self.head.in_features, dtype=x.dtype)
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * self.activation(g)
            h = self.norm(torch.sigmoid(o) * self.activation(c))
        return self.head(h)


class Ordinary(nn.Module):
    """A neural differential equation, by the method of Runge and Kutta."""

    def __init__(self, steps: int, width: int = 6) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        self.steps, self.size = steps, 0.125

    def forward(self, x: Tensor) -> Tensor:
        f, s = self.field, self.size
        for _ in range(self.steps):
            a = f(x)
            b = f(x + s / 2 * a)
            c = f(x + s / 2 * b)
            x = x + s / 6 * (a + 2 * b + 2 * c + f(x + s * c))
        return x


class Flow(nn.Module):
    """Affine couplings, and minus the logarithm of the density."""

    def __init__(self, blocks: int, width: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 4)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        volume = torch.zeros(len(x), 1, dtype=x.dtype)
        for block in self.blocks:
            scale, shift = block(a).chunk(2, 1)
            scale = torch.tanh(scale)
            a, b = b * torch.exp(scale) + shift, a
            volume = volume + scale.sum(1, keepdim=True)
        return (a * a).sum(1, keepdim=True) + (b * b).sum(1, keepdim=True) - 2 * volume


CHAINS = {
    "RNN": lambda steps: (Recurrent("RNN", 4), (steps, 3, 2)),
    "GRU": lambda steps: (Recurrent("GRU", 3), (steps, 3, 2)),
    "LSTM": lambda steps: (Recurrent("LSTM", 3), (steps, 3, 2)),
    "samples first": lambda steps: (Recurrent("GRU", 3, batch_first=True), (3, steps, 2)),
    "two layers": lambda steps: (Recurrent("RNN", 3, layers=2), (steps, 2, 2)),
    "two layers, samples first": lambda steps: (Recurrent("RNN", 3, 2, batch_first=True), (2, steps, 2)),
    "by hand": lambda steps: (ByHand(3), (2, steps, 2)),
    "normalised": lambda steps: (ByHand(3, normalised=True), (2, steps, 2)),
    "rectified": lambda steps: (ByHand(3, rectified=True), (2, steps, 2)),
    "differential equation": lambda steps: (Ordinary(steps), (3, 2)),
    "flow": lambda steps: (Flow(steps), (3, 4)),
}


def chain(name: str, steps: int, scale: float, seed: int = 0, dtype: torch.dtype = torch.float64) -> Subject:
    """One of them, its weights scaled, with data."""
    torch.manual_seed(seed)
    model, shape = CHAINS[name](steps)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model, x = model.to(dtype), torch.randn(shape, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        outputs = model(x)
    if outputs.shape[1] > 1 and seed % 2 == 0:
        return Subject(name, model, x, sf.CrossEntropy(), torch.arange(len(outputs)) % 2)
    return Subject(name, model, x, sf.Square(), torch.randn_like(outputs))
