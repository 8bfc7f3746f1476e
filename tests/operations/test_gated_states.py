"""Gated states as functions of gates and states before: no entry's slope or curvature exceeds what is claimed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jacrev, vmap

import surefoot as sf
from judges import assert_upper_bound
from surefoot.enclosure import Enclosure
from surefoot.graph.nodes import Node, Ref, Spec
from surefoot.magnitude import Magnitude
from surefoot.operations import recurrent
from surefoot.operations.call import Bounds, Call
from surefoot.operations.record import records

D = torch.float64
Function = Callable[[Tensor], Tensor]


def _cell(x: Tensor) -> Tensor:
    i, f, g, _, c = x
    return f.sigmoid() * c + i.sigmoid() * g.tanh()


def _output(x: Tensor) -> Tensor:
    return x[3].sigmoid() * _cell(x).tanh()


def _state(x: Tensor) -> Tensor:
    ar, az, an, br, bz, bn, h = x
    reset, update = (ar + br).sigmoid(), (az + bz).sigmoid()
    return torch.lerp((an + reset * bn).tanh(), h, update)


_LSTM, _GRU = {"gates": slice(0, 4), "cell": slice(4, 5)}, {
    "inputs": slice(0, 3), "recurrent": slice(3, 6), "state": slice(6, 7)
}  # fmt: skip
_SUBJECTS: dict[str, tuple[Function, Callable[..., Tensor], dict[str, slice]]] = {
    "surefoot.gated_cell": (_cell, recurrent.gated, _LSTM),
    "surefoot.gated_output": (_output, recurrent.gated, _LSTM),
    "surefoot.gated_state": (_state, recurrent.state_of, _GRU),
}


def _claims(op: str, peaks: dict[str, float], slopes: dict[str, float]) -> Bounds:
    """What the rule says of tensors with such largest entries; their slopes in the one variable are given."""
    record, spec = records()[op], Spec((1, 1), D)
    slots = ("self", *record.lends)
    infinite = Magnitude.infinity()
    enclosures = {
        slot: Enclosure(spec, None, infinite, Magnitude.of(peaks.get(slot, 1e300)), infinite, None, infinite,
                        Magnitude.of([slopes.get(slot, 1e300)]))
        for slot in slots
    }  # fmt: skip
    assert record.bounds is not None
    node = Node("z", op, _SUBJECTS[op][1], tuple(map(Ref, slots)), {}, "", spec)
    return record.bounds(Call(node, enclosures))


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("op", _SUBJECTS)
def test_slopes_and_curvatures(op: str, size: float) -> None:
    function, _, parts = _SUBJECTS[op]
    torch.manual_seed(0)
    last = {"cell": size, "state": min(size, 1.0)}
    peaks = {slot: last.get(slot, 6.0 if slot != "recurrent" else size) for slot in parts}
    scale = torch.cat(
        [torch.full((part.stop - part.start,), peaks[slot], dtype=D) for slot, part in parts.items()]
    )
    points = (2 * torch.rand(40_000, len(scale), dtype=D) - 1) * scale
    points[::2] *= torch.rand(20_000, len(scale), dtype=D) ** 2  # more of them where gates are half open
    points[::5, -1] = torch.sign(points[::5, -1]) * scale[-1]
    slopes, bends = vmap(jacrev(function))(points), vmap(hessian(function))(points)
    moves = {slot: float(torch.rand(())) + 0.1 for slot in parts}
    claimed = _claims(op, peaks, moves)
    assert claimed.instead is not None
    assert claimed.lipschitz is not None
    moved = sum(slopes[:, part].norm(dim=1) * moves[slot] for slot, part in parts.items())
    assert isinstance(moved, Tensor)
    assert 0.5 < float(moved.max()) / float(claimed.lipschitz[0]) <= 1
    for slot, part in parts.items():
        assert 0.6 < float(slopes[:, part].norm(dim=1).max()) / float(claimed.instead.jacobian[slot]) <= 1
        for other, columns in parts.items():
            block = torch.linalg.matrix_norm(bends[:, part, columns], 2).max()
            pair = (slot, other) if (slot, other) in claimed.instead.curvature else (other, slot)
            known = claimed.instead.curvature.get(pair)
            assert float(block) <= (0.0 if known is None else float(known))
            assert known is None or float(block) > 0.15 * float(known)


class _Outputs(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


@pytest.mark.parametrize(("layer", "most"), [(nn.LSTM, 60), (nn.GRU, 32)])
def test_long_sequences(layer: Callable[..., nn.Module], most: int) -> None:
    """Operation by operation the smoothness of 50 steps would be 1e91 and 1e79."""
    torch.manual_seed(0)
    model, x = _Outputs(layer(8, 16, batch_first=True)).double(), torch.randn(2, 50, 8, dtype=D)
    assert sf.certify(model, x, domain=sf.ProductBall(1.0)).smoothness < Magnitude.of(10.0) ** most


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_certificates_hold_on_the_ball(layer: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = _Outputs(layer(2, 2)).double(), 2 * torch.randn(3, 1, 2, dtype=D)
    certificate = sf.certify(model, x, domain=sf.ProductBall(1.0))
    shapes = {name: value.shape for name, value in model.named_parameters()}

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        found: Tensor = torch.func.functional_call(model, weights, (x,))
        return found.flatten()

    count = sum(shape.numel() for shape in shapes.values())
    for _ in range(3):
        point = torch.nn.functional.normalize(torch.randn(count, dtype=D), dim=0)
        assert float(torch.linalg.matrix_norm(jacrev(outputs)(point), 2)) <= float(certificate.lipschitz)
        bends = hessian(outputs)(point)
        assert float(torch.linalg.matrix_norm(bends, 2).max()) <= float(certificate.smoothness)


class _Loss(_Outputs):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("domain", [sf.ProductBall(1.0), sf.Ball(0.01)])
def test_certificates_of_one_number_hold(
    layer: Callable[..., nn.Module], domain: sf.ProductBall | sf.Ball
) -> None:
    torch.manual_seed(0)
    model, x = _Loss(layer(2, 2)).double(), torch.randn(3, 2, 2, dtype=D)
    certificate = sf.certify(model, x, domain=domain)
    assert certificate.smoothness.is_finite
    assert_upper_bound(certificate, model, x, domain, starts=1, steps=1)


class _OneKeepsOneTurns(nn.Module):
    """A cell of a GRU whose first unit keeps its state and whose second takes the new one: (v, tanh v)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(1, 2).double()
        with torch.no_grad():
            for weights in self.cell.parameters():
                weights.zero_()
            self.cell.weight_ih[5, 0] = 1.0
            self.cell.bias_ih[2:4] = torch.tensor([30.0, -30.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, torch.cat([x, torch.zeros_like(x)], dim=1))


def test_units_with_different_gates_move_together() -> None:
    model, x = _OneKeepsOneTurns(), torch.zeros(1, 1, dtype=D)
    steepness = float(jacrev(model)(x).detach().norm())
    assert 1.414 < steepness <= float(sf.certify(model, x, domain=sf.Ball(1e-3), wrt="input").lipschitz)
