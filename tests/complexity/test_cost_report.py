"""The table and the public name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.complexity import cost
from surefoot.complexity.report import engineering


def test_the_table_has_every_computation_and_step() -> None:
    assert sf.cost is cost  # importing a part of the package does not hide the function
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    found = sf.cost(model, torch.ones(5, 4))
    lines = [line.split() for line in str(found).splitlines()]
    assert ["φ_1", "linear", "→", "relu", "15", "15", "60", "15", "15", "90"] in lines
    assert ["all", "23", "25", "90", "25", "15", "130"] in lines
    assert ["Gauss-Newton,", "dual", "21", "7.66", "k", "21"] in lines  # of 145 + 220 each
    assert ["forward", "90", "90"] in lines
    assert max(map(len, str(found).splitlines())) <= 115


def test_a_long_computation_is_cut() -> None:
    options = sf.zoo.small_options("gpt-tied")
    text = str(sf.cost(sf.zoo.build("gpt-tied", **options), sf.zoo.example_input("gpt-tied", **options)))
    assert "…" in text
    assert max(map(len, text.splitlines())) <= 130


def test_nothing_but_layout() -> None:
    flat = sf.cost(nn.Flatten(), torch.ones(2, 3, 4))
    assert flat.forward == flat.counted.backward == 0
    assert flat.refined.ratio == flat.oracles[0].relative == 1.0
    assert "Cost of a chain" in str(flat)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (999, "999"), (1000, "1.00 k"), (9995, "10.0 k"), (99_949, "99.9 k"), (99_950, "100 k"),
        (999_499, "999 k"), (999_500, "1.00 M"), (10**18, "1.00 E"), (10**21, "1.00e+21"), (10**400, "1.00e+400"),
    ],
)  # fmt: skip
def test_engineering(count: int, text: str) -> None:
    assert engineering(count) == text
