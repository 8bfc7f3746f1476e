"""A quick look notices whatever a survey would, or says that it cannot tell."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.graph.guard import Guard

SCALE = 1.0


class Scaled(nn.Module):
    """Reads an attribute, a list, a global name and a class attribute."""

    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain, self.powers = nn.Linear(3, 3), 1.0, [1, 2]
        self.options: dict[str, Any] = {}
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return SCALE * self.gain * self.linear(x) + self.offset + self.shift


def _share(model: Scaled) -> None:
    model.linear.weight.data = model.linear.weight.data.t()


def _replace_forward(model: Scaled) -> None:
    model.forward = types.MethodType(lambda self, x: x, model)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "mode": lambda m: m.eval(),
    "attribute": lambda m: setattr(m, "gain", 2.0),
    "list": lambda m: m.powers.append(3),
    "entry of a list": lambda m: m.powers.__setitem__(0, 7),
    "empty dictionary": lambda m: m.options.update(a=1),
    "frozen": lambda m: m.linear.bias.requires_grad_(False),
    "hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "module": lambda m: setattr(m, "linear", nn.Linear(3, 3)),
    "parameter": lambda m: setattr(m.linear, "bias", nn.Parameter(torch.zeros(3))),
    "memory of a parameter": _share,
    "type": lambda m: m.double(),
    "buffer": lambda m: setattr(m, "shift", torch.ones(3)),
    "forward": _replace_forward,
    "new attribute": lambda m: setattr(m, "extra", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    model = Scaled()
    guard = Guard(model)
    assert guard.possible
    model(torch.ones(2, 3)).sum().backward()  # which changes values and gradients alone
    with torch.no_grad():
        model.linear.weight.add_(1.0)
    assert guard.holds()
    CHANGES[change](model)
    assert not guard.holds()


def test_code_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    for owner, name in ((Scaled, "offset"), (globals(), "SCALE"), (nn.Linear, "forward")):
        guard = Guard(model)
        assert guard.holds()
        with monkeypatch.context() as patch:
            if isinstance(owner, dict):
                patch.setitem(owner, name, 5.0)
            else:
                patch.setattr(owner, name, lambda *_: 5.0)
            assert not guard.holds()
        assert guard.holds()


def test_surroundings_are_looked_at() -> None:
    guard = Guard(Scaled())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not guard.holds()
    handle.remove()
    assert guard.holds()
    torch.set_default_dtype(torch.float64)
    try:
        assert not guard.holds()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "value",
    [np.ones(2), torch.ones(2), torch.Generator(), bytearray(b"a")],
    ids=["array", "tensor", "generator", "bytes"],
)
def test_what_has_to_be_read_is_not_guarded(value: Any) -> None:
    model = Scaled()
    model.extra = value
    assert not Guard(model).holds()
