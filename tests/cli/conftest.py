"""The command line in this process: ``surefoot("certify", "mlp")``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from surefoot.cli.commands import app

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


class Singular(Net):
    def forward(self, x):
        return torch.linalg.svdvals(self.a(x)[:, :4])


class Dropping(Net):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Broken(Net):
    def __init__(self):
        raise RuntimeError("no such wheel")


class Printing(Net):
    def __init__(self):
        super().__init__()
        print("made")

    def forward(self, x):
        print("called")
        return super().forward(x)


class Double(Net):
    def __init__(self):
        super().__init__()
        self.double()


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


number = 3
"""


@pytest.fixture
def surefoot(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command; its exit code, standard output and standard error. No screen limits it."""
    monkeypatch.delenv("COLUMNS", raising=False)  # which workers of pytest set
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with a module ``mine`` and a file of data in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(MODULE)
    data()
    yield tmp_path
    sys.modules.pop("mine", None)


def data(name: str = "points.npz", **changes: np.ndarray) -> str:
    """A file of 40 samples of three classes, with some of its arrays changed."""
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    np.savez(name, **{"x": x, "y": np.argmax(x[:, :3], axis=1), **changes})
    return name
