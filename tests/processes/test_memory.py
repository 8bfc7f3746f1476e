"""What data in pieces hold at once is that of one batch, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from judges.memory import peak_bytes

CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "evaluate": lambda model, loader: sf.evaluate(model, loader, sf.CrossEntropy()),
    "gradient": lambda model, loader: sf.oracles.gradient(sf.Chain(model, loader), sf.CrossEntropy()),
    "gauss_newton": lambda model, loader: sf.oracles.gauss_newton(
        sf.Chain(model, loader), sf.CrossEntropy(), method="primal", tolerance=0.3
    ),
    "descent": lambda model, loader: sf.CertifiedDescent(model, sf.CrossEntropy()).step(loader),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_that_of_one_batch(name: str) -> None:
    torch.manual_seed(0)
    hidden = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(64, 3)).double()
    x, y = torch.randn(1600, 64).double(), torch.arange(1600) % 3

    def most(count: int) -> int:
        loader = list(zip(x[: 200 * count].split(200), y[: 200 * count].split(200), strict=True))
        return peak_bytes(lambda: CALLS[name](model, loader))

    assert most(8) <= 1.2 * most(1)
