"""The shipped constants of the activations of torch.nn are what branch and bound computes.

Run this file to write them: ``python tests/scalar/test_scalar_constants.py``.
"""

from __future__ import annotations

import json
import time
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from surefoot.scalar import ScalarFunction, bounds, supremum

NAMES = (
    "relu leaky_relu rrelu elu celu selu gelu silu mish softplus sigmoid log_sigmoid tanh softsign hardtanh relu6 "
    "hardswish hardsigmoid tanhshrink softshrink hardshrink"
)
DEFAULTS: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in NAMES.split(" ")),
    ("gelu", {"approximate": "tanh"}),
]
SHIPPED = files("surefoot.scalar").joinpath("constants.json")


def row(name: str, parameters: dict[str, str]) -> dict[str, Any]:
    """The constants of one activation, computed afresh."""
    function = ScalarFunction.named(name, **parameters)
    with patch.object(bounds, "_shipped", dict):
        suprema = [supremum.__wrapped__(function, order) for order in range(bounds.HIGHEST_ORDER + 1)]
    return {"name": name, "parameters": parameters, "suprema": suprema}


@pytest.mark.parametrize(("name", "parameters"), DEFAULTS)
def test_shipped_constants_are_computed_ones(name: str, parameters: dict[str, str]) -> None:
    shipped = [r for r in json.loads(SHIPPED.read_text()) if (r["name"], r["parameters"]) == (name, parameters)]
    (expected,), computed = shipped, row(name, parameters)
    assert expected == computed
    function = ScalarFunction.named(name, **parameters)
    assert [supremum(function, order) for order in range(6)] == expected["suprema"]


def test_nothing_else_is_shipped_and_reading_is_fast() -> None:
    assert [(r["name"], r["parameters"]) for r in json.loads(SHIPPED.read_text())] == DEFAULTS
    bounds._shipped.cache_clear()
    start = time.process_time()
    assert len(bounds._shipped()) >= len(DEFAULTS) - 2  # ELU and CELU, Hardtanh and others may be one function
    assert time.process_time() - start < 0.2


if __name__ == "__main__":
    Path(str(SHIPPED)).write_text("[\n" + ",\n".join(json.dumps(row(*pair)) for pair in DEFAULTS) + "\n]\n")
