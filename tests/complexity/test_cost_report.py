"""The table, the dictionary and the public name."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.complexity import Cost, cost
from surefoot.complexity.report import engineering


@pytest.fixture(scope="module")
def found() -> Cost:
    return cost(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.ones(5, 4))


def test_dictionary_is_json(found: Cost) -> None:
    loaded = json.loads(json.dumps(found.to_dict()))
    assert loaded["forward"] == found.forward
    assert [layer["bilinear"] for layer in loaded["computations"]] == [60, 30]
    assert loaded["counted"]["forward"] == 90
    assert loaded["oracles"][1]["calls"] == 21


def test_table_has_every_computation_and_step(found: Cost) -> None:
    text = str(found)
    assert "φ_1  linear → relu" in text
    assert "φ_2  linear" in text
    for oracle in found.oracles:
        assert oracle.name in text
    assert max(map(len, text.splitlines())) <= 115


def test_table_of_one_long_computation() -> None:
    from surefoot import zoo

    options = zoo.small_options("gpt-tied")
    text = str(cost(zoo.build("gpt-tied", **options), zoo.example_input("gpt-tied", **options)))
    assert "…" in text
    assert max(map(len, text.splitlines())) <= 130


def test_nothing_but_layout() -> None:
    flat = cost(nn.Flatten(), torch.ones(2, 3, 4))
    assert flat.forward == 0
    assert flat.refined.ratio == 1.0
    assert flat.oracles[0].relative == 1.0
    assert flat.counted.backward == 0
    assert "Cost of a chain" in str(flat)


def test_public_name_is_the_function() -> None:
    """Importing a part of the package must not hide the function."""
    assert sf.cost is cost
    assert sf.cost(nn.Linear(4, 3), torch.ones(5, 4)).products == 60


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (9995, "10.0 k"),
        (99_949, "99.9 k"),
        (99_950, "100 k"),
        (999_499, "999 k"),
        (999_500, "1.00 M"),
        (10**18, "1.00 E"),
        (10**21, "1.00e+21"),
        (10**400, "1.00e+400"),
    ],
)
def test_engineering(count: int, text: str) -> None:
    assert engineering(count) == text
