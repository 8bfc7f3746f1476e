"""The command line in this process: ``surefoot("certify", "mlp")``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot.cli.commands import app

Surefoot = Callable[..., Any]

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make(width=5):
    return Net(width)


def pair():
    return Net(), torch.arange(8.0).reshape(2, 4)


class Singular(Net):
    def forward(self, x):
        return torch.linalg.svdvals(self.a(x)[:, :4])


class Dropping(Net):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Adding(Net):
    def forward(self, x, y):
        return super().forward(x) + self.b.weight.sum() * y


class Broken(Net):
    def __init__(self):
        raise RuntimeError("no such wheel")


number = 3
"""


@pytest.fixture
def surefoot(monkeypatch: pytest.MonkeyPatch) -> Surefoot:
    """Run a command; its exit code, standard output and standard error. No screen limits it."""
    monkeypatch.delenv("COLUMNS", raising=False)  # which workers of pytest set
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, with a module ``mine`` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("mine", None)
