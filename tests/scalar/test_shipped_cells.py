"""The cells that come with the package are those that ball arithmetic computes, and the activations find them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.calculus.analysis import Analysis
from surefoot.scalar import ScalarFunction
from surefoot.scalar.table import CELLS, Grid, shipped

MODULES = [
    nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU, lambda: nn.GELU(approximate="tanh"), nn.SiLU, nn.Softplus, nn.Mish,
    nn.ELU, nn.SELU, nn.CELU, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.LeakyReLU, nn.RReLU,
    nn.ReLU6, nn.Hardtanh, nn.Softshrink, nn.Hardshrink,
]  # fmt: skip


@pytest.mark.parametrize("function", shipped(), ids=shipped().values())
def test_what_is_stored_is_what_is_computed(function: ScalarFunction) -> None:
    grid, name = Grid(function), shipped()[function]
    with np.load(CELLS) as file:
        assert float(file[f"{name}.step"]) == grid.step
        assert np.array_equal(file[name], grid.rows, equal_nan=True)


def test_every_activation_finds_its_own() -> None:
    names = set()
    for build in MODULES:
        graph = Analysis.of(nn.Sequential(nn.Linear(2, 2), build()).eval(), torch.zeros(1, 2)).reading.prepared
        (function,) = [node.arguments["function"] for node in graph.nodes if node.op == "surefoot.scalar"]
        names.add(shipped()[function])
    assert names == set(shipped().values())
