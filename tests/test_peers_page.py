"""The page beside other packages says where surefoot is behind, and its own tools are right."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def lipschitz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import input_lipschitz

    return input_lipschitz


def test_the_semidefinite_program_is_that_of_surefoot(lipschitz: ModuleType) -> None:
    model = lipschitz.random_network((4, 8, 6, 3), 0)
    weights = [layer.weight.detach() for layer in model if isinstance(layer, torch.nn.Linear)]
    solved, proved = lipschitz.lipsdp(weights), lipschitz.certified(model)
    assert solved * (1 - 1e-6) <= proved <= 1.001 * solved
    product = math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)
    assert solved < product


def test_an_exponent_is_a_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.growth import exponent

    assert exponent((2, 4, 8), (1.0, 8.0, 64.0)) == pytest.approx(3.0)


def test_rows_that_are_behind_say_so() -> None:
    text = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == [
        "Second-order steps", "Lipschitz constants in the input", "Training", "Taylor bounds", "Growth",
    ]  # fmt: skip
    training = text.partition("\n## Training")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in training.splitlines() if line.startswith("| digits")]
    judged = [row for row in rows if row[3].strip()]
    assert len(judged) > 8
    for row in judged:
        ratio, verdict = float(row[3]), row[4].strip()
        assert verdict == ("**behind**" if ratio < 0.95 else "ahead" if ratio > 1.06 else verdict)
