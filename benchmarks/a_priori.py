"""Constants before any weights are known: recurrent networks and encoders on a product of balls around the origin.

``python -m benchmarks.a_priori`` prints the rows that ``docs/tightness.md`` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import surefoot as sf


class Recurrent(nn.Module):
    """A recurrent layer and ten outputs of its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        outputs: Tensor = self.last(self.layer(x)[0][:, -1])
        return outputs


def _encoder(layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


@dataclass(frozen=True)
class Subject:
    """A kind of network, of any depth.

    Attributes:
        build: from how many times one factor counts.
        depth: how often it counts here.
        unit: what it counts once for.
    """

    build: Callable[[int], nn.Module]
    depth: int
    unit: str


SUBJECTS = {
    "RNN, tanh": Subject(lambda _: Recurrent(nn.RNN(8, 16, batch_first=True)), 50, "step"),
    "GRU": Subject(lambda _: Recurrent(nn.GRU(8, 16, batch_first=True)), 50, "step"),
    "LSTM": Subject(lambda _: Recurrent(nn.LSTM(8, 16, batch_first=True)), 50, "step"),
    "encoder, post-norm": Subject(_encoder, 4, "layer"),
}


def certified(name: str, depth: int) -> sf.Certificate:
    """Every block within 1 of the origin, four sequences of standard normal numbers."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model = subject.build(depth).double()
    shape = (4, 6, 16) if subject.unit == "layer" else (4, depth, 8)
    return sf.certify(model, torch.randn(*shape, dtype=torch.float64), domain=sf.ProductBall(1.0))


def line(name: str) -> str:
    """A row of the table: ℓ, L, and by what ℓ grows with one more step or layer."""
    depth, unit = SUBJECTS[name].depth, SUBJECTS[name].unit
    whole, half = certified(name, depth), certified(name, depth // 2)
    growth = float(whole.lipschitz / half.lipschitz) ** (1 / (depth - depth // 2))
    return (
        f"| {name} | {depth} {unit}s | {whole.lipschitz:.1e} | {whole.smoothness:.1e} | {growth:.3g} per {unit} |"
    )


if __name__ == "__main__":
    for network in SUBJECTS:
        print(line(network), flush=True)
