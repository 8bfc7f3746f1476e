"""The propagation of errors, where operations are off by much more than round-off, each along its costate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.valuation import propagation
from surefoot.valuation.tape import Tape
from surefoot.valuation.valuer import Valuer

DISTURBED = {f"aten.{name}" for name in ("linear", "sigmoid", "tanh", "mul", "add", "sub")}


class Recurrent(nn.Module):
    """A layer over a sequence, and a linear map of its last state."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = layer(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


class Read(nn.Module):
    """A gated step, a part of which is read by what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 3, dtype=x.dtype)
        for k in range(x.shape[1]):
            state = torch.sin(self.cell(x[:, k], state)) * state + self.cell(x[:, k], state)
        logits: Tensor = self.head(state)
        return logits


def disturbed(
    valuer: Valuer, weights: dict[str, Tensor], size: float, patch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """A pass as it is, and one whose operations are off by that part of their norm, each along its costate, with
    these errors for the propagation.
    """
    compute, slopes, noise = Tape._compute, {}, {}

    def seen(tape: Tape, node: Any, values: Any) -> Any:
        found = compute(tape, node, values)
        if node.op in DISTURBED and found.requires_grad:
            found.register_hook(lambda costate: slopes.__setitem__(node.name, costate))
        return found

    def moved(tape: Tape, node: Any, values: Any) -> Any:
        found = compute(tape, node, values)
        if node.name not in slopes:
            return found
        along = slopes[node.name] / (slopes[node.name].norm() + 1e-300)
        noise[node.name] = size * float(found.detach().norm())
        return found + 0.999 * noise[node.name] * along

    with patch.context() as patched:
        patched.setattr(Tape, "_compute", seen)
        plain = valuer.run(weights)
        _ = plain.gradient
    with patch.context() as patched:
        patched.setattr(Tape, "_compute", moved)
        run = valuer.run(weights)
    rounding = propagation.rounding
    patch.setattr(
        propagation, "rounding", lambda slope, *a, **k: noise.get(slope.node.name, 0.0) + rounding(slope, *a, **k)
    )
    return plain, run


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-3])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN, Read])
def test_the_value_without_errors_is_inside(kind: Any, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = 0
    for seed in range(6):
        torch.manual_seed(seed)
        model = (Read() if kind is Read else Recurrent(kind)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_((1.0, 3.0)[seed % 2])
        x, y = torch.randn(4, 2 + seed // 2, 2).double(), torch.randn(4, 2).double()
        weights = dict(model.named_parameters())
        with monkeypatch.context() as patch:
            valuer = Valuer.of(model, x, sf.Square(y))
            plain, run = disturbed(valuer, weights, size, patch)
            for derivatives in (True, False):
                run.derivatives = derivatives
                found = valuer.enclosed(run)
                assert abs(run.value - plain.value) <= found.error
                decided += found.error <= 100 * abs(run.value - plain.value)
    assert decided or size > 1e-9


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_a_gated_step_counts_as_one_operation(layer: type[nn.RNNBase]) -> None:
    model, x, y = Recurrent(layer).double(), torch.randn(4, 3, 2).double(), torch.randn(4, 2).double()
    valuer = Valuer.of(model, x, sf.Square(y))
    valuer.enclosed(valuer.run(dict(model.named_parameters())))
    assert valuer._slopes is not None
    gated = [slope for slope in valuer._slopes.by_name.values() if "gated" in slope.node.op]
    assert gated
    assert all(slope.parts for slope in gated)
