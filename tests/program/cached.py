"""What the tests of the cache of captures share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.program import capture, values_of

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def assert_current(model: nn.Module, x: Tensor = X) -> None:
    """What capture returns now computes what the model computes now."""
    program = capture(model, x)
    (value,) = program.results(values_of(program, model, x))
    assert torch.allclose(value, model(x), atol=1e-6)


class Custom(nn.Module):
    """A linear layer behind something that reads what a test likes."""

    gain = 1.0

    def __init__(self, function: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function
        for key, value in attributes.items():
            setattr(self, key, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.layer(self.function(self, x))
